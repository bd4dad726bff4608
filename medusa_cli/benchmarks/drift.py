"""How far rounded weights move a model: their distributions beside the model's own, along its own answers."""

from collections.abc import Sequence
from typing import Any

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.benchmarks.measure import Result
from medusa_cli.engines import Plan


@torch.inference_mode()
def drift(backbone: Backbone, plain: Any, results: Sequence[Result]) -> dict[str, float]:
    """The backbone against the transformers model that "hf" ran, over the answers of that to every first turn.

    kl: mean KL(model || backbone) in nats a token; agreement: share of tokens that both would choose; tokens.
    """
    divergence, same, count = 0.0, 0, 0
    for result in results:
        answer = result.answers["hf"].turns[0]
        prompt = backbone.encode_chat([{"role": "user", "content": result.question.turns[0]}])
        ids = torch.tensor([*prompt, *answer])
        rows = slice(len(prompt) - 1, len(ids) - 1)  # those that emit the answer's tokens
        own = plain(ids[None].to(plain.device)).logits[0, rows].float().log_softmax(-1)
        moved = backbone.engine.forward(Plan.chain(ids, logits="all"), backbone.engine.new_cache()).logits[0]
        log_q = moved[rows].log_softmax(-1).to(own.device)
        divergence += float((own.exp() * (own - log_q)).sum())
        same += int((own.argmax(-1) == log_q.argmax(-1)).sum())
        count += len(answer)
    return {"kl": divergence / max(count, 1), "agreement": same / max(count, 1), "tokens": count}
