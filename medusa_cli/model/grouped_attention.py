"""Attention with grouped heads for transformers' layers."""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.errors import OTHER_THAN_FIRP, UserError
from medusa_cli.model.masks import additive

NAME = "medusa_grouped"
# Returns the attention [B, n, heads, D] for query, key and value [B, heads, n, D] and a scaling.
# Such a function may be passed instead of a mask.
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
    """Returns the attention [B, n, G*KV, D] of query [B, G*KV, n, D] over key and value [B, KV, L, D].

    attention_mask: an additive mask [B, 1, n, L]; an empty mask stands for a causal mask, for which n is
    L. The G query heads of a key head become G*n rows of one call, so that a cache of L positions
    is read once and not copied G times. options: softcap, a bound on the scores; s_aux [G*KV], the
    scores of attention sinks. Raises ValueError for a relative position bias.
    """
    if options.get("position_bias") is not None:
        raise ValueError("its attention adds a bias by relative position")
    softcap: Any = options.get("softcap")
    sinks: Any = options.get("s_aux")
    special = softcap is not None or sinks is not None
    if callable(attention_mask) and not isinstance(attention_mask, Tensor):
        if special:
            fault = "extra rows do not know the soft caps or sinks of this model's attention"
            raise UserError(fault, OTHER_THAN_FIRP)
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
    batch, heads, rows, dim = query.shape  # values may have a different width
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
    """Returns the attention as `grouped_attention` does, for soft caps and sinks, which torch's function lacks.

    A sink is an additional column of scores without a value; it only takes a share of the softmax.
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
    """Raises RuntimeError, because the backbone always passes a finished mask and transformers must not build one."""
    raise RuntimeError("it builds attention masks of its own")


def register() -> None:
    """Registers this attention in transformers under NAME; safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


@cache
def cache_name(forward: Callable[..., Any]) -> str:
    """Returns the name of the cache argument of a network's or a layer's `forward`.

    transformers 5.24 renamed the argument, but Python files that come with a model may use the old name.
    """
    return "cache" if "cache" in signature(forward).parameters else "past_key_values"
