"""How the next token is chosen from logits: greedy, exact sampling, or the paper's typical acceptance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.errors import UsageError

MODES = ("greedy", "exact", "typical")


@dataclass(frozen=True)
class Sampling:
    """Mode, temperature, nucleus (top_p) and top_k cuts, typical acceptance's epsilon and delta, random seed."""

    mode: str = "greedy"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    epsilon: float = 0.09
    delta: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"@sampling {self.mode!r} is unknown", f"use one of {', '.join(MODES)}")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"@temperature {self.temperature} cannot be", "use 0 for greedy, or a positive number")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"@top_p {self.top_p} cannot be", "use a number above 0 and at most 1")
        if self.top_k < 0:
            raise UsageError(f"@top_k {self.top_k} cannot be", "use 0 for no cut, or a positive number")
        cuts = {"@top_p": self.top_p if self.top_p < 1 else None, "@top_k": self.top_k or None}
        for name, value in cuts.items():
            if self.mode == "typical" and value is not None:
                raise UsageError(
                    f"{name} {value} says nothing to @sampling typical, whose own rule cuts off unlikely tokens",
                    f"leave {name} out, or use @sampling exact",
                )
        if not 0 < self.epsilon <= 1 or not self.delta > 0:
            raise UsageError(
                f"epsilon {self.epsilon} and delta {self.delta} cannot be", "use 0 < epsilon <= 1 and delta > 0"
            )

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one; temperature 0 is greedy in every mode."""
        return self.mode == "greedy" or self.temperature == 0


def sampling_of(
    mode: str | None, temperature: float | None, top_p: float, top_k: int, random_seed: int | None
) -> Sampling:
    """The decoding rule the words for sampling ask for; a temperature alone means exact sampling."""
    heat = temperature if temperature is not None else (0.7 if mode in ("exact", "typical") else 0.0)
    kind = mode or ("exact" if heat > 0 else "greedy")
    return Sampling(kind, heat, top_p, top_k, seed=random_seed or 0)


def target_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distributions [N, V] tokens are drawn from: temperature first, then the top-k cut, then the nucleus."""
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        # A token stays while the mass before it is below top_p, so the most likely one always stays.
        ordered[ordered.cumsum(-1) - ordered >= sampling.top_p] = 0
        probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
        probs /= probs.sum(-1, keepdim=True)
    return probs


class Rule:
    """How one sequence chooses its tokens: its sampling, and random numbers of its own."""

    def __init__(self, sampling: Sampling, device: torch.device, number: int = 0) -> None:
        self.sampling, self.greedy = sampling, sampling.greedy
        # Sequences side by side draw apart; the first draws as it would alone.
        self.generator = torch.Generator(device).manual_seed((sampling.seed + number) % 2**63)

    def choose(self, logits: Tensor) -> int:
        """One token from one row of logits [V]."""
        if self.greedy or self.sampling.mode == "typical":
            return int(logits.float().argmax())
        return int(torch.multinomial(target_probs(logits[None], self.sampling)[0], 1, generator=self.generator))
