"""The plan of a forward pass: its tokens, their positions and mask, and the requested outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa_cli.device import numbered, upload
from medusa_cli.engine.attention import visible_behind
from medusa_cli.engine.cache import Cache
from medusa_cli.engine.extra_rows import ExtraRows, ExtraRowStates
from medusa_cli.engine.reach import Reach
from medusa_cli.files.layer_kinds import FULL
from medusa_cli.model.masks import Masks, additive


@dataclass(frozen=True)
class Plan:
    """Describes a pass over tokens [B, n] in B slots of a cache, the first of which is `first`.

    Row i has its slot's length + depth[.., i] as its position. It sees all earlier rows of the slot
    and the rows of this pass that tree_mask[.., i, :] marks. depth is [n] or [B, n] and tree_mask is
    bool [n, n] or [B, n, n]; both are None for a chain. taps: the layers whose outputs are
    requested; -1 is the final state after the final norm. logits: the rows that get logits: "all",
    "last" or "none". extra_rows: FIRP's extra rows for every row, or for a chain's last row. They
    leave nothing in the cache and require taps to be (-1,). Raises ValueError for shapes that do not
    fit each other.
    """

    tokens: Tensor
    depth: Tensor | None = None
    tree_mask: Tensor | None = None
    first: int = 0
    taps: tuple[int, ...] = (-1,)
    logits: str = "all"
    extra_rows: ExtraRows | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or not self.tokens.numel():
            raise ValueError(
                f"the tokens {tuple(self.tokens.shape)} of a plan are not [slots, rows]"
            )
        if self.first < 0 or self.logits not in ("all", "last", "none"):
            raise ValueError(
                f"a plan's first slot {self.first} or logits {self.logits!r} is not valid"
            )
        if (self.depth is None) != (self.tree_mask is None):
            raise ValueError("the rows of a tree have depths and a mask")
        if self.depth is not None and self.tree_mask is not None:
            slots, rows = self.tokens.shape
            shapes = tuple(self.depth.shape), tuple(self.tree_mask.shape)
            alike = (rows,), (rows, rows)
            if shapes not in (
                alike,
                *(tuple((count, *shape) for shape in alike) for count in (1, slots)),
            ):
                raise ValueError(f"the depths and mask {shapes} of a plan do not fit {rows} rows")

    @property
    def is_chain(self) -> bool:
        """Returns True for a pass without a tree."""
        return self.tree_mask is None

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int] | Tensor,
        *,
        slot: int = 0,
        taps: Sequence[int] = (-1,),
        logits: str = "last",
        extra_rows: ExtraRows | None = None,
    ) -> "Plan":
        """Returns the plan of a pass over the next tokens [n] of one sequence, such as a prompt."""
        return cls(torch.as_tensor(tokens)[None], None, None, slot, tuple(taps), logits, extra_rows)


@dataclass(frozen=True)
class Output:
    """Holds a pass's fp32 logits [B, n, V] (or [B, 1, V], or None) and tapped hidden states [B, n, H * taps].

    extra: the final states of extra rows, [B, n, K, H], or [B, 1, K, H] for a chain. best: the most
    likely token for each row of logits, if the engine finds these tokens together with the logits.
    """

    logits: Tensor | None
    hidden: Tensor
    extra: Tensor | None = None
    best: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """Describes a pass for layers: R rows in each of B slots, starting at slot `first`, with extra rows last.

    positions [B or 1, R]. masks: additive masks [B, R, L] by kind of layer, over a slot's first
    L = `wide` columns; an empty mask, for a chain that begins a slot, means causal attention. start:
    the slot's length, if B is 1 and the host knows it. columns [B, R]: where rows are written.
    lengths [B]: the lengths of the slots, if attention reads no column beyond them; the mask of full
    attention is then [B, R, R], over the rows themselves. tree: depth [B or 1, n] and mask
    [B or 1, n, n] of a tree's rows, None for a chain. reach: replaces the masks on the exact path.
    """

    first: int
    size: int
    positions: Tensor
    masks: dict[str, Tensor]
    start: int | None
    columns: Tensor
    wide: int
    extra_rows: ExtraRowStates | None = None
    lengths: Tensor | None = None
    tree: tuple[Tensor, Tensor] | None = None
    reach: Reach | None = None


def lay_out(
    plan: Plan, cache: Cache, masks: Masks, context: int, device: torch.device, exact: bool = False
) -> Layout:
    """Returns the layout of a plan in a cache, which grows as needed.

    context: the model's maximum number of positions. Extra rows beyond the last position get this
    position, since rotary tables may change after it. exact: True if trees without extra rows take
    the exact path.
    """
    every = torch.arange(plan.tokens.shape[1], device=device)
    if plan.depth is None or plan.tree_mask is None:
        depth = every[None]
        tree_mask = (every[:, None] >= every)[None]
    else:
        depth = plan.depth.to(device)
        tree_mask = plan.tree_mask.to(device)
        depth = depth if depth.dim() == 2 else depth[None]
        tree_mask = tree_mask if tree_mask.dim() == 3 else tree_mask[None]
    tree = None if plan.is_chain else (depth, tree_mask)

    extra_rows = None
    if plan.extra_rows is not None:
        extra_rows = ExtraRowStates(plan.extra_rows, every[-1:] if plan.is_chain else every)
        tree_mask, depth = extra_rows.extend(tree_mask, depth)

    size = len(plan.tokens)
    rows = depth.shape[1]
    lengths = cache.lengths[plan.first : plan.first + size]
    end = max(lengths) + rows
    cache.reserve(end)

    if plan.is_chain and not any(lengths) and extra_rows is None and device.type != "cpu":
        # The fastest kernel of a GPU accepts no mask.
        causal = {
            kind: mask.expand(size, -1, -1) for kind, mask in masks.causal(rows, device).items()
        }
        start = 0 if size == 1 else None
        return Layout(plan.first, size, depth, causal, start, every.expand(size, -1), rows)
    layout = lay_out_at(
        upload(lengths, device),
        tree_mask,
        depth,
        masks,
        context,
        plan.first,
        end,
        extra_rows,
        exact=exact and not plan.is_chain and extra_rows is None,
    )
    return replace(layout, start=lengths[0] if size == 1 else None, tree=tree)


def lay_out_at(
    lengths: Tensor,
    tree_mask: Tensor,
    depth: Tensor,
    masks: Masks,
    context: int,
    first: int,
    wide: int,
    extra_rows: ExtraRowStates | None = None,
    by_length: bool = False,
    exact: bool = False,
) -> Layout:
    """Returns the layout of R new rows in each of B slots.

    lengths [B]: the current lengths of the slots. tree_mask [B or 1, R, R]: the rows of the pass that each new row
    sees. depth [B or 1, R]: the positions of the new rows, relative to the length. by_length: True if attention reads
    no column beyond the lengths. exact: True for the exact path, which needs no masks. This function reads no tensor's
    values on the host, so it can be captured in a CUDA graph.
    """
    size = len(lengths)
    rows = depth.shape[1]
    positions = lengths[:, None] + depth
    by_kind = dict[str, Tensor]()

    if exact:
        reach = Reach.of(lengths, depth, tree_mask, masks)
        positions = positions.clamp(max=context - 1)
        return Layout(first, size, positions, {}, None, reach.columns, wide, reach=reach)
    if not by_length or masks.kinds != [FULL]:
        column = torch.arange(wide, device=lengths.device).expand(size, -1)
        if masks.kinds != [FULL]:  # windows count positions, not columns
            inside = (column - lengths[:, None]).clamp(0, rows - 1)
            column = torch.where(
                column < lengths[:, None], column, positions.expand(size, -1).gather(1, inside)
            )
        by_kind = masks.additive(
            visible_behind(lengths, tree_mask, wide), positions, column[:, None]
        )
    if by_length and rows == 1:
        # Attention by lengths reads only the shape of a single row's mask.
        by_kind[FULL] = torch.empty(size, 1, 1, dtype=masks.dtype, device=lengths.device)
    elif by_length:
        by_kind[FULL] = additive(tree_mask.expand(size, -1, -1), masks.dtype)

    columns = lengths[:, None] + numbered(rows, lengths.device)
    positions = positions.clamp(max=context - 1)
    read = lengths if by_length else None
    return Layout(first, size, positions, by_kind, None, columns, wide, extra_rows, read)
