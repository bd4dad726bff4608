"""How the next token is chosen from logits: greedy, exact sampling, or the paper's typical acceptance."""

import hashlib
from collections.abc import Sequence as Several
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.errors import UsageError

MODES = ("greedy", "exact", "typical")
# A nucleus is rarely larger; to find so many of a large vocabulary takes a tenth of sorting it.
FEW = 512
# Logits over less than this may leave what fp32 holds.
COLD = 1e-6


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

    @classmethod
    def by_name(cls, temperature: float, name: str) -> "Sampling":
        """Exact sampling whose draws hang on a name alone, whatever is decoded beside it; greedy at temperature 0."""
        if temperature == 0:
            return cls()
        return cls("exact", temperature, seed=int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one; temperature 0, or next to it, is greedy in every mode."""
        return self.mode == "greedy" or self.temperature < COLD


def sampling_of(
    mode: str | None, temperature: float | None, top_p: float, top_k: int, random_seed: int | None
) -> Sampling:
    """The decoding rule the words for sampling ask for; a temperature alone means exact sampling."""
    heat = temperature if temperature is not None else (0.7 if mode in ("exact", "typical") else 0.0)
    kind = mode or ("exact" if heat > 0 else "greedy")
    return Sampling(kind, heat, top_p, top_k, seed=random_seed or 0)


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """What tokens [.., V] are drawn from: weights [.., C] and the tokens they are of, None for all in their order.

    Temperature first, then the top-k cut, then the nucleus.
    """
    scores, ids = logits.float() / sampling.temperature, None
    if 0 < sampling.top_k < scores.shape[-1]:
        scores, ids = scores.topk(sampling.top_k, dim=-1)
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        if ids is None:
            probs, ids = _likeliest(probs, sampling.top_p)
        probs = nucleus(probs, sampling.top_p)
    return probs, ids


def nucleus(probs: Tensor, top_p: float | Tensor) -> Tensor:
    """Probabilities in falling order without those that the likelier ones make up top_p without.

    A token stays while the mass before it is below top_p, so the most likely one always stays.
    """
    return probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0)


def _likeliest(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The largest probabilities, which make up top_p at least, in falling order, and whose they are."""
    if probs.device.type == "cpu" and probs.shape[-1] > FEW:  # elsewhere a look at the sum would cost more than a sort
        best = probs.topk(FEW, dim=-1)
        if bool((best.values.sum(-1) > top_p).all()):
            return best.values, best.indices
    ordered = probs.sort(dim=-1, descending=True)
    return ordered.values, ordered.indices


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The place [..] where each uniform number [..] falls among weights [.., C], which need not sum to one.

    Inverting the distribution takes one random number a row, where the usual race of exponential ones takes C.
    """
    summed = weights.cumsum(-1, dtype=torch.double)
    at = uniforms.to(summed)[..., None] * summed[..., -1:]
    return torch.searchsorted(summed, at, right=True).clamp(max=weights.shape[-1] - 1)[..., 0]


class Rule:
    """How one sequence chooses its tokens: its sampling, and random numbers of its own, one for each token.

    The same numbers whatever device decodes and whatever is drafted: an answer depends on its seed alone.
    """

    def __init__(self, sampling: Sampling, number: int = 0) -> None:
        self.sampling, self.greedy = sampling, sampling.greedy
        # Sequences side by side draw apart; the first draws as it would alone.
        self.generator = torch.Generator().manual_seed((sampling.seed + number) % 2**63)
        self._ahead: list[float] = []

    def coming(self, count: int) -> list[float]:
        """The random numbers of the next so many tokens."""
        missing = count - len(self._ahead)
        if missing > 0:
            self._ahead += torch.rand(missing, generator=self.generator, dtype=torch.double).tolist()
        return self._ahead[:count]

    def used(self, count: int) -> None:
        """So many tokens have been chosen."""
        del self._ahead[:count]

    def sample(self, logits: Tensor, numbers: Several[float]) -> list[int]:
        """A token of each row of logits [n, V], by the number of each."""
        weights, ids = candidates(logits, self.sampling)
        places = draw(weights, torch.tensor(numbers, dtype=torch.double, device=logits.device))
        found: list[int] = (places if ids is None else ids.gather(-1, places[:, None])[:, 0]).tolist()
        return found

    def choose(self, logits: Tensor) -> int:
        """One token from one row of logits [V]."""
        if self.greedy or self.sampling.mode == "typical":
            return int(logits.float().argmax())
        (token,) = self.sample(logits[None], self.coming(1))
        self.used(1)
        return token
