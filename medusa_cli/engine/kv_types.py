"""The number types of the native engine's keys and values (`--kv`), which kv_cache.h writes: formats and sizes."""

import torch
from torch import Tensor

from medusa_cli.engine.shapes import padded
from medusa_cli.native import Format
from medusa_cli.native.library import TILE, UNIT

# The library's format and the type of the buffers for each number type.
KV_TYPES = {
    "fp32": (Format.F32, torch.float32),
    "fp16": (Format.F16, torch.float16),
    "q8_0": (Format.Q8_0, torch.uint8),
}
# The bytes of a block's scale.
SCALE = 2
BLOCK = SCALE + UNIT


def head_bytes(format: Format, dim: int) -> tuple[int, int]:
    """Returns the bytes of a head's key and value, both padded to whole blocks, values also to 16 numbers."""
    key = padded(dim, format.block)
    return format.row_bytes(key), format.row_bytes(padded(key, TILE))


def rows_of_floats(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys [KV, tiles, D, 16] and values [KV, C, D] of any type as fp32 rows [KV, .., D].

    In Q8_0, the D of keys and values counts the bytes of a head; formats.h describes their layout.
    """
    if keys.dtype != torch.uint8:
        return keys.transpose(2, 3).flatten(1, 2).float(), values.float()
    tiles = keys.reshape(*keys.shape[:2], -1, TILE * BLOCK)
    numbers = (tiles[..., : TILE * UNIT] ^ 128).view(torch.int8).unflatten(-1, (-1, TILE, 4))
    scales = tiles[..., TILE * UNIT :].contiguous().view(torch.float16).float()
    by_tile = numbers * scales[..., None, :, None]  # [KV, tiles, blocks, 8, 16, 4]
    blocks = values.unflatten(-1, (-1, BLOCK))
    value_scales = blocks[..., :SCALE].contiguous().view(torch.float16).float()
    rows = blocks[..., SCALE:].contiguous().view(torch.int8) * value_scales
    return by_tile.permute(0, 1, 4, 2, 3, 5).flatten(3).flatten(1, 2), rows.flatten(2)
