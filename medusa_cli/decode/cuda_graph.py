"""CUDA graphs of whole decoding steps; a few graphs serve all trees and batches.

The graphs are captured before the first step, for some numbers of sequences and of nodes (see
`graph_step`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from medusa_cli.decode.answer import Accepted
from medusa_cli.decode.graph_step import DEPTHS, LIKELIEST, Capture, GraphStep, Results
from medusa_cli.decode.policy import ROOT, Proposal, complete
from medusa_cli.decode.sampler import Sampler
from medusa_cli.decode.sequence import Sequence
from medusa_cli.device import free_memory
from medusa_cli.drafters.base import Drafter, NewTokens
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.slots import LayerSlots
from medusa_cli.engine import Cache
from medusa_cli.engine.engine import LayoutEngine
from medusa_cli.errors import first_line
from medusa_cli.tree import Draft, DynamicTree
from medusa_cli.tree.tensors import outline
from medusa_cli.tree.tree import UNREAD, unread_draft

# The numbers of nodes per tree for which graphs are captured, each for batch sizes that are powers of
# two and for the number of slots.
ROWS = (1, 16, 64)
# The number of warm-up runs before a capture, in which libraries choose kernels and allocate
# workspaces.
WARM_UPS = 2
# Rows for the whole context are reserved only if they take less than this share of the free memory.
FREE_SHARE = 0.8
log = logging.getLogger(__name__)


class CudaGraphs:
    """Runs steps over the first B slots of a cache.

    Each step reads one small tensor back from the device. limits: those of the dynamic trees that
    graphs grow; None for static trees. capture: the function that makes a graph of a step. With None,
    a GPU captures CUDA graphs, and other devices run steps uncaptured. context: the expected maximum
    length of a sequence.
    """

    def __init__(
        self,
        engine: LayoutEngine,
        cache: Cache,
        taps: tuple[int, ...],
        drafter: Drafter | None = None,
        limits: DynamicTree | None = None,
        capture: Capture | None = None,
        context: int | None = None,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._taps = taps
        self._capture = capture
        self._limits = limits
        self._drafter: HeadDrafter | None = None
        if isinstance(drafter, HeadDrafter) and drafter.drafts_in_graphs:
            self._drafter = drafter
        self._slots: LayerSlots | None = None  # for the drafter's layers
        self._steps: dict[tuple[int, int, bool], GraphStep] = {}
        self._buffer: Tensor | None = None  # the cache's values when the graphs were captured
        self._pool: Any = None
        self.count = 0  # graphs captured so far
        self.failed = False
        if engine.backbone.device.type == "cuda":
            self._reserve(engine, context or engine.backbone.max_positions)

    def _reserve(self, engine: LayoutEngine, context: int) -> None:
        """Reserves rows for the whole context if memory allows, because all graphs are lost when the cache grows."""
        rows = context + ROWS[-1]
        needed = rows * self._cache.slots * engine.row_bytes
        free = free_memory(engine.backbone.device)
        if rows > self._cache.capacity and needed < FREE_SHARE * free:
            self._cache.resize(rows)

    @property
    def drafts(self) -> bool:
        """Returns True if the graphs also draft, so that the host does not know the draft tokens."""
        return self._drafter is not None

    def warm_up(self, drafting: bool) -> None:
        """Captures the graphs of all batch sizes before the first step: with one row and, if `drafting`, with trees."""
        started = time.perf_counter()
        batch = 1
        try:
            while batch < 2 * self._cache.slots:
                for rows in ROWS if drafting else ROWS[:1]:
                    for sampled in (False, True):
                        self._step(min(batch, self._cache.slots), rows, sampled)
                batch *= 2
        except RuntimeError as reason:
            self._fail(reason)
        log.info("%d CUDA graphs captured in %.1f s", self.count, time.perf_counter() - started)

    def supports(self, sequences: list[Sequence]) -> bool:
        """Returns True if all sequences sample greedily or exactly, without logits processors or log probabilities."""
        if self.failed or any(sequence.request.top is not None for sequence in sequences):
            return False
        return all(_is_simple(sequence.sampler) for sequence in sequences)

    def step(
        self,
        sequences: list[Sequence],
        proposals: list[Proposal],
        drafted: Mapping[int, Draft] | None,
    ) -> tuple[list[Draft], list[Accepted]] | None:
        """Takes a step; returns the drafts and the accepted paths, whose rows stay in the cache.

        drafted: the drafter's drafts on the device, by sequence index; None if the graph drafts.
        The host reads no draft token. Returns None if no graph can run the step: a draft is too
        large, a graph failed, or top-p has to choose among more tokens than a graph considers.
        """
        if drafted is None:
            trees = [outline(tree) for tree, _ in proposals]
            drafted = {}
        else:
            trees = [drafted[i].tree if i in drafted else ROOT for i in range(len(sequences))]
        unread = [
            unread_draft(sequence.root, tree)
            for sequence, tree in zip(sequences, trees, strict=True)
        ]
        drafts = complete(self._engine, sequences, proposals, unread)
        if not all(
            draft.tree.size <= ROWS[-1] and draft.tree.max_depth < DEPTHS for draft in drafts
        ):
            return None
        drafting = not drafted and any(UNREAD in draft.ids for draft in drafts)
        samplers = [sequence.sampler for sequence in sequences]
        try:
            accepted = self.run(samplers, drafts, drafted, sequences if drafting else [])
        except RuntimeError as reason:
            self._fail(reason)
            return None
        return None if accepted is None else (drafts, accepted)

    def _fail(self, reason: RuntimeError) -> None:
        log.warning("CUDA graphs are given up: %s", first_line(reason))
        self.failed = True
        self._engine.captures = False
        self._steps = {}

    def run(
        self,
        samplers: list[Sampler],
        drafts: list[Draft],
        guesses: Mapping[int, Draft],
        drafting: Iterable[Sequence] = (),
    ) -> list[Accepted] | None:
        """Runs the smallest graph that the drafts fit into; see `step`.

        guesses: the drafter's drafts by slot. drafting: the sequences for which the graph drafts.
        """
        cache = self._cache
        size = len(drafts)
        batch = min(1 << (size - 1).bit_length(), cache.slots)
        rows = next(rows for rows in ROWS if rows >= max(draft.tree.size for draft in drafts))
        step = self._step(batch, rows, not all(sampler.greedy for sampler in samplers))
        new = [self._unread(sequence, slot) for slot, sequence in enumerate(drafting)]
        results, states = step(cache.lengths, samplers, drafts, guesses, new)
        # The graph's next run overwrites its results.
        results = results[:size].clone()
        states = states[:size].clone()
        accepted = []
        rest = results.tolist()
        if not all(count for count, *_ in rest):
            return None
        for sequence, (read, _) in zip(drafting, new, strict=True):
            sequence.unread = []
            for layer in _drafter_of(sequence).caches:
                layer.count(range(read.start, read.end))
        for slot, (count, bonus, *path) in enumerate(rest):
            cache.lengths[slot] += count
            samplers[slot].advance(count)
            steps = len(path) // 2
            tokens = slice(2 + steps, 2 + steps + count)
            ids = results[slot, tokens]
            hidden = states[slot, :count]
            accepted.append(Accepted(path[:count], path[steps : steps + count], ids, bonus, hidden))
        return accepted

    def _unread(self, sequence: Sequence, slot: int) -> tuple[NewTokens, list[int]]:
        """Returns the tokens that a graph reads for a sequence's drafter, and the token after each of them.

        If there are more tokens than a graph can read, as after a prompt or many plain steps, the
        drafter reads the first of them now, without a graph.
        """
        drafter = _drafter_of(sequence)
        assert self._slots is not None
        new = sequence.take_unread()
        cut = max(new.start, new.end - self._slots.rows)
        if cut > new.start:
            if drafter.caches:
                drafter.read(self._engine.backbone, [drafter], [new.part(new.start, cut)])
            new = new.part(cut, new.end)
        sequence.unread = [new]  # in case the graph fails
        self._slots.take(slot, drafter.caches)
        return new, [*sequence.tokens[new.start + 1 :], sequence.root]

    def _step(self, batch: int, rows: int, sampled: bool) -> GraphStep:
        """Returns the captured step of a size. Once the cache has grown, all earlier captures are dropped."""
        cache = self._cache
        cache.reserve(max(cache.lengths) + rows)
        if self._buffer is None or cache.values is not self._buffer:
            # A memory pool whose graphs were dropped cannot be used again.
            on_device = self._engine.backbone.device.type == "cuda"
            self._steps = {}
            self._pool = torch.cuda.graph_pool_handle() if on_device else None
            if self._drafter is not None:
                layers = self._drafter.decoder_layers
                self._slots = LayerSlots(
                    layers, cache.slots, cache.capacity + DEPTHS, DEPTHS if layers else 1
                )
        key = batch, rows, sampled
        if key not in self._steps:
            step = GraphStep(
                self._engine,
                cache,
                batch,
                rows,
                self._taps,
                sampled,
                self._drafter,
                self._limits,
                self._slots,
            )
            capture = self._capture
            if capture is None:
                capture = self._captured if self._pool is not None else lambda run: run
            step.capture(capture)
            self._steps[key] = step
            self.count += 1
        self._buffer = cache.values
        return self._steps[key]

    def _captured(self, run: Callable[[], Results]) -> Callable[[], Results]:
        """Captures a computation as a CUDA graph; returns a function that replays it."""
        with torch.cuda.device(self._engine.backbone.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # CUDA calls from the application's other threads must not invalidate the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = run()

        def replay() -> Results:
            graph.replay()
            return out

        return replay


def _is_simple(sampler: Sampler) -> bool:
    """Returns True for greedy or exact sampling without processors and with a top-k that a graph supports."""
    if sampler.processors is not None or sampler.sampling.top_k > LIKELIEST:
        return False
    return sampler.greedy or sampler.sampling.exact


def _drafter_of(sequence: Sequence) -> HeadDrafter:
    assert isinstance(sequence.drafter, HeadDrafter)
    return sequence.drafter
