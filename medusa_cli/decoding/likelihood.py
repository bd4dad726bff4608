"""How likely the backbone held the tokens of an answer, and which others it held likely."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Likelihood:
    """A token's log probability by the backbone's own distribution (temperature 1, no cut), and the likeliest ones'."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def likelihoods(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[Likelihood, ...]:
    """Those of n tokens by the logits [n, V] that each was chosen from, with the `top` likeliest in their places."""
    log_p = logits[: len(tokens)].float().log_softmax(-1)
    chosen = torch.tensor(list(tokens), device=log_p.device)
    own = log_p.gather(1, chosen[:, None])[:, 0].tolist()
    values, ids = log_p.topk(min(top, log_p.shape[-1]), dim=-1)
    best = [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return tuple(Likelihood(*one) for one in zip(tokens, own, best, strict=True))
