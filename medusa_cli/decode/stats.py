"""Results of steps, their sums, and log probabilities of tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.engine.device import upload


@dataclass(frozen=True)
class Likelihood:
    """A token's log probability in the model's own distribution, and those of the likeliest tokens.

    That is before logits processors, temperature and cuts. A prompt's first token has nan.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def likelihoods(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[Likelihood, ...]:
    """Returns those of n tokens by the logits [n, V] they were chosen from, beside the `top` likeliest ones."""
    log_p = logits[: len(tokens)].float().log_softmax(-1)
    chosen = upload(list(tokens), log_p.device)
    own = log_p.gather(1, chosen[:, None])[:, 0].tolist()
    values, ids = log_p.topk(min(top, log_p.shape[-1]), dim=-1)
    best = [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return tuple(Likelihood(*values) for values in zip(tokens, own, best, strict=True))


@dataclass(frozen=True)
class Accepted:
    """Holds what a pass gave one sequence.

    path, tokens [A+1]: the accepted nodes, root first, and what they hold. bonus: the token after them. hidden
    [A+1, H * layers]: the path's states. extra_hidden [K, H]: the last node's extra rows (FIRP). likelihoods: of the
    new tokens, on request.
    """

    path: list[int]
    tokens: list[int]
    bonus: int
    hidden: Tensor
    extra_hidden: Tensor | None = None
    likelihoods: tuple[Likelihood, ...] = ()


@dataclass(frozen=True)
class Step:
    """One round of draft, verify, accept, keep: the tokens that it adds to the answer, and its seconds.

    path: the accepted nodes, root first, of a tree of `nodes`; () at prefill. looked_up: draft tokens from n-gram
    matches.
    """

    tokens: list[int]
    nodes: int = 1
    path: tuple[int, ...] = ()
    draft_s: float = 0.0
    verify_s: float = 0.0
    likelihoods: tuple[Likelihood, ...] = ()
    looked_up: int = 0

    @property
    def accepted(self) -> int:
        """Returns the tokens beyond the one of plain decoding; what follows the answer's end is not counted."""
        return len(self.tokens) - 1


@dataclass
class Stats:
    """Sums steps; prefill is counted apart from verified steps."""

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
        if not step.path:
            self.prefill_s += step.verify_s
            return
        self.steps += 1
        self.drafted += step.nodes - 1
        self.accepted += len(step.tokens) - 1
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
    def acceptance_length(self) -> float:
        """Returns the tokens a verified step adds, the bonus token included; 1.0 is plain decoding."""
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Returns tokens a second, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_s(self) -> float:
        """Returns the mean seconds of a verified step, drafting included."""
        return (self.draft_s + self.verify_s) / self.steps if self.steps else 0.0
