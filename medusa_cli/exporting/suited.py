"""The tree that pays best in transformers' own passes, which cost otherwise than ours: timed here, with the export."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from medusa_cli.tree.budget import Budget, Costs, budgets
from medusa_cli.tree.search import Accuracies, largest, search
from medusa_cli.tree.tree import Tree

# Products over few rows may cost more than over some: sizes are timed one by one there.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32)
CONTEXT, ROUNDS = 128, 5


def suited(folder: Path, network: Any, accuracies: Accuracies, nodes: int | None = None) -> tuple[Tree, float]:
    """The tree of so many nodes, or (None) the one that is expected to pay best, and its speed over plain decoding.

    folder: the export so far, whose drafter is timed with its own code. At least one node is drafted.
    """
    if nodes is not None:
        return search(accuracies, nodes), 0.0
    every = budgets(accuracies, _costs(folder, network, len(accuracies), largest(accuracies)))
    best: Budget = max(every[1:], key=lambda one: one.tokens_per_s)
    return best.tree, best.tokens_per_s / every[0].tokens_per_s


@torch.inference_mode()
def _costs(folder: Path, network: Any, levels: int, most: int) -> Costs:
    """Seconds of the network's passes by rows, and of the exported drafter by levels."""
    from medusa_cli.exporting.custom_generate import generate

    prompt = torch.arange(CONTEXT)[None] % network.config.get_text_config().vocab_size
    cache = DynamicCache()
    out = network(prompt, past_key_values=cache, use_cache=True, output_hidden_states=True, logits_to_keep=1)

    def verify(rows: int) -> Callable[[], None]:
        def run() -> None:
            network(prompt[:, :rows], past_key_values=cache, use_cache=True, output_hidden_states=True)
            cache.crop(-rows)

        return run

    guesser = generate.load_drafter(str(folder), network)
    opening = guesser.opening(prompt[0], guesser.states(out.hidden_states))

    def draft(depth: int) -> Callable[[], None]:
        tree = generate.Tree([-1, *range(depth)], [0] * (depth + 1))

        def run() -> None:
            guesser.tree = tree
            guesser.reset()
            guesser.draft(*opening, 1)

        return run

    found = _times([*(verify(rows) for rows in SIZES if rows <= most), *(draft(one + 1) for one in range(levels))])
    sizes = [rows for rows in SIZES if rows <= most]
    return Costs(dict(zip(sizes, found, strict=False)), dict(enumerate(found[len(sizes) :], 1)))


def _times(runs: list[Callable[[], None]]) -> list[float]:
    """The median seconds of each, all in turns."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS + 1):
        for run, own in zip(runs, taken, strict=True):
            began = time.perf_counter()
            run()
            own.append(time.perf_counter() - began)
    return [statistics.median(own[1:]) for own in taken]
