"""The exact path's kernels in plain torch (the kernels' twins): slow and obvious, each row by itself.

Their arguments and results are those of `kernels` and `kernel_attention`. With inputs in fp64, they
serve as a reference.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.engine.reach import CHUNK, Reach, slices_of
from medusa_cli.engine.tiles import Tiles
from medusa_cli.native.library import UNIT

# As in native/matmul.h, a group whose largest input is below this is rounded to zero.
LEAST_SIZE = 1e-30


def _wide(x: Tensor) -> Tensor:
    """Returns 16-bit numbers in fp32, and others as they are."""
    return x.float() if x.itemsize == 2 else x


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the sums [S, R, N] over slices of K, for rows [R, K] and a weight [N, K]."""
    slices = slices_of(*weight.shape)
    width = -(-x.shape[1] // slices)
    pairs = zip(_wide(x).split(width, dim=1), _wide(weight).split(width, dim=1), strict=True)
    return torch.stack([torch.stack([w.mv(row) for row in part]) for part, w in pairs])


def tile_matmul(
    x: Tensor,
    parts: Sequence[Tiles],
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns rows [R, K], rounded to 8 bits, times the transposed matrices, plus a bias [N], as in the library."""
    groups = x.float().unflatten(1, (-1, UNIT))
    size = groups.abs().amax(-1)
    is_zero = size < LEAST_SIZE
    largest = torch.full_like(size, 127)
    # Both operands are tensors: to divide by a Python number, torch would multiply by its inverse.
    inverse = (largest / size).masked_fill(is_zero, 0)
    scale = (size / largest).masked_fill(is_zero, 0)
    numbers = (groups * inverse[..., None]).round().flatten(1)
    y = torch.cat([_tile_matmul(numbers, scale, tiles) for tiles in parts], dim=1)
    return (y if bias is None else y + bias).to(dtype)


def _tile_matmul(x: Tensor, scale: Tensor, tiles: Tiles) -> Tensor:
    """Returns 8-bit rows [R, K] with scales [R, K / 32] times a matrix, fp32 [R, N]."""
    group = tiles.layout.group
    rows = x.unflatten(1, (-1, group))  # [R, groups, inputs]
    scale = scale.repeat_interleave(tiles.layout.groups, 1)
    numbers, scales, offsets = tiles.decoded(tiles.data)
    # The sums of a group's products are integers that fp32 holds exactly, in any order of additions.
    products = torch.einsum("rgk,ngk->grn", rows, numbers.float().unflatten(1, (-1, group)))
    sums = scale * rows.sum(-1)
    total = torch.zeros_like(products[0])
    for g, product in enumerate(products):
        total = _fused(product, scale[:, g, None] * scales[:, g], total)
        if offsets is not None:
            total = _fused(offsets[:, g], sums[:, g, None], total)
    return total[:, : tiles.shape[0]]


def _fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Returns x * y + z, computed in doubles and rounded once."""
    return (x.double() * y.double() + z.double()).float()


def _sum(parts: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the sum [R, N] of slices, added in order, plus a bias if there is one."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total if bias is None else total + _wide(bias)


def _normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * gain, row by row."""
    squares = torch.stack([row.square().mean() for row in x])
    return x * (squares + eps).rsqrt()[:, None] * _wide(gain)


def add_norm(
    x: Tensor,
    gain: Tensor,
    eps: float,
    parts: Tensor | None = None,
    bias: Tensor | None = None,
    after: Tensor | None = None,
    eps_after: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns the states x plus a matmul's sums [R, H], and these states normalized; see `kernels.add_norm`."""
    if parts is not None:
        y = _sum(parts, bias)
        y = y if after is None else _normed(y, after, eps_after)
        x = (_wide(x) + y).to(x.dtype)
    return x, _normed(_wide(x), gain, eps).to(x.dtype)


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
    """Writes rotated keys, and values, to a cache [B, KV, C, D]; returns the rotated queries [R, heads, D]."""
    size, kv, _, dim = keys.shape
    qkv = _sum(parts, bias).unflatten(1, (-1, dim))
    query_key, value = qkv.split([qkv.shape[1] - kv, kv], dim=1)
    if gains is not None:
        query_and_key = query_key.split([query_key.shape[1] - kv, kv], dim=1)
        normed = [
            _normed(x.flatten(0, 1), gain, eps).view_as(x)
            for x, gain in zip(query_and_key, gains, strict=True)
        ]
        query_key = torch.cat(normed, dim=1)
    rolled = query_key.roll(dim // 2, -1)
    query_key = (query_key * _wide(cos) + rolled * _wide(sin)).to(keys.dtype)
    query, key = query_key.split([query_key.shape[1] - kv, kv], dim=1)
    slots = torch.arange(size).repeat_interleave(reach.rows)
    keys.transpose(1, 2)[slots, reach.columns.long()] = key
    values.transpose(1, 2)[slots, reach.columns.long()] = value.to(values.dtype)
    return query


def gate(parts: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype) -> Tensor:
    """Returns activation(gate) * up [R, I] for the sums [S, R, 2 I] of a matmul."""
    gate, up = _sum(parts, bias).chunk(2, dim=1)
    return (ACTIVATIONS[activation](gate) * up).to(dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": F.gelu,
}


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    reach: Reach,
    kind: str,
    scale: float,
    cap: float = 0.0,
) -> Tensor:
    """Returns the attention [R, heads * D] from queries [R, heads, D] to a cache [B, KV, C, D]."""
    groups = query.shape[1] // keys.shape[1]
    out = torch.empty_like(query)
    bounds = zip(
        reach.position.tolist(), reach.limit.tolist(), reach.low[kind].tolist(), strict=True
    )
    for r, (position, limit, low) in enumerate(bounds):
        slot = r // reach.rows
        near = reach.places[r, max(low - limit, 0) : position - limit + 1].long()
        far = [
            torch.arange(max(start, low), min(start + CHUNK, limit))
            for start in range(low // CHUNK * CHUNK, limit if low < limit else 0, CHUNK)
        ]
        for head, q in enumerate(_wide(query[r])):
            own = slot, head // groups
            out[r, head] = _attend(q, keys[own], values[own], [near, *far], scale, cap)
    return out.flatten(1)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, parts: list[Tensor], scale: float, cap: float
) -> Tensor:
    """Returns the attention [D] of a query [D] to parts of the columns; the parts' results are merged in order."""
    high = query.new_tensor(-torch.inf)
    weight = query.new_zeros(())
    mean = torch.zeros_like(query)
    for columns in parts:
        score = _wide(keys[columns]).mv(query) * scale
        score = score if not cap else (score / cap).tanh() * cap
        top = score.max()
        share = (score - top).exp()
        part = _wide(values[columns]).T.mv(share)
        higher = torch.maximum(high, top)
        keep, add = (high - higher).exp(), (top - higher).exp()
        weight = weight * keep + share.sum() * add
        mean = mean * keep + part * add
        high = higher
    return mean / weight
