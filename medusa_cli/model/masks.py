"""Additive attention masks, by the kind of attention of a layer."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from medusa_cli.files.layer_kinds import CHUNKED, FULL, KINDS, SLIDING


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask with 0 where a bool mask is True, and the lowest number of dtype elsewhere.

    A bool mask passed directly to a model gives silently wrong results with eager attention.
    """
    visible, hidden = _ends(dtype, mask.device)
    return torch.where(mask, visible, hidden)


@cache
@torch.inference_mode(False)
def _ends(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns 0 and the lowest number of a type, in tensors that all masks share."""
    return [
        torch.full((), value, dtype=dtype, device=device) for value in (0, torch.finfo(dtype).min)
    ]


class Masks:
    """Builds additive masks for each kind of attention; sliding windows and chunks count positions, not rows.

    Layers that keep a running state have no mask: in such a layer, a token sees all tokens before it.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.window: float = getattr(config, "sliding_window", None) or math.inf
        self.chunk: int = getattr(config, "attention_chunk_size", None) or 0
        names = getattr(config, "layer_types", None)
        if not names:
            windowed = self.window < math.inf and getattr(config, "use_sliding_window", True)
            names = [SLIDING if windowed else FULL]
        self._names = set(names)  # transformers' names of the layers
        self._by_layer: list[str | None] = [KINDS.get(name, name) for name in names]
        self.kinds = sorted({kind for kind in self._by_layer if kind is not None})

    def layer_type(self, layer: int) -> str:
        """Returns the kind of attention of a layer."""
        return self._by_layer[layer] or FULL if len(self.kinds) > 1 else self.kinds[0]

    def layers_with_keys(self, layers: int) -> int:
        """Returns how many of the layers have attention."""
        if len(self._by_layer) < layers:  # all layers are alike
            return layers
        return sum(kind is not None for kind in self._by_layer)

    def for_network(self, masks: dict[str, Tensor]) -> Any:
        """Returns masks [B, 1, n, L] by kind, as a network expects them; one mask instead if there is one kind."""
        by_kind = {kind: mask[:, None] for kind, mask in masks.items()}
        if len(by_kind) <= 1:
            return next(iter(by_kind.values()), None)
        by_name = {
            name: by_kind[kind]
            for name in self._names
            if (kind := KINDS.get(name, name)) is not None
        }
        return {**dict.fromkeys(KINDS), **by_kind, **by_name}

    def visible(self, kind: str, visible: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        """Returns `visible` [(B,) n, L], the columns that rows see, limited to those that layers of a kind can see."""
        if kind == FULL:
            return visible
        if kind == CHUNKED:
            return visible & (positions[..., None] // self.chunk == columns // self.chunk)
        return visible & (positions[..., None] - columns < self.window)

    def additive(self, visible: Tensor, positions: Tensor, columns: Tensor) -> dict[str, Tensor]:
        """Returns the additive masks [(B,) n, L] by kind; the arguments are those of `visible`."""
        return {
            kind: additive(self.visible(kind, visible, positions, columns), self.dtype)
            for kind in self.kinds
        }

    def causal(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Returns causal masks [1, n, n] for n rows by kind; an empty mask means that rows see all earlier rows."""
        positions = torch.arange(rows, device=device)
        masks = {}
        for kind in self.kinds:
            if kind == FULL or rows <= (self.chunk if kind == CHUNKED else self.window):
                masks[kind] = torch.empty(1, 0, 0, dtype=self.dtype, device=device)
            else:
                mask = self.visible(kind, positions <= positions[:, None], positions, positions)
                masks[kind] = additive(mask, self.dtype)[None]
        return masks
