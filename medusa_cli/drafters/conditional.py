"""Cheap dependence between guesses that are made at once: a bias of low rank from the token drafted before."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# In drafting only so many of a head's best guesses are scored again: what the bias lifts from further down is rare.
CANDIDATES = 128


@dataclass(frozen=True)
class Candidates:
    """A head's best guesses for B sequences: scores [B, C], places in the vocabulary [B, C], their rows [B, C, r]."""

    scores: Tensor
    places: Tensor
    rows: Tensor


class Conditional(nn.Module):
    """Adds after @ before[token] to the scores [M] of any head; at first it adds nothing.

    before [V, r] of the token that is drafted one place earlier, after [M, r] of the guesses; one pair for all heads.
    """

    def __init__(self, tokens: int, guesses: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(tokens, rank) * rank**-0.25)
        self.after = nn.Parameter(torch.zeros(guesses, rank))

    def joined(self, states: Tensor, matrix: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States [n, H] and a matrix [M, H] whose product has the bias of tokens [n] in it, both [.., H + r]."""
        before = F.embedding(tokens, self.before).to(states.dtype)
        return torch.cat([states, before], dim=-1), torch.cat([matrix, self.after.to(matrix.dtype)], dim=-1)

    def narrowed(self, scores: Tensor, least: int) -> Candidates:
        """The best of scores [B, M]: CANDIDATES of them, `least` if that is more."""
        best = scores.topk(min(max(CANDIDATES, least), scores.shape[-1]), dim=-1)
        return Candidates(best.values, best.indices, self.after[best.indices])

    def scored(self, found: Candidates, tokens: Tensor) -> Tensor:
        """The candidates' scores [B, n, C] after each of tokens [B, n]."""
        return found.scores[:, None] + (F.embedding(tokens, self.before) @ found.rows.transpose(1, 2)).float()

    def best(self, scores: Tensor, tokens: Tensor, width: int) -> Tensor:
        """The places [B, n, width] of the best guesses by scores [B, M] after each of tokens [B, n]."""
        found = self.narrowed(scores, width)
        chosen = self.scored(found, tokens).topk(width, dim=-1).indices
        return found.places[:, None].expand(-1, chosen.shape[1], -1).gather(2, chosen)

    def confident(self, scores: Tensor, tokens: Tensor, width: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Log confidences and places [n, width] of the best guesses by scores [1, M] after each of tokens [n].

        What is no candidate keeps its share as if nothing were known of the token before.
        """
        found = self.narrowed(scores, width)
        again = self.scored(found, tokens[None])[0] / temperature  # [n, C]
        rest = (scores / temperature).scatter(1, found.places, -torch.inf).logsumexp(-1)
        best = again.topk(min(width, again.shape[-1]), dim=-1)
        whole = torch.logaddexp(again.logsumexp(-1), rest)
        return best.values - whole[:, None], found.places[0][best.indices]
