"""The shape that drafters of K heads share, as their files say it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

VOCABULARIES = ("draft", "own", "shared")
MATRICES = ("each", "one")


@dataclass(frozen=True)
class HeadsConfig:
    """K heads of L layers; which vocabulary they score, of how many tokens, with a matrix each or one for all.

    rank: the vocabulary matrices are products [M, r] [r, H] of this inner size; None for whole ones.
    """

    num_heads: Annotated[int, Meta(ge=1, le=64)]
    num_layers: Annotated[int, Meta(ge=0, le=16)]
    hidden_size: Annotated[int, Meta(ge=1)]
    vocab_size: Annotated[int, Meta(ge=1)]
    vocabulary: Literal["draft", "own", "shared"] = "draft"
    draft_vocab_size: Annotated[int, Meta(ge=1)] | None = None
    matrices: Literal["each", "one"] = "each"
    rank: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        if (self.draft_vocab_size or 0) > self.vocab_size or (self.rank or 0) > self.hidden_size:
            raise ValueError("a draft vocabulary or a rank is larger than what it is a part of")
        if self.vocabulary == "draft" and self.draft_vocab_size is None:
            raise ValueError("a draft vocabulary needs its draft_vocab_size")
