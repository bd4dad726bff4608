"""Attention over the KV cache on a GPU by torch's fused kernels, given masks or the slots' lengths."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.model.masks import additive


def fused(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kv: int, scale: float
) -> Tensor:
    """Computes torch's fused attention from queries [B * R, heads, D] to keys and values [B * KV, C, D].

    mask [B, 1, G * R, L]: for G queries per key head, and the first L columns. An empty mask means causal attention.
    Returns [B * R, heads * D].
    """
    size = mask.shape[0]
    wide = mask.shape[-1]
    heads = query.shape[1]
    dim = query.shape[2]
    query = query.view(size, -1, heads, dim).transpose(1, 2)
    if not mask.numel():
        rows = query.shape[2]
        key, value = (cached[:, :rows].unflatten(0, (size, kv)) for cached in (keys, values))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=heads != kv
        )
        return attended.transpose(1, 2).reshape(-1, heads * dim)
    query = query.reshape(size, kv, -1, dim)
    # Fused kernels accept only tensors of four dimensions.
    seen_keys, seen_values = (
        cached[:, :wide].unflatten(0, (size, kv)) for cached in (keys, values)
    )
    attended = F.scaled_dot_product_attention(
        query, seen_keys, seen_values, attn_mask=mask, scale=scale
    )
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
    """Computes attention from R rows in each of B slots to earlier columns and, under a mask, to each other.

    Flash attention gets the slots' lengths as a tensor, and reads no column beyond them. Its output
    and that of the attention among the rows are merged by their log-sum-exps. query [B * R, heads, D].
    keys, values [B * KV, C, D]: the cache, which already holds the new rows. new_keys, new_values
    [B * R, KV, D]. mask: additive [B, 1, G * R, R]. reads: the result of `columns_read`. Returns
    [B * R, heads * D].
    """
    count, heads, dim = query.shape
    kv = new_keys.shape[1]
    rows = mask.shape[-1]
    size = count // rows
    capacity = keys.shape[1]
    starts, places, used = reads
    # The cache is viewed as rows [KV, D]: head h of row r is the cached row r + h * capacity.
    # Kernels read only rows r that belong to a slot's first head.
    shape = (size * kv * capacity - (kv - 1) * capacity, kv, dim)
    strides = (dim, capacity * dim, 1)
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
    if rows == 1:  # flash attention has read the new column
        return far.reshape(count, heads * dim)
    grouped = query.view(size, rows, kv, -1, dim).permute(0, 2, 3, 1, 4).reshape(size, kv, -1, dim)
    key, value = (
        new.reshape(size, rows, kv, dim).transpose(1, 2) for new in (new_keys, new_values)
    )
    near, near_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        grouped, key, value, mask.expand(size, kv, -1, -1), True, scale=scale
    )
    # Outputs become views [B, R, KV, G, D], and sums [B, R, KV, G]. The kernel pads its sums.
    near = near.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4)
    near_sum = near_sum[..., : grouped.shape[2]].unflatten(2, (-1, rows)).permute(0, 3, 1, 2)
    far, far_sum = far.view(near.shape), far_sum.T.unflatten(0, (size, rows)).view(near_sum.shape)
    return merged(far, far_sum, near, near_sum).view(count, heads * dim)


def merged(far: Tensor, far_sum: Tensor, near: Tensor, near_sum: Tensor) -> Tensor:
    """Merges the attention outputs [.., D] over two sets of columns by their log-sum-exps [..], in fp32."""
    share = (near_sum - far_sum).sigmoid()[..., None]
    # With a given output tensor, one kernel makes the result contiguous and rounds it.
    out = torch.empty(far.shape, dtype=far.dtype, device=far.device)
    return torch.addcmul(far, share, near - far, out=out)


def columns_read(lengths: Tensor, rows: int, kv: int, capacity: int) -> list[Tensor]:
    """Returns the starts of each slot's rows and keys, both [B + 1], and the number of columns each slot reads [B]."""
    # In an empty slot, the first new row is read as if it were an earlier row, since a kernel must
    # read some column.
    used = lengths + 1 if rows == 1 else lengths.clamp(min=1)
    return [*_starts(len(lengths), (rows, kv * capacity), lengths.device), used.int()]


@cache
def _starts(size: int, steps: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Returns a tensor 0, step, .., size * step for each of `steps`; all passes share these tensors."""
    slots = torch.arange(size + 1, dtype=torch.int32, device=device)
    return [slots * step for step in steps]


def visible_behind(lengths: Tensor, tree_mask: Tensor, wide: int) -> Tensor:
    """Returns the mask [B, R, L] by which R rows see a slot's first L = `wide` columns.

    The rows of slot b see its first lengths[b] columns, and each other as tree_mask marks, bool [B or 1, R, R].
    """
    rows = tree_mask.shape[1]
    # [B, L]: the row of this pass in each column
    row = torch.arange(wide, device=lengths.device) - lengths[:, None]
    among = tree_mask.expand(len(lengths), -1, -1).gather(
        2, row.clamp(0, rows - 1)[:, None].expand(-1, rows, -1)
    )
    return (row < 0)[:, None] | (among & (row < rows)[:, None])


@cache
def reads_by_length(
    device: torch.device, dtype: torch.dtype, heads: int, kv: int, dim: int
) -> bool:
    """Returns True if `behind` runs on a device and agrees with attention under a mask to within 2%."""
    if device.type == "cpu":
        return False
    size = 2
    rows = 16
    capacity = 64
    lengths = torch.tensor([5, 40], device=device)
    every = torch.arange(rows, device=device)
    wave = torch.arange(2 * size * kv * capacity * dim, device=device).sin().to(dtype)
    keys, values = wave.view(2, size * kv, capacity, dim).unbind()
    query = 3 * torch.arange(size * rows * heads * dim, device=device).cos().to(dtype).view(
        -1, heads, dim
    )
    slots = torch.arange(size, device=device)[:, None]
    columns = lengths[:, None] + every

    def written(cached: Tensor) -> Tensor:
        by_column = cached.view(size, kv, capacity, dim).transpose(1, 2)
        return by_column[slots, columns].flatten(0, 1)

    tree_mask = (every <= every[:, None]).expand(size, -1, -1)
    among = additive(tree_mask, dtype).repeat(1, heads // kv, 1)[:, None]
    visible = visible_behind(lengths, tree_mask, capacity)
    whole = additive(visible, dtype).repeat(1, heads // kv, 1)[:, None]
    try:
        reads = columns_read(lengths, rows, kv, capacity)
        ours = behind(query, keys, values, written(keys), written(values), among, reads, dim**-0.5)
    except RuntimeError:
        return False
    expected = fused(query, keys, values, whole, kv, dim**-0.5)
    return bool((ours - expected).float().norm() < 0.02 * expected.float().norm())
