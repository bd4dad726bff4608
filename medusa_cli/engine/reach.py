"""Tells which columns each row of a pass reads and writes on the exact path: only the row's position decides.

A row at position p reads the columns below limit(p) in chunks, and its other columns, at most NEAR, in the order of the
text. limit(p) is at least LAG positions before p, so a pass that contains p finds all columns below limit(p) in the
cache. A row thus reads the same numbers in the same order, whether its ancestors are nodes of the same tree or were
decoded step by step.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from medusa_cli.device import numbered
from medusa_cli.files.layer_kinds import CHUNKED, FULL
from medusa_cli.model.masks import Masks

# The limit is a multiple of this number, and at least this many positions before a row. The depth of
# trees is below this number.
LAG = 32
# The maximum number of columns from the limit to a row's own position.
NEAR = 2 * LAG
# The number of columns in a chunk, which one program reads.
CHUNK = 512
# The number of programs that keep a GPU busy, a program's number of columns, and the smallest K of a slice.
PROGRAMS = 128
COLUMNS = 128
LEAST = 512


def slices_of(count: int, depth: int) -> int:
    """Returns the number of slices of K for a weight [N, K], which does not depend on the number of rows."""
    slices = 1
    while -(-count // COLUMNS) * slices < PROGRAMS and depth // (2 * slices) >= LEAST:
        slices *= 2
    return slices


@dataclass(frozen=True)
class Reach:
    """Describes what R rows in each of B slots read and write; all tensors are int32, with B * R rows.

    rows: R. position: a row's position in the text. columns: the column to which a row is written. limit: the end of
    the columns that are read in chunks. places [B * R, NEAR]: the columns from the limit on, in the order of the text.
    low: by kind of layer, the first position that a row sees.
    """

    rows: int
    position: Tensor
    columns: Tensor
    limit: Tensor
    places: Tensor
    low: dict[str, Tensor]

    @classmethod
    def of(cls, lengths: Tensor, depth: Tensor, tree_mask: Tensor, masks: Masks) -> Self:
        """Returns the reach of trees after `lengths` [B] columns.

        depth [B or 1, R]; tree_mask bool [B or 1, R, R]: each row sees itself and its ancestors.
        """
        rows = depth.shape[1]
        size = len(lengths)
        device = lengths.device
        position = lengths[:, None] + depth  # [B, R]
        columns = lengths[:, None] + numbered(rows, device)
        limit = ((position - LAG).clamp(min=0) // LAG) * LAG
        places = limit[..., None] + numbered(NEAR + 1, device)  # [B, R, NEAR + 1]
        # An ancestor's place is its position minus the limit. Other rows get a place that is not read.
        place = position[:, None] - limit[..., None]  # [B, R, R]
        place = torch.where(tree_mask & (place >= 0), place, NEAR)
        places = places.scatter(2, place, columns[:, None].expand(size, rows, -1))[..., :NEAR]
        low = {}
        for kind in masks.kinds:
            if kind == FULL:
                first = torch.zeros_like(position)
            elif kind == CHUNKED:
                first = position // masks.chunk * masks.chunk
            else:
                first = (position - (int(masks.window) - 1)).clamp(min=0)
            low[kind] = first.flatten().int()
        return cls(
            rows,
            position.flatten().int(),
            columns.flatten().int(),
            limit.flatten().int(),
            places.flatten(0, 1).int().contiguous(),
            low,
        )
