"""What decoding passes along: verdicts, steps and their sums."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from medusa_cli.decoding.likelihood import Likelihood


@dataclass(frozen=True)
class Verdict:
    """The accepted nodes from the root on, path [A+1], and `bonus`, the token the backbone adds after them."""

    path: list[int]
    bonus: int


@dataclass(frozen=True)
class Settled:
    """What a pass settled for one sequence: the accepted nodes from the root on, path [A+1], the token after them, the
    tapped states [A+1, H * taps], the states [K, H] of the last node's pseudo rows, where there were any, and, where
    they were asked for, the logits [A+1, V]."""

    path: list[int]
    bonus: int
    hidden: Tensor
    ahead: Tensor | None = None
    logits: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """One round of draft, verify, accept: tokens for the user, nodes drafted and accepted, seconds of each part.

    Accepted counts the tokens beyond the one that plain decoding gives; what comes after the answer's end is none. path
    names the accepted nodes, root first, of a tree of so many `nodes`; () at prefill. likelihoods are those of the
    tokens, where the sequence asked for them. looked_up: the tokens that were drafted from the text itself.
    """

    tokens: list[int]
    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    prefill: bool = False
    path: tuple[int, ...] = ()
    nodes: int = 0
    likelihoods: tuple[Likelihood, ...] = ()
    looked_up: int = 0


@dataclass
class Stats:
    """Sums over steps; the acceptance rate counts verified steps alone, prefill apart."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    prefill_s: float = 0.0

    @classmethod
    def of(cls, steps: Iterable[Step]) -> "Stats":
        stats = cls()
        for step in steps:
            stats.add(step)
        return stats

    def add(self, step: Step) -> None:
        self.tokens += len(step.tokens)
        if step.prefill:
            self.prefill_s += step.verify_s
            return
        self.steps += 1
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.draft_s += step.draft_s
        self.verify_s += step.verify_s

    def __iadd__(self, other: "Stats") -> "Stats":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.draft_s + self.verify_s

    @property
    def acceptance_rate(self) -> float:
        """Tokens a verified step adds to the answer, the backbone's own included; 1.0 is plain decoding."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds of a verified step, drafting included."""
        return (self.draft_s + self.verify_s) / self.steps if self.steps else 0.0
