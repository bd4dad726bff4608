"""The sampler of a sequence, which chooses tokens from logits with a random stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.decode.processors import SequenceProcessors
from medusa_cli.decode.sampling_options import Sampling
from medusa_cli.device import upload

# A nucleus rarely has more tokens than this. Finding this many of the largest probabilities takes a
# tenth of the time of sorting the vocabulary.
NUCLEUS = 512
# Up to FLAT weights are summed one by one. More weights are first summed in blocks of BLOCK.
FLAT = 2048
BLOCK = 128
# Devices without fp64. For these, the host draws the tokens.
WITHOUT_DOUBLE = ("mps",)


def candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Returns the weights [.., C] to draw from and their token ids.

    The ids are None if the weights cover the whole vocabulary in order. Temperature, then top-k,
    then top-p are applied to logits [.., V].
    """
    scores = logits.float() / sampling.temperature
    ids = None
    if 0 < sampling.top_k < scores.shape[-1]:
        scores, ids = _top_k(scores, sampling.top_k)
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        if ids is None:
            probs, ids = _likeliest(probs, sampling.top_p)
        probs = nucleus(probs, sampling.top_p)
    return probs, ids


def nucleus(probs: Tensor, top_p: float | Tensor) -> Tensor:
    """Returns probabilities, which are in descending order, with those outside the nucleus set to zero.

    A token stays if the sum of the probabilities before it is below top_p, so the most likely token always stays.
    """
    before = probs.cumsum(-1) - probs
    return probs.masked_fill((before >= top_p) & (before > 0), 0)  # fp32 may round top_p to 0


def _top_k(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest scores in descending order, including ties with the k-th, and their token ids."""
    values, ids = scores.topk(top_k, dim=-1)
    lowest = values[..., -1:]
    count = int(((scores >= lowest) & (scores > -torch.inf)).sum(-1).max())
    if count > top_k:
        values, ids = scores.topk(count, dim=-1)
        values = values.masked_fill(values < lowest, -torch.inf)
    return values, ids


def _likeliest(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Returns enough of the largest probabilities, in descending order, to reach top_p, and their token ids."""
    # On a GPU, sorting takes less time than waiting for the sum.
    if probs.device.type == "cpu" and probs.shape[-1] > NUCLEUS:
        best = probs.topk(NUCLEUS, dim=-1)
        if bool((best.values.sum(-1) > top_p).all()):
            return best.values, best.indices
    ordered = probs.sort(dim=-1, descending=True)
    return ordered.values, ordered.indices


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Returns the index [..] at which each uniform number [..] falls among weights [.., C].

    The weights need not sum to one. This method needs one random number per row, whereas exponential races need C. If
    there are more than FLAT weights, the block is found first, from the sums of the blocks, because running sums in
    fp64 over all weights of many rows would be slow.
    """
    size = weights.shape[-1]
    if size <= FLAT:
        weights = weights.double()
        target = uniforms.to(weights)[..., None] * weights.sum(-1, keepdim=True)
        return _invert(weights, target)[0][..., 0]
    blocks = F.pad(weights, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1, dtype=torch.double)
    block, rest = _invert(sums, uniforms.to(sums)[..., None] * sums.sum(-1, keepdim=True))
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, BLOCK))[..., 0, :]
    place, _ = _invert(inside.double(), rest)
    return (block * BLOCK + place).clamp(max=size - 1)[..., 0]


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first index at which the running sum of weights [.., C] exceeds a target [.., 1].

    Also returns the rest of the target: the target minus the sum before the index.
    """
    summed = weights.cumsum(-1)
    # Rounding must not select a weight of zero or go beyond the last weight.
    limit = torch.nextafter(summed[..., -1:], torch.zeros_like(target))
    target = torch.minimum(target.clamp(min=0), limit)
    index = torch.searchsorted(summed, target, right=True).clamp(max=weights.shape[-1] - 1)
    return index, target - (summed.gather(-1, index) - weights.gather(-1, index))


class Sampler:
    """Chooses the tokens of one sequence, each with one uniform number from the sequence's random stream.

    The numbers do not depend on the device or on drafts, so only the seed determines the answer to
    a request. `stream` selects the random stream; stream 0 uses the seed unchanged. processors:
    those that change the logits before a token is chosen; None if there are none.
    """

    def __init__(
        self, sampling: Sampling, stream: int = 0, processors: SequenceProcessors | None = None
    ) -> None:
        self.sampling = sampling
        self.greedy = sampling.greedy
        self.processors = processors
        self.generator = torch.Generator().manual_seed((sampling.seed + stream) % 2**63)
        self._uniforms: list[float] = []

    def peek_uniforms(self, count: int) -> list[float]:
        """Returns the random numbers for the next `count` tokens."""
        missing = count - len(self._uniforms)
        if missing > 0:
            self._uniforms += torch.rand(
                missing, generator=self.generator, dtype=torch.double
            ).tolist()
        return self._uniforms[:count]

    def advance(self, count: int) -> None:
        """Drops the random numbers of `count` chosen tokens."""
        del self._uniforms[:count]

    def sample(self, logits: Tensor, uniforms: Sequence[float]) -> list[int]:
        """Returns one token for each row of logits [n, V], chosen with the row's uniform number."""
        ids: Tensor | None = None
        if self.processors is not None and self.processors.truncates:
            weights = logits.softmax(-1)
        else:
            weights, ids = candidates(logits, self.sampling)
        if weights.device.type in WITHOUT_DOUBLE:
            weights = weights.cpu()
            ids = None if ids is None else ids.cpu()
        drawn = draw(weights, upload(uniforms, weights.device, torch.double))
        if ids is not None:
            drawn = ids.gather(-1, drawn[:, None])[:, 0]
        tokens: list[int] = drawn.tolist()
        return tokens

    def choose(self, logits: Tensor) -> int:
        """Returns the next token, chosen from one row of logits [V].

        If the sequence has processors, every token is chosen here, in order.
        """
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
