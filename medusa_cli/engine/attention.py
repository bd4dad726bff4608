"""Attention over the KV cache: on a CPU, and after it on a GPU.

On a CPU a row's bits do not depend on the rows beside it. A product adds the terms of one result in the order of its
inner dimension, so the exact zeros of masked columns change nothing, wherever they stand. What does change bits:
kernels for few rows, an inner dimension whose blocks depend on its length, softmax's own sum, whose lanes shift with
the columns in between, and the ends of threads' shares of a tensor, which are computed number by number. So queries are
padded to a multiple of rows, values are summed in blocks of columns, the denominator is a column of ones beside the
values, and shares are whole vectors. A tree must not cross a block: its nodes would be summed apart from where they
would stand alone.

On a GPU torch's fused attention runs under masks, and in CUDA graphs by lengths that are data.
"""

import math
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.model.attention import additive

# Columns that one product sums, and the multiple of columns that is read of the last block, if the CPU adds alike then.
BLOCK, COLUMNS = 256, 64
# Query positions that attend together: the columns after them are left out.
PIECE = 128
# Paddings to try: (multiple of rows, multiple of the values' width).
PADDINGS = ((2, 8), (12, 48), (12, 96))
# torch gives a thread at least so many numbers of a tensor; a vector step takes VECTOR of them.
SHARE, VECTOR = 32_768, 32


def padded(size: int, multiple: int) -> int:
    """Returns the next multiple of a number from `size` on."""
    return -(-size // multiple) * multiple


@cache
def padding_of(dim: int) -> tuple[int, int, int]:
    """Returns the multiples of query rows and of columns, and the width of values and a one, for heads of width D.

    They are the first for which a row gives the same bits on this CPU alone and among others. The order is rows, width,
    columns.
    """
    options = [(rows, padded(dim + 1, multiple)) for rows, multiple in PADDINGS]
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        rows, width = next((option for option in options if _is_row_invariant(dim, *option)), options[-1])
        return rows, width, COLUMNS if _adds_alike(dim, rows, width) else BLOCK


def _is_row_invariant(dim: int, rows: int, width: int) -> bool:
    """Returns True if products of any number of rows, in any batch, give a row the same bits."""
    longest = padded(512, rows)
    query, keys = torch.randn(2, longest, dim), torch.randn(2, dim, 2 * BLOCK)
    weights, values = torch.rand(2, longest, 2 * BLOCK), torch.randn(2, 2 * BLOCK, width)
    weights[..., BLOCK + BLOCK // 2 :] = 0
    # The same weights and values in other columns, with zeros in between.
    columns = torch.cat([torch.arange(BLOCK), BLOCK + torch.randperm(BLOCK)[: BLOCK // 2].sort().values])
    spread_weights, spread_values = torch.zeros_like(weights), torch.randn_like(values)
    spread_weights[..., columns] = weights[..., : len(columns)]
    spread_values[:, columns] = values[:, : len(columns)]
    scores, summed = query @ keys, sum_by_blocks(weights, values)
    for count in (1, 2, 3, 4, 5, 7, 8, 11, 16, 33):
        part = slice(count * rows, 2 * count * rows)
        alone = query[:1, part] @ keys[:1, :, :BLOCK]
        again = sum_by_blocks(spread_weights[1:, part], spread_values[1:])
        if not (torch.equal(alone[0], scores[0, part, :BLOCK]) and torch.equal(again[0], summed[1, part])):
            return False
    return True


def _adds_alike(dim: int, rows: int, width: int) -> bool:
    """Returns True if products over a part of a block give the bits of the block whose other weights are zero."""
    query, keys = torch.randn(2, padded(256, rows), dim), torch.randn(2, dim, 2 * BLOCK)
    weights, values = torch.rand(2, len(query[0]), 2 * BLOCK), torch.randn(2, 2 * BLOCK, width)
    for wide in (COLUMNS, 2 * COLUMNS, 3 * COLUMNS, BLOCK + COLUMNS):
        for count in (rows, len(query[0])):
            part = weights[:, :count].clone()
            part[..., wide:] = 0
            if not torch.equal(sum_by_blocks(part[..., :wide], values), sum_by_blocks(part, values)):
                return False
            if not torch.equal(query[:, :count] @ keys[..., :wide], (query[:, :count] @ keys)[..., :wide]):
                return False
    return True


def sum_by_blocks(weights: Tensor, values: Tensor) -> Tensor:
    """Returns weights [B, M, L] times values [B, C, W], block by block."""
    summed: Tensor = _scripts()[0](weights, values)
    return summed


def powers(scores: Tensor) -> Tensor:
    """Replaces scores by powers of two.

    The exponential function is dear where it comes to nothing, as under a mask.
    """
    weights: Tensor = _scripts()[1](scores, torch.get_num_threads())
    return weights


@cache
def _scripts() -> tuple[Any, Any]:
    """Returns functions that branch by sizes as scripts, so that a trace keeps the branches open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, but its successor takes half a minute a model
        return torch.jit.script(_sum_by_blocks), torch.jit.script(_powers)


def _sum_by_blocks(weights: Tensor, values: Tensor) -> Tensor:
    wide = weights.size(2)
    first = min(wide, 256)
    total = torch.bmm(weights.narrow(2, 0, first), values.narrow(1, 0, first))
    for start in range(256, wide, 256):
        count = min(256, wide - start)
        total.baddbmm_(weights.narrow(2, start, count), values.narrow(1, start, count))
    return total


def _powers(scores: Tensor, threads: int) -> Tensor:
    numbers = scores.numel()
    parts = min(threads, (numbers + 32767) // 32768)
    if numbers % (32 * parts) == 0:
        return scores.exp2_()
    for part in scores.view(-1).split(32768):  # each by one thread
        part.exp2_()
    return scores


@dataclass(frozen=True)
class Piece:
    """Some query positions of a pass over B slots: M rows for each of the B * KV key heads, padded.

    order [B * KV * M]: the rows' places among all queries; positions first .. end - 1 of the pass; position [M]: that
    of each row, from `first` on.
    """

    first: int
    end: int
    order: Tensor
    position: Tensor

    def mask(self, mask: Tensor, kv: int, start: int | None) -> Tensor:
        """Returns this piece's part [B * KV, M, L'] of a mask [B, R, L].

        No row sees a column after its own: with one slot, of length `start`, the part ends with its last row's block.
        """
        seen = mask.shape[2] if start is None else min(mask.shape[2], padded(start + self.end, BLOCK))
        part = mask[:, self.first : self.end, :seen].index_select(1, self.position)
        return part[:, None].expand(-1, kv, -1, -1).flatten(0, 1)


@lru_cache(maxsize=128)
def pieces_of(
    size: int, rows: int, heads: int, kv: int, dim: int, more: int, inner: int, threads: int
) -> tuple[Tensor, list[Piece], Tensor]:
    """Returns the rows that products see of a pass over B slots of R rows, its pieces, and each row's place in theirs.

    Products see at least `more` rows more than the pass has: threads share the numbers of an activation, at most
    `inner` a row, and only whole vectors of them are computed alike.

    Queries and keys lie side by side, [B * R * (heads + KV), D]. The places are [(B * R + more) * heads], `more` times
    those of the first row at the end.
    """
    groups, multiple, count = heads // kv, padding_of(dim)[0], size * rows
    while (count + more) % max(1, min(threads, -(-(count + more) * inner // SHARE))):
        more += 1
    feed = torch.arange(count + more) % count
    every = torch.arange(size * rows * (heads + kv)).view(size, rows, -1)[..., :heads].unflatten(-1, (kv, groups))
    pieces, offset, back = list[Piece](), 0, torch.empty_like(every)
    for first in range(0, rows, PIECE):
        end = min(first + PIECE, rows)
        count = groups * (end - first)
        padding = torch.arange(padded(count, multiple)).clamp(max=count - 1)
        order = every[:, first:end].permute(0, 2, 3, 1).reshape(size, kv, -1)[..., padding].flatten()
        pieces.append(Piece(first, end, order, padding % (end - first)))
        here = torch.arange(offset, offset + len(order)).view(size, kv, -1)[..., :count]
        back[:, first:end] = here.view(size, kv, groups, -1).permute(0, 3, 1, 2)
        offset += len(order)
    return feed, pieces, torch.cat([back.flatten(), back[0, :1].expand(more, -1, -1).flatten()])


def attend(
    rows: Tensor, keys: Tensor, values: Tensor, masks: list[Tensor], orders: list[Tensor], back: Tensor, scale: float
) -> Tensor:
    """Attends queries to fp32 keys [B * KV, C, D] and values [B * KV, C, W], whose column D is 1.

    rows [B * R, heads + KV, D]: queries and keys side by side; masks and orders are those of pieces, back is the places
    of `pieces_of`. Returns [places, D] of the queries' type.
    """
    dim, keys, results = rows.shape[2], keys.transpose(1, 2), []
    flat = rows.view(-1, dim)
    for mask, order in zip(masks, orders, strict=True):
        query = flat.index_select(0, order).view(mask.shape[0], -1, dim)
        if query.dtype != torch.float32:
            query = query.float()
        # Not as `alpha`: products multiply by it at different places.
        scores = torch.baddbmm(mask, query.mul_(scale / math.log(2)), keys.narrow(2, 0, mask.shape[2]))
        weights = powers(scores.sub_(scores.amax(-1, keepdim=True)))
        results.append(sum_by_blocks(weights, values).flatten(0, 1))
    summed = (results[0] if len(results) == 1 else torch.cat(results)).index_select(0, back)
    attended = summed.narrow(1, 0, dim) / summed.narrow(1, dim, 1)
    return attended if attended.dtype == rows.dtype else attended.to(rows.dtype)


def fused(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kv: int, scale: float) -> Tensor:
    """Attends queries [B * R, heads, D] to keys and values [B * KV, C, D] by torch's fused attention.

    mask [B, 1, G * R, L]; an empty one is causal. Returns [B * R, heads * D].
    """
    size, wide, heads, dim = mask.shape[0], mask.shape[-1], query.shape[1], query.shape[2]
    query = query.view(size, -1, heads, dim).transpose(1, 2)
    if not mask.numel():
        rows = query.shape[2]
        key, value = (cached[:, :rows].unflatten(0, (size, kv)) for cached in (keys, values))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=heads != kv
        )
        return attended.transpose(1, 2).reshape(-1, heads * dim)
    query = query.reshape(size, kv, -1, dim)
    # Only products of four dimensions have fused kernels.
    seen_keys, seen_values = (cached[:, :wide].unflatten(0, (size, kv)) for cached in (keys, values))
    attended = F.scaled_dot_product_attention(query, seen_keys, seen_values, attn_mask=mask, scale=scale)
    return attended.reshape(size, heads, -1, dim).transpose(1, 2).reshape(-1, heads * dim)


def behind(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    mask: Tensor,
    reads: list[Tensor],
    scale: float,
) -> Tensor:
    """Attends R rows of each of B slots to what the slot held before, and under a mask to one another.

    Flash attention reads no column beyond a slot's length, which is data; the log-sum-exps of both parts merge them.
    query [B * R, heads, D]; keys, values [B * KV, C, D], which hold the new rows, too; new_keys, new_values
    [B * R, KV, D]; mask, additive [B, 1, G * R, R]; reads: of `columns_read`. Returns [B * R, heads * D].
    """
    (count, heads, dim), kv, rows = query.shape, new_keys.shape[1], mask.shape[-1]
    size, capacity = count // rows, keys.shape[1]
    starts, places, used = reads
    # The cache as rows of KV heads: those of a slot's first head, and as many behind them that no head reads.
    shape, strides = (size * kv * capacity - (kv - 1) * capacity, kv, dim), (dim, capacity * dim, 1)
    far, far_sum, *_ = torch.ops.aten._flash_attention_forward(
        query,
        *(cached.as_strided(shape, strides) for cached in (keys, values)),
        starts,
        places,
        rows,
        capacity,
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=used,
    )
    if rows == 1:  # it has read its own column
        return far.reshape(count, heads * dim)
    grouped = query.view(size, rows, kv, -1, dim).permute(0, 2, 3, 1, 4).reshape(size, kv, -1, dim)
    key, value = (new.reshape(size, rows, kv, dim).transpose(1, 2) for new in (new_keys, new_values))
    near, near_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        grouped, key, value, mask.expand(size, kv, -1, -1), True, scale=scale
    )
    near_sum = near_sum[..., : grouped.shape[2]]  # the kernel pads it
    near = near.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4).reshape(far.shape)
    near_sum = near_sum.unflatten(2, (-1, rows)).permute(0, 3, 1, 2).reshape(count, heads)
    return merged(far, far_sum.transpose(0, 1), near, near_sum).to(query.dtype).view(count, heads * dim)


def merged(far: Tensor, far_sum: Tensor, near: Tensor, near_sum: Tensor) -> Tensor:
    """Returns what rows see [.., D] in two sets of columns, by what they see in each and its log-sum-exp [..]."""
    return far + (near_sum - far_sum).sigmoid()[..., None] * (near - far)


def columns_read(lengths: Tensor, rows: int, kv: int, capacity: int) -> list[Tensor]:
    """Returns where the R rows and the keys of each slot begin [B + 1], and how many of its columns are read [B]."""
    slots = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    # Behind an empty slot the first of the rows is read as if it had been there: a kernel must read some column.
    used = lengths + 1 if rows == 1 else lengths.clamp(min=1)
    return [slots * rows, slots * (kv * capacity), used.int()]


def visible_behind(lengths: Tensor, tree_mask: Tensor, wide: int) -> Tensor:
    """Returns which of a slot's first columns R rows see [B, R, L]: the first lengths[b], and one another by a mask.

    tree_mask bool [B or 1, R, R].
    """
    rows = tree_mask.shape[1]
    row = torch.arange(wide, device=lengths.device) - lengths[:, None]  # [B, L]: the row of this pass in a column
    among = tree_mask.expand(len(lengths), -1, -1).gather(2, row.clamp(0, rows - 1)[:, None].expand(-1, rows, -1))
    return (row < 0)[:, None] | (among & (row < rows)[:, None])


@cache
def reads_by_length(device: torch.device, dtype: torch.dtype, heads: int, kv: int, dim: int) -> bool:
    """Returns True if `behind` runs on a device and sees what attention under a mask sees."""
    if device.type == "cpu":
        return False
    size, rows, capacity = 2, 16, 64
    lengths, every = torch.tensor([5, 40], device=device), torch.arange(rows, device=device)
    wave = torch.arange(2 * size * kv * capacity * dim, device=device).sin().to(dtype)
    keys, values = wave.view(2, size * kv, capacity, dim).unbind()
    query = 3 * torch.arange(size * rows * heads * dim, device=device).cos().to(dtype).view(-1, heads, dim)
    slots, columns = torch.arange(size, device=device)[:, None], lengths[:, None] + every
    new_keys, new_values = (
        cached.view(size, kv, capacity, dim).transpose(1, 2)[slots, columns].flatten(0, 1) for cached in (keys, values)
    )
    tree_mask = (every <= every[:, None]).expand(size, -1, -1)
    masks = [additive(seen, dtype) for seen in (tree_mask, visible_behind(lengths, tree_mask, capacity))]
    among, whole = (mask.repeat(1, heads // kv, 1)[:, None] for mask in masks)
    try:
        reads = columns_read(lengths, rows, kv, capacity)
        ours = behind(query, keys, values, new_keys, new_values, among, reads, dim**-0.5)
    except RuntimeError:
        return False
    expected = fused(query, keys, values, whole, kv, dim**-0.5)
    return bool((ours - expected).float().norm() < 0.02 * expected.float().norm())
