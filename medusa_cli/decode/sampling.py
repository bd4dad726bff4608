"""Sampling: how a sequence chooses its next token from logits, with a random stream of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.device import upload
from medusa_cli.errors import UsageError

if TYPE_CHECKING:
    from medusa_cli.decode.processors import SequenceProcessors

MODES = ("greedy", "exact", "typical")
# A nucleus is rarely larger, and finding so many likeliest tokens takes a tenth of sorting the vocabulary.
NUCLEUS = 512
# Weights whose sums are taken one by one at most, and the size of blocks of more.
FLAT, BLOCK = 2048, 128
# Devices without fp64: draws take place on the host.
WITHOUT_DOUBLE = ("mps",)
# Dividing logits by less than this may overflow fp32.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """Mode, temperature, top-p and top-k, epsilon and delta of typical acceptance, the seed, and min-p.

    min_p: None is the model's own, as in its generation config.
    """

    mode: str = "greedy"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    epsilon: float = 0.09
    delta: float = 0.3
    seed: int = 0
    min_p: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"@sampling {self.mode!r} is unknown", f"use one of {', '.join(MODES)}")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"@temperature {self.temperature} is not valid", "use 0 for greedy, or a positive number")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"@top_p {self.top_p} is not valid", "use a number above 0 and at most 1")
        if self.top_k < 0:
            raise UsageError(f"@top_k {self.top_k} is not valid", "use 0 for no cut, or a positive number")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UsageError(f"@min_p {self.min_p} is not valid", "use a number from 0 to 1")
        for name, value in cuts(self.top_p, self.top_k, self.min_p).items():
            if self.mode == "typical":
                raise UsageError(
                    f"{name} {value} has no effect with @sampling typical, which has a rule of its own",
                    f"leave {name} out, or use @sampling exact",
                )
        if not 0 < self.epsilon <= 1 or not self.delta > 0:
            raise UsageError(
                f"epsilon {self.epsilon} and delta {self.delta} is not valid", "use 0 < epsilon <= 1 and delta > 0"
            )

    @classmethod
    def by_name(cls, temperature: float, name: str) -> Sampling:
        """Returns exact sampling with a seed derived from a name alone; greedy at temperature 0."""
        if temperature == 0:
            return cls()
        return cls("exact", temperature, seed=int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))

    @cached_property
    def greedy(self) -> bool:
        """Returns True if every token is the most likely one; temperature 0 is greedy in every mode."""
        return self.mode == "greedy" or self.temperature < MIN_TEMPERATURE

    @cached_property
    def exact(self) -> bool:
        """Returns True if tokens are drawn from the model's own distribution, after temperature and cuts."""
        return self.mode == "exact" and not self.greedy


def cuts(top_p: float, top_k: int, min_p: float | None) -> dict[str, float]:
    """Returns the settings that leave tokens out, by name."""
    return {
        **({"@top_p": top_p} if top_p < 1 else {}),
        **({"@top_k": top_k} if top_k else {}),
        **({"@min_p": min_p} if min_p else {}),
    }


def sampling_of(
    mode: str | None,
    temperature: float | None,
    top_p: float,
    top_k: int,
    random_seed: int | None,
    min_p: float | None = None,
) -> Sampling:
    """Returns the sampling that options ask for; a temperature alone means exact sampling.

    Raises UsageError for top-p, top-k or min-p without a temperature: greedy decoding would not read them.
    """
    if temperature is None:
        temperature = 0.7 if mode in ("exact", "typical") else 0.0
        for name, value in cuts(top_p, top_k, min_p).items():
            if not temperature:
                raise UsageError(
                    f"{name} {value} has no effect without a temperature", f"give @temperature, or leave {name} out"
                )
    mode = mode or ("exact" if temperature > 0 else "greedy")
    return Sampling(mode, temperature, top_p, top_k, seed=random_seed or 0, min_p=min_p)


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Returns the weights [.., C] to draw from and their token ids; None for the whole vocabulary in order.

    Applies temperature, then top-k, then top-p to logits [.., V].
    """
    scores, ids = logits.float() / sampling.temperature, None
    if 0 < sampling.top_k < scores.shape[-1]:
        scores, ids = _top_k(scores, sampling.top_k)
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        if ids is None:
            probs, ids = _likeliest(probs, sampling.top_p)
        probs = nucleus(probs, sampling.top_p)
    return probs, ids


def nucleus(probs: Tensor, top_p: float | Tensor) -> Tensor:
    """Sets probabilities (in falling order) outside the nucleus to zero.

    A token stays while the mass before it is below top_p, so the most likely one always stays.
    """
    return probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0)


def _top_k(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest scores in falling order, with all that tie with the k-th, as in transformers; token ids."""
    values, ids = scores.topk(top_k, dim=-1)
    lowest = values[..., -1:]
    count = int((scores >= lowest).sum(-1).max())
    if count > top_k:
        values, ids = scores.topk(count, dim=-1)
        values = values.masked_fill(values < lowest, -torch.inf)
    return values, ids


def _likeliest(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Returns the largest probabilities in falling order, enough to sum to top_p, and their token ids."""
    if probs.device.type == "cpu" and probs.shape[-1] > NUCLEUS:  # on a GPU reading the sum costs more than a sort
        best = probs.topk(NUCLEUS, dim=-1)
        if bool((best.values.sum(-1) > top_p).all()):
            return best.values, best.indices
    ordered = probs.sort(dim=-1, descending=True)
    return ordered.values, ordered.indices


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Returns the index [..] where each uniform number [..] falls among weights [.., C], which need not sum to one.

    Inverting the distribution takes one random number a row; exponential races take C. In a vocabulary the sums of
    blocks say first in which one it falls: running sums in fp64 of all weights of many rows are dear.
    """
    size = weights.shape[-1]
    if size <= FLAT:
        weights = weights.double()
        return _invert(weights, uniforms.to(weights)[..., None] * weights.sum(-1, keepdim=True))[0][..., 0]
    blocks = F.pad(weights, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1, dtype=torch.double)
    block, rest = _invert(sums, uniforms.to(sums)[..., None] * sums.sum(-1, keepdim=True))
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, BLOCK))[..., 0, :]
    place, _ = _invert(inside.double(), rest)
    return (block * BLOCK + place).clamp(max=size - 1)[..., 0]


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where the running sum of weights [.., C] first exceeds a target [.., 1], and what it exceeds before."""
    summed = weights.cumsum(-1)
    # Rounding must lead to no weight of zero, and not beyond the last one.
    target = torch.minimum(target.clamp(min=0), torch.nextafter(summed[..., -1:], torch.zeros_like(target)))
    index = torch.searchsorted(summed, target, right=True).clamp(max=weights.shape[-1] - 1)
    return index, target - (summed.gather(-1, index) - weights.gather(-1, index))


class Sampler:
    """Chooses the tokens of one sequence by its sampling and its random stream, one uniform number a token.

    The numbers do not depend on the device or on drafts: an answer depends on its seed alone. `stream` selects the
    random stream; stream 0 draws as the seed alone would. processors: change the logits first, None for none.
    """

    def __init__(self, sampling: Sampling, stream: int = 0, processors: SequenceProcessors | None = None) -> None:
        self.sampling, self.greedy, self.processors = sampling, sampling.greedy, processors
        self.generator = torch.Generator().manual_seed((sampling.seed + stream) % 2**63)
        self._uniforms: list[float] = []

    def peek_uniforms(self, count: int) -> list[float]:
        """Returns the random numbers of the next `count` tokens."""
        missing = count - len(self._uniforms)
        if missing > 0:
            self._uniforms += torch.rand(missing, generator=self.generator, dtype=torch.double).tolist()
        return self._uniforms[:count]

    def advance(self, count: int) -> None:
        """Drops the numbers of `count` tokens that were chosen."""
        del self._uniforms[:count]

    def sample(self, logits: Tensor, uniforms: Several[float]) -> list[int]:
        """Returns one token for each row of logits [n, V] by its uniform number."""
        # Temperature and cuts are among a sequence's processors.
        weights, ids = candidates(logits, self.sampling) if self.processors is None else (logits.softmax(-1), None)
        if weights.device.type in WITHOUT_DOUBLE:
            weights, ids = weights.cpu(), None if ids is None else ids.cpu()
        drawn = draw(weights, upload(uniforms, weights.device, torch.double))
        tokens: list[int] = (drawn if ids is None else ids.gather(-1, drawn[:, None])[:, 0]).tolist()
        return tokens

    def choose(self, logits: Tensor) -> int:
        """Returns the next token from one row of logits [V]. With processors this chooses every token, in order."""
        if self.processors is not None:
            logits = self.processors(logits)
        if self.sampling.exact:
            (token,) = self.sample(logits[None], self.peek_uniforms(1))
            self.advance(1)
        else:
            token = int(logits.float().argmax())
        if self.processors is not None:
            self.processors.extend([token])
        return token
