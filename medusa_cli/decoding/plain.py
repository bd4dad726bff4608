"""Plain autoregressive decoding, one token a step: the reference every drafter is held against."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.clock import Clock
from medusa_cli.decoding.ending import Ending
from medusa_cli.decoding.sampling import Sampling, choose
from medusa_cli.decoding.static import generate_static
from medusa_cli.decoding.types import Step
from medusa_cli.tree import Tree


def generate_plain(
    backbone: Backbone,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Iterable[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[Step]:
    """Continue a prompt of token ids one token at a time; arguments and errors as in generate."""
    sampling = sampling or Sampling()
    if backbone.captures and sampling.greedy:
        limits: Any = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, "stop_strings": stop_strings}
        yield from generate_static(backbone, None, Tree.root_only(), prompt, **limits)
        return
    ending = Ending(backbone, prompt, max_new_tokens, stop_ids, stop_strings)
    generator = sampling.generator(backbone.device)
    cache = backbone.new_cache(ending.room)
    clock = Clock(backbone)
    tokens = torch.tensor(list(prompt), device=backbone.device)
    prefill = True
    while not ending.done:
        out = backbone.forward(tokens, cache, logits="last")
        assert out.logits is not None
        token = choose(out.logits[-1], sampling, generator)
        yield Step(ending.cut([token]), 0, 0, 0.0, clock.lap(), prefill=prefill)
        tokens = torch.tensor([token], device=backbone.device)
        prefill = False
