"""Triton kernels of the exact path on a GPU; each has a twin of the same name in plain torch, in `plain_kernels`.

A row's bits do not depend on the other rows of a pass. One binary serves all numbers of rows, so Triton must not
specialize it for integers that differ from pass to pass. The slices of K and the chunks of columns do not depend on
the number of rows. Sizes of the model are constants.
"""

# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_cli.engine.kernel_attention import PINNED, attend
from medusa_cli.engine.reach import COLUMNS, Reach, slices_of
from medusa_cli.engine.tile_kernels import tile_matmul

__all__ = ["add_norm", "attend", "gate", "matmul", "rotate_write", "tile_matmul"]

# The size of a tile in rows and in K. A single row takes a whole tile, as 64 rows do.
ROWS = 64
DEPTH = 64
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x,
    weight,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SLICE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Sums one slice of K for a tile of rows and columns."""
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    s = tl.program_id(2)
    # Columns beyond the last one read the last one's weights, and their sums are not stored.
    row_of_weight = tl.minimum(n, N - 1)
    inside = (m < rows)[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, SLICE, BK):
        k = s * SLICE + start + tl.arange(0, BK)
        if K % SLICE == 0:
            a = tl.load(x + m[:, None] * K + k[None, :], mask=inside, other=0.0)
            b = tl.load(weight + row_of_weight[None, :] * K + k[:, None])
        else:
            below = k < K
            a = tl.load(x + m[:, None] * K + k[None, :], mask=inside & below[None, :], other=0.0)
            b = tl.load(
                weight + row_of_weight[None, :] * K + k[:, None], mask=below[:, None], other=0.0
            )
        total = tl.dot(a, b, total, input_precision="ieee")
    place = (s * rows + m)[:, None] * N + n[None, :]
    tl.store(out + place, total, mask=inside & (n < N)[None, :])


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the sums over slices of K, fp32 [S, R, N], for rows [R, K] and a weight [N, K]."""
    rows, depth = x.shape
    count = len(weight)
    slices = slices_of(count, depth)
    wide = triton.cdiv(depth, slices * DEPTH) * DEPTH
    out = torch.empty(slices, rows, count, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(count, COLUMNS), triton.cdiv(rows, ROWS), slices)
    matmul_kernel[grid](
        x,
        weight,
        out,
        rows,
        count,
        depth,
        wide,
        ROWS,
        COLUMNS,
        DEPTH,
        num_warps=4,
        num_stages=4,
        **PINNED,
    )
    return out


@triton.jit
def sum_slices(parts, bias, rows, r, place, inside, WIDE: tl.constexpr, S: tl.constexpr):
    """Returns the sum of a row's slices, added in order, plus a bias if there is one."""
    total = tl.load(parts + r * WIDE + place, mask=inside, other=0.0)
    for s in tl.static_range(1, S):
        total += tl.load(parts + (s * rows + r) * WIDE + place, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def normed(x, gain, place, inside, eps, D: tl.constexpr):
    """Returns x / rms(x) * gain."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    return x * scale * tl.load(gain + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def add_norm_kernel(
    x,
    parts,
    bias,
    after,
    gain,
    out,
    read,
    rows,
    eps_after,
    eps,
    H: tl.constexpr,
    S: tl.constexpr,
    BH: tl.constexpr,
):
    """Adds a matmul's sums, normalized if `after` is given, to one row; stores the row, and the normalized row."""
    r = tl.program_id(0)
    h = tl.arange(0, BH)
    inside = h < H
    state = tl.load(x + r * H + h, mask=inside, other=0.0)
    if parts is not None:
        y = sum_slices(parts, bias, rows, r, h, inside, H, S)
        if after is not None:
            y = normed(y, after, h, inside, eps_after, H)
        state = (state.to(tl.float32) + y).to(out.dtype.element_ty)
        tl.store(out + r * H + h, state, mask=inside)
    value = normed(state.to(tl.float32), gain, h, inside, eps, H)
    tl.store(read + r * H + h, value.to(read.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor,
    gain: Tensor,
    eps: float,
    parts: Tensor | None = None,
    bias: Tensor | None = None,
    after: Tensor | None = None,
    eps_after: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns the states x plus a matmul's sums [R, H], and the new states divided by their rms, times gain [H].

    parts [S, R, H]: the sums over slices; None adds nothing. bias [H]: is added to the sums. after [H]: the gain of a
    norm that is applied to the sums first.
    """
    rows, width = x.shape
    out = x if parts is None else torch.empty_like(x)
    read = torch.empty_like(x)
    add_norm_kernel[(rows,)](
        x,
        parts,
        bias,
        after,
        gain,
        out,
        read,
        rows,
        eps_after,
        eps,
        width,
        1 if parts is None else len(parts),
        triton.next_power_of_2(width),
        num_warps=8 if width > 2048 else 4,
        **PINNED,
    )
    return out, read


@triton.jit(do_not_specialize=["rows", "rows_of_slot", "capacity"])
def rotate_write_kernel(
    parts,
    bias,
    gains,
    cos,
    sin,
    columns,
    query,
    keys,
    values,
    rows,
    rows_of_slot,
    capacity,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BD: tl.constexpr,
):
    """Stores one head of one row: a query in `query`, a key or value in the cache; norms and rotates all but values."""
    r = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BD)
    inside = d < D
    # The other number of each rotated pair.
    other = (d + D // 2) % D
    WIDE: tl.constexpr = (HEADS + 2 * KV) * D
    x = sum_slices(parts, bias, rows, r, head * D + d, inside, WIDE, S)
    if head < HEADS + KV:
        y = sum_slices(parts, bias, rows, r, head * D + other, inside, WIDE, S)
        if gains is not None:
            # The gain of keys follows the gain of queries.
            gain = gains + (head // HEADS) * D
            scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            x = x * scale * tl.load(gain + d, mask=inside, other=0.0).to(tl.float32)
            y = y * scale * tl.load(gain + other, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + r * D + d, mask=inside, other=0.0).to(tl.float32)
        x = x * c + y * tl.load(sin + r * D + d, mask=inside, other=0.0).to(tl.float32)
    x = x.to(query.dtype.element_ty)
    if head < HEADS:
        tl.store(query + (r * HEADS + head) * D + d, x, mask=inside)
    else:
        h = (head - HEADS) % KV
        first = ((r // rows_of_slot) * KV + h).to(tl.int64) * capacity
        place = (first + tl.load(columns + r)) * D + d
        if head < HEADS + KV:
            tl.store(keys + place, x, mask=inside)
        else:
            tl.store(values + place, x, mask=inside)


def rotate_write(
    parts: Tensor,
    bias: Tensor | None,
    gains: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    reach: Reach,
) -> Tensor:
    """Writes rotated keys, and values, to a cache [B, KV, C, D]; returns the rotated queries [R, heads, D].

    parts [S, R, (heads + 2 KV) * D]: a matmul's sums over slices. bias: is added to the sums. gains [2, D]: the gains
    of the norms of queries and keys, if there are any. cos, sin [R, 1, D]; the first half of the sines is negated.
    """
    slices, rows, width = parts.shape
    _, kv, capacity, dim = keys.shape
    heads = width // dim - 2 * kv
    query = torch.empty(rows, heads, dim, dtype=keys.dtype, device=keys.device)
    rotate_write_kernel[(rows, heads + 2 * kv)](
        parts,
        bias,
        gains,
        cos,
        sin,
        reach.columns,
        query,
        keys,
        values,
        rows,
        reach.rows,
        capacity,
        eps,
        heads,
        kv,
        dim,
        slices,
        triton.next_power_of_2(dim),
        num_warps=1,
        **PINNED,
    )
    return query


@triton.jit(do_not_specialize=["rows"])
def gate_kernel(
    parts,
    bias,
    out,
    rows,
    WIDE: tl.constexpr,
    S: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes activation(gate) * up for a block of one row."""
    r = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < WIDE
    gate = sum_slices(parts, bias, rows, r, n, inside, 2 * WIDE, S)
    up = sum_slices(parts, bias, rows, r, WIDE + n, inside, 2 * WIDE, S)
    if ACTIVATION == 0:
        active = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # (1 + tanh(x)) / 2 is the logistic function of 2 x.
        active = gate / (1 + tl.exp(-2 * inner))
    else:
        active = 0.5 * gate * (1 + tl.math.erf(gate * 0.7071067811865476))
    tl.store(out + r * WIDE + n, (active * up).to(out.dtype.element_ty), mask=inside)


def gate(parts: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype) -> Tensor:
    """Returns activation(gate) * up [R, I] for the sums [S, R, 2 I] of a matmul; activation: one of ACTIVATIONS."""
    slices, rows, width = parts.shape
    wide = width // 2
    out = torch.empty(rows, wide, dtype=dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(wide))
    gate_kernel[(rows, triton.cdiv(wide, block))](
        parts, bias, out, rows, wide, slices, ACTIVATIONS[activation], block, **PINNED
    )
    return out
