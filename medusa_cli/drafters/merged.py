"""Attention in one softmax over keys that the rows of a sequence share and over a few that are each row's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Pairs of keys and values [heads, n, D], of which row i alone sees the i-th.
Own = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shared:
    """What S sequences' rows share: keys and values [S, heads, L, D], and who sees them.

    mask [S, 1, W, L] of 0 and -inf, in the keys' dtype, for W rows a sequence; slots [n]: which of all S * W is whose.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    slots: Tensor

    def spread(self, rows: Tensor) -> Tensor:
        """Rows [heads, n, D] where their sequences want them, [S, heads, W, D]; zero where there is none."""
        count, _, width, _ = self.mask.shape
        heads, _, dim = rows.shape
        places = rows.new_zeros(count * width, heads, dim).index_copy(0, self.slots, rows.transpose(0, 1))
        return places.view(count, width, heads, dim).transpose(1, 2)

    def gathered(self, places: Tensor) -> Tensor:
        """Of what sequences have at every place [S, heads, W, ..] that of the rows [heads, n, ..]."""
        return places.transpose(1, 2).flatten(0, 1)[self.slots].transpose(0, 1)


def merged_attention(queries: Tensor, shared: Shared, own: Own) -> Tensor:
    """What rows' queries [heads, n, D] see of the shared rows that their mask shows them and of their own."""
    if queries.device.type == "cpu":
        seen: Tensor = _Flash.apply(queries, shared, shared.keys, shared.values, *(part for one in own for part in one))
        return seen
    return plain_attention(queries, shared, own)


def plain_attention(queries: Tensor, shared: Shared, own: Own) -> Tensor:
    """The same with all scores in memory at once, on any device."""
    q = queries * queries.shape[-1] ** -0.5
    scores = shared.spread(q) @ shared.keys.transpose(-1, -2)
    far = shared.gathered(scores.float() + shared.mask.float())
    near = [(q * keys).sum(-1, keepdim=True).float() for keys, _ in own]
    shares = torch.cat([far, *near], dim=-1).softmax(-1).to(q.dtype)
    width = far.shape[-1]
    seen = shared.gathered(shared.spread(shares[..., :width]) @ shared.values)
    for number, (_, values) in enumerate(own):
        seen = seen + shares[..., width + number, None] * values
    return seen


class _Flash(torch.autograd.Function):
    """The shared rows go through flash attention, whose logsumexp lets the rows' own join its softmax afterwards.

    On the way back flash attention makes its shares anew from scores and logsumexp: given that of the whole softmax,
    and the whole sum as what was seen, the gradients it finds are the right ones for its part.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, shared: Shared, keys: Tensor, values: Tensor, *own: Tensor) -> Tensor:
        spread, scale = shared.spread(queries), queries.shape[-1] ** -0.5
        seen, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            spread, keys, values, 0.0, False, attn_mask=shared.mask, scale=None
        )
        far = shared.gathered(logsumexp[..., None])[..., 0]  # [heads, n]
        near = [(queries * one).sum(-1).float() * scale for one in own[::2]]
        whole = torch.stack([far, *near]).logsumexp(0)
        shares = [(score - whole).exp()[..., None].to(queries.dtype) for score in (far, *near)]
        result = shared.gathered(seen) * shares[0]
        for share, one in zip(shares[1:], own[1::2], strict=True):
            result = result + share * one
        ctx.shared = shared
        ctx.save_for_backward(queries, keys, values, result, whole, logsumexp, *shares[1:], *own)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, result, whole, logsumexp, *rest = ctx.saved_tensors
        count, scale, shared = len(rest) // 3, queries.shape[-1] ** -0.5, ctx.shared
        shares, own = rest[:count], rest[count:]
        places = logsumexp.transpose(1, 2).flatten(0, 1).index_copy(0, shared.slots, whole.T)  # [S * W, heads]
        places = places.view(len(keys), -1, len(queries)).transpose(1, 2)
        query_grad, key_grad, value_grad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(shared.spread(grad), shared.spread(queries), keys, values, shared.spread(result), places, 0.0, False),
            attn_mask=shared.mask,
            scale=None,
        )
        query_grad = shared.gathered(query_grad)
        mean = (grad * result).sum(-1, keepdim=True)
        found = []
        for share, key, value in zip(shares, own[::2], own[1::2], strict=True):
            score_grad = share * ((grad * value).sum(-1, keepdim=True) - mean) * scale
            query_grad = query_grad + score_grad * key
            found += [score_grad * queries, share * grad]
        return query_grad, None, key_grad, value_grad, *found
