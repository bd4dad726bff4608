"""Rows a step against time, for each engine, with the ceiling that memory sets."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.clock import Clock
from medusa_cli.engines import Cache, Plan
from medusa_cli.tree import Tree

ROWS = (1, 4, 8, 16, 32, 64)
ROUNDS = 15
COPIED = 256 * 2**20


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, that a plain copy of 256 MiB moves; the best of five."""
    source = torch.ones(COPIED // 4, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * COPIED / best


@dataclass(frozen=True)
class Timed:
    """One engine at one context: median seconds of a step by its rows, seconds of the prefill, bytes of the cache."""

    seconds: dict[int, float]
    prefill_s: float
    cache_bytes: int


def time_rows(
    engines: Mapping[str, Backbone],
    rows: Sequence[int] = ROWS,
    *,
    context: int = 384,
    rounds: int = ROUNDS,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> dict[str, Timed]:
    """Time forward passes over so many tree nodes after `context` tokens, logits read, by engine.

    Engines and sizes take turns, so that drift of the machine hits all alike.
    """
    trees = {count: _tree(count) for count in rows}
    caches: dict[str, Cache] = {}
    prefills = {}
    for name, backbone in engines.items():
        caches[name] = backbone.engine.new_cache(capacity=context + max(rows))
        clock = Clock(backbone)
        backbone.engine.forward(Plan.chain(torch.arange(context) % backbone.vocab_size, logits="none"), caches[name])
        prefills[name] = clock.lap()
    laps: dict[str, dict[int, list[float]]] = {name: {count: [] for count in rows} for name in engines}
    for number in range(rounds + 2):
        for count, tree in trees.items():
            for name, backbone in engines.items():
                ids = (torch.arange(count, device=backbone.device) + number) % backbone.vocab_size
                clock = Clock(backbone)
                out = backbone.engine.forward(Plan.tree(ids, tree), caches[name])
                out.logits.argmax(-1).tolist()
                lap = clock.lap()
                if number >= 2:  # the first rounds warm up
                    laps[name][count].append(lap)
                on_progress(1)
    return {
        name: Timed(
            {count: statistics.median(one) for count, one in found.items()}, prefills[name], caches[name].nbytes
        )
        for name, found in laps.items()
    }


def _tree(nodes: int) -> Tree:
    """Any tree of so many nodes: half of them below the root, the others below those."""
    wide = nodes // 2
    return Tree.from_choices([[i] for i in range(wide)] + [[i, 0] for i in range(nodes - 1 - wide)])
