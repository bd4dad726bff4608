"""How far rounded weights move a model: their distributions beside the model's own, along its own answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.backbone import Backbone
from medusa_cli.benchmarks.measure import Result
from medusa_cli.engines import Plan

# Numbers of the model's own distributions that are kept until the rounded one is there: 400 MB.
MOST = 200_000_000


@dataclass(frozen=True)
class Remembered:
    """Of each answer looked at: its ids behind the prompt's, and the log-probabilities [T, V] of its rows."""

    answers: list[tuple[Tensor, Tensor]]


@torch.inference_mode()
def remember(plain: Backbone, results: Sequence[Result]) -> Remembered:
    """What the transformers model says along "hf"'s answers to the first turns, as far as there is room for it."""
    kept: list[tuple[Tensor, Tensor]] = []
    for result in results:
        answer = result.answers["hf"].turns[0]
        if (len(answer) + sum(len(own) for _, own in kept)) * plain.vocab_size > MOST and kept:
            break
        prompt = plain.encode_chat([{"role": "user", "content": result.question.turns[0]}])
        ids = torch.tensor([*prompt, *answer])
        logits = plain.model(ids[None].to(plain.device)).logits[0, len(prompt) - 1 : -1]  # what emits the answer
        kept.append((ids, logits.float().log_softmax(-1).half().cpu()))
    return Remembered(kept)


@torch.inference_mode()
def drift(backbone: Backbone, remembered: Remembered) -> dict[str, float]:
    """The backbone against what the transformers model said.

    kl: mean KL(model || backbone) in nats a token; agreement: share of tokens that both would choose; tokens.
    """
    divergence, same, count = 0.0, 0, 0
    for ids, kept in remembered.answers:
        moved = backbone.engine.forward(Plan.chain(ids, logits="all"), backbone.engine.new_cache()).logits[0]
        log_q = moved[-len(kept) - 1 : -1].float().log_softmax(-1)
        own = kept.to(log_q.device).float().log_softmax(-1)  # halves do not quite sum to 1
        divergence += float((own.exp() * (own - log_q)).sum())
        same += int((own.argmax(-1) == log_q.argmax(-1)).sum())
        count += len(kept)
    return {"kl": divergence / max(count, 1), "agreement": same / max(count, 1), "tokens": count}
