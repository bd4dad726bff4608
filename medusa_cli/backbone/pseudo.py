"""Pseudo rows: states of tokens yet to come that join a forward pass in a middle layer and ride in it to the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pseudo:
    """K maps [.., H] -> [.., H]: map k makes a row's k-th pseudo row of its state after layers[k] layers.

    Pseudo row k (from 1) of a row at position p stands at p + k. It sees what that row sees, itself and, unless
    `masked`, the row's pseudo rows before it; no other row sees it. layers do not decrease (FIRP, section 3.2).
    """

    layers: tuple[int, ...]
    maps: tuple[Callable[[Tensor], Tensor], ...]
    masked: bool = False

    def entering(self, layer: int) -> list[Callable[[Tensor], Tensor]]:
        """The maps whose rows enter before the layer of this index (from 0)."""
        return [one for at, one in zip(self.layers, self.maps, strict=True) if at == layer]

    def sees(self, device: torch.device) -> Tensor:
        """Which pseudo rows of one row see which others, bool [K, K]."""
        steps = len(self.layers)
        every = torch.ones(steps, steps, dtype=torch.bool, device=device)
        return torch.eye(steps, dtype=torch.bool, device=device) if self.masked else every.tril()


class Riders:
    """The pseudo rows of one pass over n rows, made of `sources` [m] of them: m rows a step, step after step."""

    def __init__(self, pseudo: Pseudo, sources: Tensor) -> None:
        self.pseudo, self.sources = pseudo, sources

    @property
    def growth(self) -> Sequence[tuple[int, int]]:
        """From which layer on there are how many rows more."""
        return [(layer, len(self.sources)) for layer in self.pseudo.layers]

    def seat(self, among: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """Who sees whom among rows and pseudo rows [n + K m, n + K m], and their depths [n + K m]."""
        m, steps = len(self.sources), len(self.pseudo.layers)
        own = torch.eye(m, dtype=torch.bool, device=among.device)
        ahead = (self.pseudo.sees(among.device)[:, None, :, None] & own[None, :, None]).view(steps * m, steps * m)
        unseen = among.new_zeros(len(among), steps * m)
        seen = torch.cat([among[self.sources].repeat(steps, 1), ahead], dim=1)
        places = [depth[self.sources] + k for k in range(1, steps + 1)]
        return torch.cat([torch.cat([among, unseen], dim=1), seen]), torch.cat([depth, *places])

    def enter(self, layer: int, x: Tensor) -> Tensor:
        """The states [1, rows, H] before a layer with those that enter there appended."""
        fresh = [apply(x[:, self.sources]) for apply in self.pseudo.entering(layer)]
        return torch.cat([x, *fresh], dim=1) if fresh else x

    def leave(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Split final states [n + K m, H * taps] into the rows' [n, H * taps] and the pseudo rows' [m, K, H * taps]."""
        m, steps = len(self.sources), len(self.pseudo.layers)
        rows, ahead = states.split([len(states) - steps * m, steps * m])
        return rows, ahead.view(steps, m, -1).transpose(0, 1)
