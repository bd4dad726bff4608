"""The shape that drafters of K heads share, as their files say it."""

from dataclasses import dataclass

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
