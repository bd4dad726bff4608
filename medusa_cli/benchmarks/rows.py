"""Rows a step against time, for each engine, with the ceiling that memory sets."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.clock import Clock
from medusa_cli.decoding.graphs import StaticDecoder
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
    loops: dict[str, _Ordinary | _Captured] = {}
    prefills = {}
    for name, backbone in engines.items():
        loops[name] = (_Captured if backbone.captures else _Ordinary)(backbone, context + max(rows))
        clock = Clock(backbone)
        loops[name].prefill(torch.arange(context) % backbone.vocab_size)
        prefills[name] = clock.lap()
    laps: dict[str, dict[int, list[float]]] = {name: {count: [] for count in rows} for name in engines}
    for number in range(rounds + 2):
        for count, tree in trees.items():
            for name, backbone in engines.items():
                ids = (torch.arange(count, device=backbone.device) + number) % backbone.vocab_size
                clock = Clock(backbone)
                loops[name].step(ids, tree)
                lap = clock.lap()
                loops[name].truncate(context)
                if number >= 2:  # the first rounds warm up
                    laps[name][count].append(lap)
                on_progress(1)
    return {
        name: Timed({count: statistics.median(one) for count, one in found.items()}, prefills[name], loops[name].nbytes)
        for name, found in laps.items()
    }


class _Ordinary:
    """A step as `generate` makes it, up to the chosen tokens."""

    def __init__(self, backbone: Backbone, capacity: int) -> None:
        self._backbone, self._cache = backbone, backbone.new_cache(capacity)
        self.truncate = self._cache.truncate

    def prefill(self, tokens: Tensor) -> None:
        self._backbone.forward(tokens, self._cache, logits="none")

    def step(self, tokens: Tensor, tree: Tree) -> None:
        out = self._backbone.forward(tokens, self._cache, tree)
        assert out.logits is not None
        out.logits.argmax(-1).tolist()

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes


class _Captured:
    """A captured step, acceptance and compaction included; the rounds that warm up capture it."""

    def __init__(self, backbone: Backbone, capacity: int) -> None:
        self._decoder = StaticDecoder(backbone, capacity)
        self.prefill, self.truncate = self._decoder.prefill, self._decoder.truncate

    def step(self, tokens: Tensor, tree: Tree) -> None:
        self._decoder.step(tokens[None], tree)

    @property
    def nbytes(self) -> int:
        return self._decoder.cache.slots[0].nbytes


def _tree(nodes: int) -> Tree:
    """Any tree of so many nodes: half of them below the root, the others below those."""
    wide = nodes // 2
    return Tree.from_choices([[i] for i in range(wide)] + [[i, 0] for i in range(nodes - 1 - wide)])
