"""Pseudo rows: guessed states of tokens yet to come, which join a forward pass in a middle layer."""

from collections.abc import Callable
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


class PseudoRows:
    """The pseudo rows of one pass over B sequences of n rows, made of `sources` [m] of these: m rows a map."""

    def __init__(self, pseudo: Pseudo, sources: Tensor) -> None:
        self.pseudo, self.sources = pseudo, sources

    @property
    def count(self) -> int:
        """How many a sequence has in the last layer."""
        return len(self.pseudo.layers) * len(self.sources)

    def place(self, sees: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """Who sees whom among rows and pseudo rows [B, n + K m, n + K m], and their depths [B, n + K m]."""
        batch, m, steps = len(sees), len(self.sources), len(self.pseudo.layers)
        own = torch.eye(m, dtype=torch.bool, device=sees.device)
        ahead = (self.pseudo.sees(sees.device)[:, None, :, None] & own[None, :, None]).view(steps * m, steps * m)
        unseen = sees.new_zeros(*sees.shape[:2], steps * m)
        below = torch.cat([sees[:, self.sources].repeat(1, steps, 1), ahead.expand(batch, -1, -1)], dim=2)
        places = [depth[:, self.sources] + k for k in range(1, steps + 1)]
        return torch.cat([torch.cat([sees, unseen], dim=2), below], dim=1), torch.cat([depth, *places], dim=1)

    def enter(self, layer: int, x: Tensor) -> Tensor:
        """The states [B, rows, H] before a layer with those that enter there appended."""
        fresh = [apply(x[:, self.sources]) for apply in self.pseudo.entering(layer)]
        return torch.cat([x, *fresh], dim=1) if fresh else x

    def part(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Part final states [B, n + K m, H] into the rows' [B, n, H] and their pseudo rows' [B, m, K, H]."""
        batch, m, steps = len(states), len(self.sources), len(self.pseudo.layers)
        rows, ahead = states.split([states.shape[1] - steps * m, steps * m], dim=1)
        return rows, ahead.reshape(batch, steps, m, -1).transpose(1, 2)
