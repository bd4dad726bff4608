"""What a benchmarked method gives back for a prompt, and how a batch's time is shared among its prompts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from medusa_cli.benchmarks.tally import Tally

Watch = Callable[[list[int]], None]


class Continuation(NamedTuple):
    """The new token ids, the seconds they took, and the sums over their steps where the method has steps."""

    tokens: list[int]
    seconds: float
    stats: Tally | None


def share(answers: Sequence[list[int]], seconds: float, stats: Sequence[Tally | None]) -> list[Continuation]:
    """The seconds of a batch, shared among its answers by their tokens."""
    each = seconds / max(sum(map(len, answers)), 1)
    return [Continuation(tokens, each * len(tokens), one) for tokens, one in zip(answers, stats, strict=True)]
