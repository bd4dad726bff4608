"""One sequence's passes as tests want them: no dimension of sequences, logits of all rows unless told otherwise."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_cli.backbone import Backbone
from medusa_cli.drafters import Confirmed, Draft, Drafter
from medusa_cli.engines import Cache, Output, Plan, Pseudo
from medusa_cli.tree import Growth, Tree
from tests.tiny import tiny_tokenizer


def run(
    backbone: Backbone,
    tokens: Tensor | Sequence[int],
    cache: Cache | None = None,
    tree: Tree | None = None,
    *,
    slot: int = 0,
    taps: Sequence[int] = (-1,),
    logits: str = "all",
    pseudo: Pseudo | None = None,
) -> Output:
    """Run tokens [n] as a chain, or as a tree, in a slot of a cache: logits [n, V], hidden [n, ..], ahead [n, K, H]."""
    if tree is None:
        plan = Plan.chain(tokens, slot=slot, taps=taps, logits=logits, pseudo=pseudo)
    else:
        plan = Plan.tree(tokens, tree, slot=slot, taps=taps, pseudo=pseudo)
    out = backbone.engine.forward(plan, backbone.engine.new_cache() if cache is None else cache)
    return Output(
        None if out.logits is None else out.logits[0], out.hidden[0], None if out.ahead is None else out.ahead[0]
    )


def prefilled(backbone: Backbone, prompt: Tensor | Sequence[int]) -> Cache:
    """A cache of one slot that holds a prompt."""
    cache = backbone.engine.new_cache()
    run(backbone, prompt, cache, logits="none")
    return cache


def rows_of(cache: Cache, slot: int = 0) -> Tensor:
    """What a slot holds, keys and values [2, layers, KV, length, D]."""
    assert cache.keys is not None and cache.values is not None
    return torch.stack([cache.keys[:, slot], cache.values[:, slot]])[:, :, :, : cache.lengths[slot]]


def drafted(drafter: Drafter, backbone: Backbone, confirmed: Confirmed, shape: Tree | Growth) -> Draft:
    """What a drafter drafts for one sequence, whose state is its own."""
    [draft] = drafter.draft(backbone, [drafter], [confirmed], shape)
    return draft


def saved(model: Any, folder: Path) -> str:
    """A network on disk with a tokenizer of its vocabulary; what to give as the model to load."""
    model.save_pretrained(folder)
    tiny_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return str(folder)
