"""The shape that drafters of K heads share, as their files say it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta
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

    num_heads: Annotated[int, Meta(ge=1, le=64)]
    num_layers: Annotated[int, Meta(ge=0, le=16)]
    hidden_size: Annotated[int, Meta(ge=1)]
    vocab_size: Annotated[int, Meta(ge=1)]
    vocabulary: Literal["draft", "own", "shared"] = "draft"
    draft_vocab_size: Annotated[int, Meta(ge=1)] | None = None
    matrices: Literal["each", "one"] = "each"
    rank: Annotated[int, Meta(ge=1)] | None = None
    conditional: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        if (self.draft_vocab_size or 0) > self.vocab_size or (self.rank or 0) > self.hidden_size:
            raise ValueError("a draft vocabulary or a rank is larger than what it is a part of")
        if self.vocabulary == "draft" and self.draft_vocab_size is None:
            raise ValueError("a draft vocabulary needs its draft_vocab_size")


def check_vocabulary(
    name: str,
    known: Sequence[str],
    vocabulary: Any,
    draft_ids: Tensor | None,
    matrices: Any,
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
