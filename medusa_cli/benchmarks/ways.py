"""Ways to be answered, loaded alike: the same questions of each, in turns, and what comes of it."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from medusa_cli.errors import UserError


@dataclass
class Way:
    """A way to be answered, by so many clients at a time: how to ask, and the tokens and seconds of each load."""

    name: str
    ask: Callable[[str], int]
    clients: int = 1
    loads: list[tuple[int, float]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in self.loads]

    def run(self, questions: Sequence[str]) -> None:
        """Ask; one client does in this thread, as chat and the API do."""
        began = time.perf_counter()
        if self.clients == 1:
            tokens = sum(self.ask(one) for one in questions)
        else:
            with ThreadPoolExecutor(self.clients) as pool:
                tokens = sum(pool.map(self.ask, questions))
        self.loads.append((tokens, time.perf_counter() - began))


@dataclass(frozen=True)
class Standing:
    """What a way came to: its rate in all, and over the first way's."""

    way: str
    clients: int
    tokens: int
    tokens_per_s: float
    over_the_first: float


def whole_answers(way: Way, questions: Iterable[str], wanted: int, tokens: int) -> list[str]:
    """The first questions whose answers do not end before so many tokens; UserError for too few."""
    long = list(islice((question for question in questions if way.ask(question) == tokens), wanted))
    if len(long) < wanted:
        raise UserError(f"only {len(long)} answers have {tokens} tokens", "ask for fewer @questions or tokens")
    return long


def in_turns(ways: Sequence[Way], questions: Sequence[str]) -> None:
    """Each question to every way of one client in turns, then all of them to those of many."""
    alone = [way for way in ways if way.clients == 1]
    for number, question in enumerate(questions):
        turn = number % len(alone) if alone else 0
        for way in [*alone[turn:], *alone[:turn]]:  # noise and what the machine does meanwhile meets all alike
            way.run([question])
    for way in ways:
        if way.clients > 1:
            way.run(questions)


def standings(ways: Sequence[Way]) -> list[Standing]:
    """How each way stands to the first: for ways of one client by the median over the questions."""
    found = []
    first = ways[0]
    for way in ways:
        tokens, seconds = (sum(column) for column in zip(*way.loads, strict=True))
        over = tokens / seconds / (sum(one for one, _ in first.loads) / sum(one for _, one in first.loads))
        if len(way.loads) == len(first.loads):
            over = statistics.median(own / other for own, other in zip(way.rates, first.rates, strict=True))
        found.append(Standing(way.name, way.clients, tokens, round(tokens / seconds, 2), round(over, 3)))
    return found
