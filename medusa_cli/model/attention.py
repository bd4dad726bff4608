"""Gives transformers' layers attention with grouped heads, masks by kind of layer, and the cache."""

import math
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.errors import UserError

NAME = "medusa_grouped"
FULL = "full_attention"  # a kind of layer
# Attends query, key and value [B, heads, n, D] at a scaling to [B, n, heads, D]; may take the place of a mask.
Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Attend | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: object,
) -> tuple[Tensor, None]:
    """Attends query [B, G*KV, n, D] to key/value [B, KV, L, D] under an additive mask [B, 1, n, L] to [B, n, G*KV, D].

    The G query heads of a key head become G*n rows of one call: a cache of L positions is read once, not copied G
    times. An empty mask is causal, for which n is L.
    """
    for option in ("softcap", "s_aux"):
        if options.get(option) is not None:
            raise UserError(
                f"this model's attention uses {option!r}, which tree verification does not support",
                "use a model with plain softmax attention",
            )
    if callable(attention_mask) and not isinstance(attention_mask, Tensor):
        return attention_mask(query, key, value, scaling), None
    if attention_mask is not None and not attention_mask.numel():
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return attended.transpose(1, 2).contiguous(), None
    batch, heads, rows, dim = query.shape  # values may have another width
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * rows, dim)
        if attention_mask is not None and rows > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


def _no_mask(*_: object, **__: object) -> None:
    """Fails: the backbone always passes a finished mask, so transformers must not build one."""
    raise RuntimeError("it builds attention masks of its own")


def register() -> None:
    """Registers this attention in transformers under NAME; safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


@cache
def cache_name(forward: Callable[..., Any]) -> str:
    """Returns the name of the cache among the arguments of a network's or a layer's `forward`.

    transformers 5.24 renamed it, which the files that come with a model may not know.
    """
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 0 where a bool mask is True, the lowest number of dtype elsewhere.

    A bool mask given straight to a model is silently wrong under eager attention.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


class Masks:
    """Additive masks by kind of layer; a sliding window counts positions, not rows."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.window: float = getattr(config, "sliding_window", None) or math.inf
        kinds = getattr(config, "layer_types", None)
        if not kinds:
            windowed = self.window < math.inf and getattr(config, "use_sliding_window", True)
            kinds = ["sliding_attention" if windowed else FULL]
        self._by_layer: list[str] = list(kinds)
        self.kinds = sorted(set(kinds))

    def layer_type(self, layer: int) -> str:
        """Returns the kind of a layer."""
        return self._by_layer[layer] if len(self.kinds) > 1 else self.kinds[0]

    def visible(self, kind: str, visible: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        """Returns what rows at `positions` see in layers of a kind: `visible` [(B,) n, L] of `columns` [L] in range."""
        if kind == FULL:
            return visible
        return visible & (positions[..., None] - columns < self.window)

    def additive(self, visible: Tensor, positions: Tensor, columns: Tensor) -> dict[str, Tensor]:
        """Returns the additive masks [(B,) n, L] by kind; arguments as of `visible`."""
        return {kind: additive(self.visible(kind, visible, positions, columns), self.dtype) for kind in self.kinds}

    def causal(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Returns causal masks [1, n, n] of n rows by kind; an empty one stands for all earlier rows."""
        positions = torch.arange(rows, device=device)
        masks = {}
        for kind in self.kinds:
            if kind == FULL or rows <= self.window:
                masks[kind] = torch.empty(1, 0, 0, dtype=self.dtype, device=device)
            else:
                mask = self.visible(kind, positions <= positions[:, None], positions, positions)
                masks[kind] = additive(mask, self.dtype)[None]
        return masks
