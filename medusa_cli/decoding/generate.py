"""The decode loop: draft, verify, accept, keep."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.accept import accept
from medusa_cli.decoding.clock import Clock
from medusa_cli.decoding.ending import Ending, fitting
from medusa_cli.decoding.sampling import Sampling, choose
from medusa_cli.decoding.static import generate_static
from medusa_cli.decoding.types import Step
from medusa_cli.drafters.base import Confirmed, Drafter
from medusa_cli.tree import Growth, Tree


def generate(
    backbone: Backbone,
    drafter: Drafter,
    tree: Tree | Growth,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Iterable[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[Step]:
    """Continue a prompt of token ids with drafts, step by step; the tokens of all steps together are the answer.

    Every step drafts the same static tree, or grows one of its own.
    Greedy and exact sampling give what generate_plain gives (the same tokens, the same distribution).
    Raises UserError for a prompt longer than the context.
    """
    sampling = sampling or Sampling()
    pseudo = drafter.pseudo(tree.max_depth)
    if backbone.captures and sampling.greedy and isinstance(tree, Tree) and pseudo is None:
        limits: Any = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, "stop_strings": stop_strings}
        yield from generate_static(backbone, drafter, tree, prompt, **limits)
        return
    ending = Ending(backbone, prompt, max_new_tokens, stop_ids, stop_strings)
    generator = sampling.generator(backbone.device)
    cache = backbone.new_cache(ending.room + tree.size)
    drafter.reset()
    clock = Clock(backbone)

    tokens = torch.tensor(list(prompt), device=backbone.device)
    out = backbone.forward(tokens, cache, taps=drafter.taps, logits="last", pseudo=pseudo)
    assert out.logits is not None
    root = choose(out.logits[-1], sampling, generator)
    confirmed = Confirmed(tokens, out.hidden, root, 0, out.ahead_of(-1))
    yield Step(ending.cut([root]), 0, 0, 0.0, clock.lap(), prefill=True)

    while not ending.done:
        start = cache.length
        # Positions end with the context: near it the tree is cut to the depth that still fits.
        draft = drafter.draft(backbone, cache, confirmed, fitting(tree, backbone.max_positions - start))
        draft_s = clock.lap()
        out = backbone.forward(draft.tokens, cache, draft.tree, taps=drafter.taps, pseudo=pseudo)
        assert out.logits is not None
        verdict = accept(out.logits, draft, sampling, generator)
        cache.keep(start, verdict.path)
        path = torch.tensor(verdict.path, device=backbone.device)
        ahead = out.ahead_of(verdict.path[-1])
        confirmed = Confirmed(draft.tokens[path], out.hidden[path], verdict.bonus, start, ahead)
        fresh = ending.cut([*confirmed.tokens[1:].tolist(), verdict.bonus])
        yield Step(fresh, draft.tree.size - 1, len(fresh) - 1, draft_s, clock.lap())
