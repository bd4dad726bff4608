"""Attention of the exact path in two Triton kernels, which split columns by a row's position only; see `reach`."""

# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_cli.engine.reach import CHUNK, NEAR, Reach

# The tile in rows and columns, and the smallest side of a matmul on tensor cores.
ROWS = 64
COLUMNS = 32
SMALLEST = 16
# Options that decide the bits of results, and whose defaults differ between versions of Triton.
PINNED = {"enable_fp_fusion": True}


@triton.jit
def scored(product, scale, CAP: tl.constexpr):
    """Returns the scores of queries and keys, with a soft cap if CAP is not 0."""
    score = product * scale
    if CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        score = CAP - 2 * CAP / (tl.exp(2 / CAP * score) + 1)
    return score


@triton.jit(do_not_specialize=["rows_of_slot", "capacity", "chunks"])
def far_kernel(
    query,
    keys,
    values,
    limit,
    low,
    partial,
    top,
    total,
    rows_of_slot,
    capacity,
    chunks,
    scale,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    CAP: tl.constexpr,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Attends from a tile of rows to one chunk of columns below the rows' limits, for one key head's query heads.

    Columns that a row does not see add exact zeros, whatever the other rows of the tile see.
    """
    GROUPS: tl.constexpr = HEADS // KV
    lane = tl.program_id(0) * BM + tl.arange(0, BM)
    slot = tl.program_id(1) // KV
    h = tl.program_id(1) % KV
    c = tl.program_id(2)
    row = lane // GROUPS
    inside = row < rows_of_slot
    r = slot * rows_of_slot + row
    head = r * HEADS + h * GROUPS + lane % GROUPS
    d = tl.arange(0, BD)
    of_dim = d < D
    q = tl.load(
        query + head[:, None] * D + d[None, :], mask=inside[:, None] & of_dim[None, :], other=0.0
    )
    end = tl.load(limit + r, mask=inside, other=0)
    begin = tl.load(low + r, mask=inside, other=0)
    first = (slot * KV + h).to(tl.int64) * capacity
    high = tl.full((BM,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BM,), dtype=tl.float32)
    mean = tl.zeros((BM, BD), dtype=tl.float32)
    for start in range(c * CHUNK, tl.minimum((c + 1) * CHUNK, tl.max(end, 0)), BN):
        column = start + tl.arange(0, BN)
        held = column < capacity
        place = (first + column) * D
        key = tl.load(
            keys + place[None, :] + d[:, None], mask=held[None, :] & of_dim[:, None], other=0.0
        )
        value = tl.load(
            values + place[:, None] + d[None, :], mask=held[:, None] & of_dim[None, :], other=0.0
        )
        score = scored(tl.dot(q, key, input_precision="ieee"), scale, CAP)
        seen = (column[None, :] < end[:, None]) & (column[None, :] >= begin[:, None])
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(high, tl.max(score, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp(score - safe[:, None])
        keep = tl.exp(tl.where(high == float("-inf"), safe, high) - safe)
        weight = weight * keep + tl.sum(share, 1)
        mean = tl.dot(share.to(value.dtype), value, mean * keep[:, None], input_precision="ieee")
        high = higher
    part = head * chunks + c
    tl.store(top + part, high, mask=inside)
    tl.store(total + part, weight, mask=inside)
    tl.store(
        partial + part[:, None].to(tl.int64) * D + d[None, :],
        mean,
        mask=inside[:, None] & of_dim[None, :],
    )


@triton.jit(do_not_specialize=["rows_of_slot", "capacity", "chunks"])
def near_kernel(
    query,
    keys,
    values,
    places,
    position,
    limit,
    low,
    partial,
    top,
    total,
    out,
    rows_of_slot,
    capacity,
    chunks,
    scale,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    CAP: tl.constexpr,
    CHUNK: tl.constexpr,
    NEAR: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """Attends from one row to its last columns in the order of the text, for the query heads of one key head.

    Then the results of `far_kernel` for the earlier chunks are added in order.
    """
    GROUPS: tl.constexpr = HEADS // KV
    r = tl.program_id(0)
    h = tl.program_id(1)
    lane = tl.arange(0, BM)
    inside = lane < GROUPS
    head = r * HEADS + h * GROUPS + lane
    d = tl.arange(0, BD)
    of_dim = d < D
    whole = inside[:, None] & of_dim[None, :]
    q = tl.load(query + head[:, None] * D + d[None, :], mask=whole, other=0.0)
    end = tl.load(limit + r)
    begin = tl.load(low + r)
    j = tl.arange(0, NEAR)
    seen = (end + j <= tl.load(position + r)) & (end + j >= begin)
    column = tl.load(places + r * NEAR + j, mask=seen, other=0)
    place = (((r // rows_of_slot) * KV + h).to(tl.int64) * capacity + column) * D
    key = tl.load(
        keys + place[None, :] + d[:, None], mask=seen[None, :] & of_dim[:, None], other=0.0
    )
    value = tl.load(
        values + place[:, None] + d[None, :], mask=seen[:, None] & of_dim[None, :], other=0.0
    )
    score = scored(tl.dot(q, key, input_precision="ieee"), scale, CAP)
    score = tl.where(seen[None, :], score, float("-inf"))
    high = tl.max(score, 1)
    share = tl.exp(score - high[:, None])
    weight = tl.sum(share, 1)
    mean = tl.dot(share.to(value.dtype), value, input_precision="ieee")
    for c in range(begin // CHUNK, (end + CHUNK - 1) // CHUNK):
        part = head * chunks + c
        other = tl.load(top + part, mask=inside, other=float("-inf"))
        more = tl.load(total + part, mask=inside, other=0.0)
        far = tl.load(partial + part[:, None].to(tl.int64) * D + d[None, :], mask=whole, other=0.0)
        higher = tl.maximum(high, other)
        keep = tl.exp(high - higher)
        add = tl.exp(other - higher)
        weight = weight * keep + more * add
        mean = mean * keep[:, None] + far * add[:, None]
        high = higher
    result = (mean / weight[:, None]).to(out.dtype.element_ty)
    tl.store(out + head[:, None] * D + d[None, :], result, mask=whole)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    reach: Reach,
    kind: str,
    scale: float,
    cap: float = 0.0,
) -> Tensor:
    """Returns the attention [R, heads * D] from queries [R, heads, D] to a cache [B, KV, C, D].

    The cache already holds the keys and values of the queries' rows. kind: the kind of layer, which decides how far
    back a row sees. cap: the soft cap of the scores, 0 for none.
    """
    rows, heads, dim = query.shape
    size, kv, capacity, _ = keys.shape
    chunks = triton.cdiv(capacity, CHUNK)
    # Each tensor is allocated by itself, at an aligned address: for other addresses, Triton makes other binaries.
    partial, top, total = (
        torch.empty(rows * heads, chunks, width, dtype=torch.float32, device=query.device)
        for width in (dim, 1, 1)
    )
    out = torch.empty_like(query)
    low = reach.low[kind]
    sizes = (reach.rows, capacity, chunks, scale, heads, kv, dim, cap, CHUNK)
    wide = max(SMALLEST, triton.next_power_of_2(dim))
    groups = heads // kv
    far_kernel[(triton.cdiv(reach.rows * groups, ROWS), size * kv, chunks)](
        query,
        keys,
        values,
        reach.limit,
        low,
        partial,
        top,
        total,
        *sizes,
        ROWS,
        COLUMNS,
        wide,
        num_warps=4,
        num_stages=3 if wide <= 128 else 2,
        **PINNED,
    )
    near_kernel[(rows, kv)](
        query,
        keys,
        values,
        reach.places,
        reach.position,
        reach.limit,
        low,
        partial,
        top,
        total,
        out,
        *sizes,
        NEAR,
        max(SMALLEST, triton.next_power_of_2(groups)),
        wide,
        num_warps=2,
        num_stages=1,
        **PINNED,
    )
    return out.view(rows, heads * dim)
