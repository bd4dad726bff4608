"""Which tokens a step of training scores: all of a large vocabulary cost more than everything else of the heads."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The part of the scored tokens that is drawn from those beyond the likeliest, and stands for all of them.
DRAWN = 0.25


@dataclass(frozen=True)
class Scored:
    """The vocabulary's rows that one batch scores [m], of `size`, and the log of how many each stands for [m].

    Beside a log weight added to its score, a softmax over them is in the mean that over all rows: what is drawn of the
    unlikely ones stands for the rest (sampled softmax, Jean et al., arXiv:1412.2007, with the likely ones for sure).
    """

    rows: Tensor
    log_weight: Tensor
    size: int

    @classmethod
    def draw(cls, mass: Tensor, wanted: Tensor, count: int) -> "Scored":
        """So many rows for a batch: those that are `wanted` [M] and others by mass [M], most of them, the rest drawn.

        All that are wanted are scored, be they more.
        """
        order = torch.where(wanted, torch.inf, mass).argsort(descending=True)
        likely = min(count - int(DRAWN * count), int(((mass > 0) | wanted).sum()))
        first = max(likely, int(wanted.sum()))
        rest = order[first:]
        drawn = rest[torch.randperm(len(rest))[: max(int(DRAWN * count), count - first)].to(rest.device)]
        each = math.log(len(rest) / max(1, len(drawn))) if len(rest) else 0.0
        weights = torch.cat([mass.new_zeros(first), mass.new_full((len(drawn),), each)])
        return cls(torch.cat([order[:first], drawn]), weights, len(mass))

    def places(self, place: Tensor) -> Tensor:
        """Token id -> number among the scored rows [V], -1 where it is not scored, from token id -> row [V]."""
        number = place.new_full((self.size + 1,), -1)  # the last one is that of row -1
        number[self.rows] = torch.arange(len(self.rows), device=place.device)
        return number[place]

    def of(self, matrix: Tensor) -> Tensor:
        """The scored rows [m, H] of a vocabulary matrix [M, H]."""
        return matrix.index_select(0, self.rows)

    def bias(self, bias: Tensor | None) -> Tensor:
        """What is added to the scores [m]: the weights, and of a vocabulary's bias [M] what is theirs."""
        return self.log_weight if bias is None else bias[self.rows] + self.log_weight

    def teacher(self, p: Tensor) -> Tensor:
        """The teacher's probabilities [P, M] over the scored rows alone [P, m]."""
        part = p.index_select(1, self.rows) * self.log_weight.exp().to(p.dtype)
        return part / part.sum(-1, keepdim=True)
