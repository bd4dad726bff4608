"""What one forward pass is to compute: which tokens, where they stand, who sees whom, what is read of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.engine.cache import Cache
from medusa_cli.engine.extra_rows import ExtraRows, ExtraRowStates
from medusa_cli.model.masks import Masks, additive


class TreeShape(Protocol):
    """What verification needs of a tree of N nodes: who sees whom, and how deep each node is."""

    @property
    def mask(self) -> Tensor: ...  # bool [N, N]

    @property
    def depth(self) -> Tensor: ...  # long [N]


@dataclass(frozen=True)
class Plan:
    """One pass over tokens [B, n] in the B slots of a cache from `first` on, each after its slot's own rows.

    Row i stands at its slot's length + depth[.., i] and sees all that the slot holds and, of this pass, the rows
    sees[.., i, :]; depth is [n] or [B, n], sees bool [n, n] or [B, n, n], both None for a chain. taps name the layers
    whose outputs are wanted side by side; -1 is the final state after the last norm, which the lm_head reads. logits:
    of "all" rows, the "last" one alone, or "none". pseudo: rows that ride with every row, or with a chain's last, and
    leave nothing in the cache; the tap is -1 then.
    """

    tokens: Tensor
    depth: Tensor | None = None
    sees: Tensor | None = None
    first: int = 0
    taps: tuple[int, ...] = (-1,)
    logits: str = "all"
    pseudo: ExtraRows | None = None

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int] | Tensor,
        *,
        slot: int = 0,
        taps: Sequence[int] = (-1,),
        logits: str = "last",
        pseudo: ExtraRows | None = None,
    ) -> "Plan":
        """A pass over one sequence's next tokens [n], such as a prompt's."""
        return cls(torch.as_tensor(tokens)[None], None, None, slot, tuple(taps), logits, pseudo)

    @classmethod
    def tree(
        cls,
        tokens: Sequence[int] | Tensor,
        shape: TreeShape,
        *,
        slot: int = 0,
        taps: Sequence[int] = (-1,),
        pseudo: ExtraRows | None = None,
    ) -> "Plan":
        """A pass over the nodes [N] of one sequence's tree."""
        return cls(torch.as_tensor(tokens)[None], shape.depth, shape.mask, slot, tuple(taps), "all", pseudo)

    @property
    def rows(self) -> int:
        """Rows of one sequence, pseudo rows apart."""
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        return self.sees is None

    def pseudo_rows(self, device: torch.device) -> ExtraRowStates | None:
        """The pseudo rows of this pass: beside every node of a tree, or the last row of a chain."""
        if self.pseudo is None:
            return None
        every = torch.arange(self.rows, device=device)
        return ExtraRowStates(self.pseudo, every[-1:] if self.is_chain else every)

    def visibility(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Who sees whom [B or 1, n, n] and depths [B or 1, n], without pseudo rows."""
        if self.depth is None or self.sees is None:
            depth = torch.arange(self.rows, device=device)[None]
            return depth[0, :, None] >= depth[:, None], depth
        depth, sees = self.depth.to(device), self.sees.to(device)
        return (sees if sees.dim() == 3 else sees[None]), (depth if depth.dim() == 2 else depth[None])


@dataclass(frozen=True)
class Output:
    """fp32 logits [B, n, V] (or [B, 1, V], or None) and the tapped hidden states [B, n, H * taps] of one pass.

    ahead: the final states [B, n, K, H] (of a chain [B, 1, K, H]) of pseudo rows, where there were any.
    """

    logits: Tensor | None
    hidden: Tensor
    ahead: Tensor | None = None


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
    pseudo: ExtraRowStates | None


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
    pseudo: ExtraRowStates | None = None,
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
