"""From a plan to what layers read: positions, additive masks, and where in the cache rows are written."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.backbone.attention import Masks, additive
from medusa_cli.engines.cache import Cache
from medusa_cli.engines.plan import Plan
from medusa_cli.engines.pseudo import PseudoRows

# From so many rows on, computing over columns that nobody needs costs more than copying those that somebody does.
LONG = 32


@dataclass(frozen=True)
class Layout:
    """One pass as layers see it, R = n + K m rows of each of B sequences, pseudo rows last.

    positions [B, R]; masks by kind of attention, additive [B, R, L] over the first L columns of the slots; start: the
    slot's length where B is 1 and it is known on the host, and places [B, R]: the columns that the rows are written to.
    """

    first: int
    size: int
    positions: Tensor
    masks: dict[str, Tensor]
    start: int | None
    places: Tensor
    end: int
    pseudo: PseudoRows | None


def lay_out(plan: Plan, cache: Cache, masks: Masks, most: int, device: torch.device, round_to: int = 1) -> Layout:
    """The layout of a plan in a cache, for which room is made.

    most: the model's context: near its end pseudo rows may stand beyond it, where rotary tables may change. round_to:
    attention reads a multiple of so many columns, and few rows all of a cache that is kept small (its `stride`).
    """
    sees, depth = plan.visibility(device)
    pseudo = plan.pseudo_rows(device)
    if pseudo is not None:
        sees, depth = pseudo.place(sees, depth)
    size, rows = len(plan.tokens), depth.shape[1]
    used = cache.lengths[plan.first : plan.first + size]
    end = max(used) + rows
    cache.reserve(end)
    wide = min(-(-end // round_to) * round_to, cache.capacity)
    if cache.stride is not None and rows < LONG:
        wide = cache.capacity
    if size == 1:
        start = used[0]
        visible = F.pad(sees, (start, wide - end), value=False)
        visible[..., :start] = True
        found = _masks(masks, visible, start + depth, depth, start, wide, most)
        places = start + torch.arange(rows, device=device)[None]
        return Layout(plan.first, 1, (start + depth).clamp(max=most - 1), found, start, places, wide, pseudo)
    lengths = torch.tensor(used, device=device)
    return lay_out_at(lengths, sees, depth, masks, most, plan.first, wide, pseudo)


def lay_out_at(
    lengths: Tensor,
    sees: Tensor,
    depth: Tensor,
    masks: Masks,
    most: int,
    first: int,
    wide: int,
    pseudo: PseudoRows | None = None,
) -> Layout:
    """The layout of rows with sees [B or 1, R, R] and depth [B or 1, R] behind lengths [B], by tensors alone."""
    size, rows = len(lengths), depth.shape[1]
    node = torch.arange(wide, device=lengths.device) - lengths[:, None]  # [B, L]: the row of this pass in a column
    inside = node.clamp(0, rows - 1)
    among = sees.expand(size, -1, -1).gather(2, inside[:, None].expand(-1, rows, -1))
    visible = (node < 0)[:, None] | (among & (node < rows)[:, None])  # [B, R, L]
    positions = lengths[:, None] + depth
    columns = torch.where(node < 0, node + lengths[:, None], positions.expand(size, -1).gather(1, inside))
    found = {
        kind: additive(masks.visible(kind, visible, positions, columns[:, None]), masks.dtype) for kind in masks.kinds
    }
    places = lengths[:, None] + torch.arange(rows, device=lengths.device)
    return Layout(first, size, positions.clamp(max=most - 1), found, None, places, wide, pseudo)


def _masks(
    masks: Masks, visible: Tensor, positions: Tensor, depth: Tensor, start: int, wide: int, most: int
) -> dict[str, Tensor]:
    """Additive masks by kind for one sequence; a sliding window counts positions, not rows."""
    columns = torch.arange(wide, device=visible.device)
    columns[start : start + depth.shape[1]] = positions[0]
    return {kind: additive(masks.visible(kind, visible, positions, columns), masks.dtype) for kind in masks.kinds}
