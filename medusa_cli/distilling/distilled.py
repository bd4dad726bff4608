"""What distillation is asked for, in which order it goes, and what it gives."""

import random
from dataclasses import dataclass

from torch import Tensor

from medusa_cli.distilling.seeds import Seed
from medusa_cli.errors import UsageError

# Seeds are sorted by length within windows of this many batches: neighbours in the batch then have like lengths
# (attention runs to the longest), while the order of the whole stays mixed.
WINDOW = 8


@dataclass(frozen=True)
class Settings:
    """How to generate: tokens an answer, turns a conversation, temperature (0 is greedy), slots, positions a slot.

    self_talk: the model writes the user's turns too, all but the first. taps: after which of the model's layers states
    are kept, before the final ones in each row.
    """

    max_new_tokens: int = 256
    max_turns: int = 2
    temperature: float = 0.0
    random_seed: int = 0
    batch_size: int = 64
    capacity: int = 1024
    self_talk: bool = False
    taps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value, least in (
            ("@max_new_tokens", self.max_new_tokens, 1),
            ("@max_turns", self.max_turns, 1),
            ("@temperature", self.temperature, 0.0),
            ("@batch_size", self.batch_size, 1),
        ):
            if value < least:
                raise UsageError(f"{name} {value} is too small", f"use {least} or more")
        if self.max_new_tokens >= self.capacity:
            raise UsageError(
                f"@max_new_tokens {self.max_new_tokens} leaves no room for a prompt in @context {self.capacity}",
                "lower @max_new_tokens or raise @context",
            )


@dataclass
class Distilled:
    """One finished conversation: messages, its token ids, the assistant spans [start, end), the state at each position.

    A server's answers come without states. Files of earlier versions keep those alone that emitted the answers' tokens.
    """

    id: str
    messages: list[dict[str, str]]
    tokens: list[int]
    spans: list[tuple[int, int]]
    states: Tensor  # [len(tokens) - 1, H * taps]; row p is the state at position p, which says token p + 1


def order(seeds: list[Seed], settings: Settings, max_samples: int | None = None) -> list[Seed]:
    """Shuffle by the random seed, take max_samples, and sort by length within windows; the same for every resume."""
    mixed = list(seeds)
    random.Random(settings.random_seed).shuffle(mixed)
    mixed = mixed[:max_samples]
    size = WINDOW * settings.batch_size
    windows = [mixed[i : i + size] for i in range(0, len(mixed), size)]
    return [seed for window in windows for seed in sorted(window, key=lambda s: len("".join(s.turns)))]
