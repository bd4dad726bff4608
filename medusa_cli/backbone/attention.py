"""Attention for few query rows over a long cache: grouped queries stay grouped, keys are never repeated."""

import torch
from torch import Tensor, nn

from medusa_cli.errors import UserError

NAME = "medusa_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend query [B, G*KV, n, D] to key/value [B, KV, L, D] under an additive mask [B, 1, n, L] to [B, n, G*KV, D].

    The G query heads that share a key head become G*n rows of one attention call, so a cache of L positions is
    read once instead of being copied G times.
    """
    for option in ("softcap", "s_aux"):
        if options.get(option) is not None:
            raise UserError(
                f"this model's attention uses {option!r}, which tree verification does not support",
                "use a model with plain softmax attention",
            )
    batch, heads, rows, dim = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * rows, dim)
        if attention_mask is not None and rows > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
    attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.reshape(batch, heads, rows, dim).transpose(1, 2).contiguous(), None


def _no_mask(*_: object, **__: object) -> None:
    """The backbone always hands over a finished mask; transformers must not build another."""
    raise UserError("internal: a forward pass came without its attention mask")


def register() -> None:
    """Make this attention known to transformers under NAME; safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a bool mask (True = may attend) of any shape into 0 / lowest of dtype.

    A bool mask given straight to a model is silently wrong under eager attention.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
