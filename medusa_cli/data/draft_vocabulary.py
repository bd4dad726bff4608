"""The draft vocabulary: the tokens that occur in the most texts, and the share of answer tokens that they cover."""

from collections.abc import Sequence

import torch
from torch import Tensor


def frequent_tokens(
    texts: Sequence[Tensor], size: int, vocab_size: int, known: Tensor | None = None
) -> Tensor:
    """Returns the `size` tokens [size] that occur in the largest number of texts.

    Of tokens in equally many texts, those in an earlier vocabulary `known` come first, and then those with lower ids.
    Texts are counted instead of occurrences, because a repetitive answer can contain one rare token a hundred times.
    """
    counts = torch.bincount(torch.cat([text.unique() for text in texts]), minlength=vocab_size)
    if known is not None:
        counts *= 2
        counts[known.cpu()] += 1
    return counts.argsort(descending=True, stable=True)[:size]


def coverage(ids: Tensor, answers: Sequence[Tensor]) -> float:
    """Returns the share of answer tokens that are in the vocabulary `ids`."""
    counts = torch.bincount(torch.cat(list(answers)), minlength=int(ids.max()) + 1)
    return float(counts[ids.cpu()].sum() / counts.sum())
