"""The shape that drafters of K heads share, as their files say it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from medusa_cli.errors import UserError

VOCABULARIES = ("draft", "own", "shared")
MATRICES = ("each", "one")


@dataclass(frozen=True)
class HeadsConfig:
    """K heads of L layers; which vocabulary they score, of how many tokens, with a matrix each or one for all.

    rank: the vocabulary matrices are products [M, r] [r, H] of this inner size; None for whole ones. conditional: the
    rank of the bias that the token drafted before gives a head's scores; None for none.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    vocabulary: str = "draft"
    draft_vocab_size: int | None = None
    matrices: str = "each"
    rank: int | None = None
    conditional: int | None = None


def check_vocabulary(
    name: str,
    known: Sequence[str],
    vocabulary: str,
    draft_ids: Tensor | None,
    matrices: str,
    rank: int | None,
    hidden_size: int,
) -> None:
    """UserError for a vocabulary or matrices that a kind of drafter, of a name, cannot have; known: what it can."""
    if vocabulary not in known:
        fault = "unknown" if vocabulary not in VOCABULARIES else f"none that {name} can score"
        raise UserError(f"the vocabulary {vocabulary!r} is {fault}", f"use one of {', '.join(known)}")
    if matrices not in MATRICES:
        raise UserError(f"the matrices {matrices!r} are unknown", f"use one of {', '.join(MATRICES)}")
    if vocabulary == "draft" and (draft_ids is None or not len(draft_ids)):
        raise UserError("a draft vocabulary needs its token ids", "give draft_ids")
    if rank is not None and (vocabulary == "shared" or not 1 <= rank < hidden_size):
        raise UserError(
            f"vocabulary matrices of rank {rank} cannot be",
            f"use a rank below {hidden_size}, and the vocabulary draft or own",
        )
