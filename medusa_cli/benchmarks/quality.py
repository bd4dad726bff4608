"""What a looser rule costs: the plain model's own opinion of the answers that a method gave."""

import math
from collections.abc import Sequence

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.benchmarks.measure import Result
from medusa_cli.engines import Plan


@torch.inference_mode()
def likelihood(backbone: Backbone, results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Each method's answers to every first turn under the backbone's own distribution at temperature 1.

    nll: nats a token; perplexity: its exponential; agreement: share of tokens that are the backbone's first choice;
    tokens: how many. Plain sampling's own figures are what the others are to be held against.
    """
    found = {}
    for name in results[0].answers:
        nll, same, count = 0.0, 0, 0
        for result in results:
            answer = result.answers[name].turns[0]
            if not answer:
                continue
            prompt = backbone.encode_chat([{"role": "user", "content": result.question.turns[0]}])
            ids = torch.tensor([*prompt, *answer], device=backbone.device)
            logits = backbone.engine.forward(Plan.chain(ids, logits="all"), backbone.engine.new_cache()).logits[0]
            scores = logits[len(prompt) - 1 : -1].float().log_softmax(-1)  # [T, V], the rows that emit the answer
            emitted = ids[len(prompt) :]
            nll -= float(scores.gather(1, emitted[:, None]).sum())
            same += int((scores.argmax(-1) == emitted).sum())
            count += len(answer)
        mean = nll / max(count, 1)
        share = same / max(count, 1)
        found[name] = {"nll": mean, "perplexity": math.exp(mean), "agreement": share, "tokens": count}
    return found
