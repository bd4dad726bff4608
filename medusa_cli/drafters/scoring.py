"""Scoring of draft tokens: the vocabulary matrices of a drafter, and its weights packed for drafting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.drafters.base import Drafter
from medusa_cli.drafters.expansion import Frontier, Guess
from medusa_cli.drafters.layers import TokenBias, repeated
from medusa_cli.engine.linear import (
    NativeLinear,
    packed_copy,
    packed_linear,
    packed_parts,
    packs,
)
from medusa_cli.model import Backbone

if TYPE_CHECKING:
    from typing import Self

    from medusa_cli.engine.packed_drafter import PackedDrafter

# Rows of the lm_head that are packed at a time, since all rows in fp32 would take much memory.
ROWS_AT_ONCE = 1024


class Scoring(Drafter):
    """Scores states with vocabulary matrices [M, H]: the drafter's own, or rows of the lm_head."""

    config: Any
    matrices: nn.ParameterList  # one per head, one for all, or none if the lm_head scores
    conditional: TokenBias | None
    draft_ids: Tensor  # [M], token ids of the scores
    # Keeps packed copies in files; None unless the weights are those of a folder's files.
    kept: PackedDrafter | None
    # Weight and bias of the lm_head for a draft vocabulary, for heads without matrices.
    _lm_head_rows: tuple[Tensor, Tensor | None] | None

    def matrix(self, backbone: Backbone, head: int) -> Tensor:
        """Returns the vocabulary matrix [M, H] of a head (from 0)."""
        if len(self.matrices):
            return self.matrices[head if len(self.matrices) > 1 else 0]
        if self.config.vocabulary != "draft":
            return backbone.lm_head_weight
        return self._vocabulary_rows(backbone)[0]

    def _vocabulary_rows(self, backbone: Backbone) -> tuple[Tensor, Tensor | None]:
        """Returns the lm_head's weight and bias for the draft vocabulary, which are looked up only once."""
        if self._lm_head_rows is None:
            self._lm_head_rows = backbone.lm_head_rows(self.draft_ids)
        return self._lm_head_rows

    def bias(self, backbone: Backbone) -> Tensor | None:
        """Returns the lm_head's bias [M] for heads without matrices of their own.

        Returns None if there is no bias.
        """
        if len(self.matrices):
            return None
        if self.config.vocabulary != "draft":
            return backbone.lm_head_bias
        return self._vocabulary_rows(backbone)[1]

    def of_vocabulary(self, rows: Any) -> Any:
        """Selects the rows [M, ..] that the heads score from the rows [V, ..] of the model's tokens.

        None is returned unchanged.
        """
        whole = rows is None or self.config.vocabulary != "draft"
        return rows if whole else rows[self.draft_ids.to(rows.device)]

    def vocabulary_index(self, device: torch.device) -> Tensor:
        """Returns, for each token id [V], its row in the vocabulary matrices, or -1 if it has none."""
        index = torch.full((self.config.vocab_size,), -1, dtype=torch.long, device=device)
        index[self.draft_ids.to(device)] = torch.arange(len(self.draft_ids), device=device)
        return index

    def factors(
        self, backbone: Backbone, head: int, states: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns factors [n, ..] and [M, ..], whose product is a head's scores; before [n]: the preceding tokens."""
        matrix = self.matrix(backbone, head)
        if self.conditional is None:
            return states, matrix
        return self.conditional.factors(states, matrix, before)

    def train(self, mode: bool = True) -> Self:
        self._forget_packed()
        super().train(mode)
        return self

    def _forget_packed(self) -> None:
        """Drops the packed copies of weights, because the weights may change now."""
        self.kept = None
        self._packed: dict[str, nn.Module] = {}
        self._scorers: list[Callable[[Tensor], Tensor]] = []
        self._lm_head_rows = None

    def packed(self, name: str) -> Any:
        """Returns the submodule `name`, or a copy of it with linear layers packed for drafting."""
        if name not in self._packed:
            if not packs(next(self.parameters()).device):
                return getattr(self, name)
            with self._packing(name) as pack:
                self._packed[name] = packed_copy(getattr(self, name), pack)
        return self._packed[name]

    def _packing(self, part: str) -> AbstractContextManager[Any]:
        """Returns a context with the function that packs a part's matrices, or with None if copies are not kept."""
        return nullcontext() if self.kept is None else self.kept.part(part)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def embed(self, backbone: Backbone, tokens: Tensor) -> Tensor:
        """Returns the backbone's embeddings [.., H], scaled to a root mean square of 1 like hidden states."""
        embedded = backbone.embedding(tokens).to(self.dtype)
        return F.rms_norm(embedded, embedded.shape[-1:])

    def score(self, backbone: Backbone, head: int, states: Tensor) -> Tensor:
        """Returns a head's logits [.., M] for states [.., H], in fp32 because top-k over bf16 is slow."""
        own = len(self.matrices) > 0
        scorer = self._scorer(backbone, head)
        return scorer(states if own else states.to(backbone.dtype)).float()

    def _scorer(self, backbone: Backbone, head: int) -> Callable[[Tensor], Tensor]:
        if not self._scorers:  # forks share this list
            with self._packing("scorers") as pack:
                self._scorers += self._new_scorers(backbone, pack)
        return self._scorers[head if len(self._scorers) > 1 else 0]

    def _new_scorers(self, backbone: Backbone, pack: Any) -> list[Callable[[Tensor], Tensor]]:
        if len(self.matrices):
            return [packed_linear(matrix, None, pack) for matrix in self.matrices]
        if self.config.vocabulary == "shared":
            return [backbone.engine.lm_head]
        if packs(self.draft_ids.device):
            rows = map(backbone.lm_head_rows, self.draft_ids.split(ROWS_AT_ONCE))
            return [packed_parts(rows, pack)]
        return [packed_linear(self.matrix(backbone, 0), self.bias(backbone))]

    def guess(
        self,
        backbone: Backbone,
        head: int,
        states: Tensor,
        width: int,
        temperature: float | None,
        norm: nn.RMSNorm | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the result of `best` for the scores of states [N, H]. norm: is applied to the states first."""
        scorer = self._scorer(backbone, head)
        if isinstance(scorer, NativeLinear):
            return scorer.guess(states, width, temperature, norm, self.draft_ids)
        states = states if norm is None else norm(states)
        return self.best(self.score(backbone, head, states), width, temperature)

    def best(self, scores: Tensor, width: int, temperature: float | None) -> tuple[Tensor, Tensor]:
        """Returns the log confidences and token ids [N, width] of the best guesses, given scores [N, M].

        Without a temperature, as for static trees, the scores themselves serve as confidences.
        """
        scaled = scores if temperature in (None, 1.0) else scores / temperature
        best = scaled.topk(min(width, scaled.shape[-1]), dim=-1)
        log_p = best.values
        if temperature is not None:
            log_p = log_p - scaled.logsumexp(-1, keepdim=True)
        return log_p, self.draft_ids[best.indices]

    def at_once(
        self, depth: int, compute: Callable[..., Sequence[Tensor]], *inputs: Tensor
    ) -> Guess:
        """Returns the guess function for scores that do not depend on draft tokens, except for the bias.

        compute(*inputs) returns the scores [B, M] of each of `depth` heads.
        """
        scores = torch.stack(list(compute(*inputs)))

        def guess(
            head: int, width: int, temperature: float | None, level: Frontier
        ) -> tuple[Tensor, Tensor]:
            if self.conditional is None:
                log_p, ids = self.best(scores[head], width, temperature)
                return repeated(log_p, level.counts), repeated(ids, level.counts)
            tokens = level.tokens.split(level.counts)
            log_p, indices = self.conditional.best(scores[head], tokens, width, temperature)
            return log_p, self.draft_ids[indices]

        return guess
