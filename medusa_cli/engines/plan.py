"""What one forward pass is to compute: which tokens, where they stand, who sees whom, what is read of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa_cli.engines.pseudo import Pseudo, PseudoRows


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
    pseudo: Pseudo | None = None

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int] | Tensor,
        *,
        slot: int = 0,
        taps: Sequence[int] = (-1,),
        logits: str = "last",
        pseudo: Pseudo | None = None,
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
        pseudo: Pseudo | None = None,
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

    def pseudo_rows(self, device: torch.device) -> PseudoRows | None:
        """The pseudo rows of this pass: beside every node of a tree, or the last row of a chain."""
        if self.pseudo is None:
            return None
        every = torch.arange(self.rows, device=device)
        return PseudoRows(self.pseudo, every[-1:] if self.is_chain else every)

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
