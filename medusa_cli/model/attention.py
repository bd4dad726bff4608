"""Gives transformers' layers attention with grouped heads, masks by kind of layer, and the cache."""

import math
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.errors import UserError
from medusa_cli.files.layer_kinds import CHUNKED, FULL, KINDS, SLIDING

NAME = "medusa_grouped"
# Attends query, key and value [B, heads, n, D] at a scaling to [B, n, heads, D]; may take the place
# of a mask.
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

    The G query heads of a key head become G*n rows of one call: a cache of L positions is read
    once, not copied G times. An empty mask is causal, for which n is L. options: softcap, a bound
    of the scores; s_aux [G*KV], the scores of attention sinks.
    """
    if options.get("position_bias") is not None:
        raise ValueError("its attention adds a bias by relative position")
    softcap: Any = options.get("softcap")
    sinks: Any = options.get("s_aux")
    special = softcap is not None or sinks is not None
    if callable(attention_mask) and not isinstance(attention_mask, Tensor):
        if special:
            raise UserError(
                "extra rows do not know the soft caps or sinks of this model's attention",
                "use a drafter other than firp, such as drafter=hydra",
            )
        return attention_mask(query, key, value, scaling), None
    if special:
        return _attend_by_scores(query, key, value, attention_mask, scaling, softcap, sinks), None
    if attention_mask is not None and not attention_mask.numel():
        attended = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.transpose(1, 2).contiguous(), None
    batch, heads, rows, dim = query.shape  # values may have another width
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * rows, dim)
        if attention_mask is not None and rows > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return attended.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


def _attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attends as `grouped_attention`, with scores of its own: torch's function has no caps and no sinks.

    A sink is one more column of scores that has no value: it only takes its share of the softmax.
    """
    batch, heads, rows, dim = query.shape
    shared, columns = key.shape[1:3]
    groups = heads // shared
    if mask is None or not mask.numel():
        mask = additive(
            torch.ones(rows, columns, dtype=torch.bool, device=key.device).tril(), query.dtype
        )[None, None]
    grouped = query.reshape(batch, shared, groups * rows, dim)
    scores = grouped @ key.transpose(-1, -2) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.view(batch, shared, groups, rows, columns) + mask[:, :, None]
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, shared, groups, 1, 1).expand(batch, -1, -1, rows, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., :columns].to(value.dtype)
    attended = weights.view(batch, shared, groups * rows, columns) @ value
    return attended.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous()


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
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, torch.finfo(dtype).min
    )


class Masks:
    """Additive masks by kind of attention; a sliding window, and a chunk, count positions, not rows.

    Layers that keep a running state have none: they see what precedes them.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.window: float = getattr(config, "sliding_window", None) or math.inf
        self.chunk: int = getattr(config, "attention_chunk_size", None) or 0
        names = getattr(config, "layer_types", None)
        if not names:
            windowed = self.window < math.inf and getattr(config, "use_sliding_window", True)
            names = [SLIDING if windowed else FULL]
        self._names = set(names)  # as transformers calls the layers
        self._by_layer: list[str | None] = [KINDS.get(name, name) for name in names]
        self.kinds = sorted({kind for kind in self._by_layer if kind is not None})

    def layer_type(self, layer: int) -> str:
        """Returns the kind of attention of a layer."""
        return self._by_layer[layer] or FULL if len(self.kinds) > 1 else self.kinds[0]

    def layers_with_keys(self, layers: int) -> int:
        """Returns how many of the layers attend."""
        if len(self._by_layer) < layers:  # all are alike
            return layers
        return sum(kind is not None for kind in self._by_layer)

    def for_network(self, masks: dict[str, Tensor]) -> Any:
        """Returns masks [B, 1, n, L] by kind as a network takes them; the mask itself if there is one kind."""
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
        """Limits `visible` [(B,) n, L], the columns that rows see, to the reach of layers of a kind."""
        if kind == FULL:
            return visible
        if kind == CHUNKED:
            return visible & (positions[..., None] // self.chunk == columns // self.chunk)
        return visible & (positions[..., None] - columns < self.window)

    def additive(self, visible: Tensor, positions: Tensor, columns: Tensor) -> dict[str, Tensor]:
        """Returns the additive masks [(B,) n, L] by kind; arguments as of `visible`."""
        return {
            kind: additive(self.visible(kind, visible, positions, columns), self.dtype)
            for kind in self.kinds
        }

    def causal(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Returns causal masks [1, n, n] of n rows by kind; an empty one stands for all earlier rows."""
        positions = torch.arange(rows, device=device)
        masks = {}
        for kind in self.kinds:
            if kind == FULL or rows <= (self.chunk if kind == CHUNKED else self.window):
                masks[kind] = torch.empty(1, 0, 0, dtype=self.dtype, device=device)
            else:
                mask = self.visible(kind, positions <= positions[:, None], positions, positions)
                masks[kind] = additive(mask, self.dtype)[None]
        return masks
