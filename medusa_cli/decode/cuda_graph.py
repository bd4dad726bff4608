"""Whole decoding steps captured as CUDA graphs: draft tokens and trees in, accepted paths out, by tensors alone.

The tree is data: a graph serves every tree of up to so many nodes, and every batch of up to so many sequences. So a few
graphs, captured before the first step, serve static and dynamic trees and n-gram matches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from typing import Any

import torch
from torch import Tensor

from medusa_cli.decode.accept import accept, longest_path
from medusa_cli.decode.answer import Accepted
from medusa_cli.decode.sampling import Sampler, Sampling, draw, nucleus
from medusa_cli.decode.sequence import Sequence
from medusa_cli.device import best_time, free_memory, upload
from medusa_cli.drafters.base import Drafter, NewTokens
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.slots import Fill, LayerSlots, NewTensors
from medusa_cli.engine import Cache, Engine, Plan
from medusa_cli.engine.plan import lay_out_at
from medusa_cli.engine.torch_layers import TOLERANCE
from medusa_cli.errors import first_line
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.tensors import GrowingTrees, TreeTensors
from medusa_cli.tree.tree import PADDING, ROOT_PARENT, UNREAD

# Nodes that a graph has room for; batches are powers of two.
ROWS = (1, 16, 64)
# Accepted nodes of a path at most, and tokens that a drafter reads in a graph.
DEPTHS = 32
# Parameters of a sequence before its random numbers: 1 if it samples, temperature, top-p, top-k.
FIELDS = 4
# The likeliest tokens that top-p and top-k choose among.
LIKELIEST = 1024
ROOT_ALONE = Tree.root_only()
# Runs before a capture, in which libraries choose kernels and make workspaces.
WARM_UPS = 2
# A larger share of a device's free memory is not reserved for a cache.
FREE_SHARE = 0.8
# The trial: tokens before the step, levels of its draft, laps.
BEFORE, LEVELS, LAPS = 12, 4, 5
log = logging.getLogger(__name__)

# Makes of a computation on fixed buffers one that runs again on the same buffers.
Capture = Callable[[Callable[[], tuple[Tensor, Tensor]]], Callable[[], tuple[Tensor, Tensor]]]


def sampling_params(samplers: Several[Sampler], batch: int, count: int) -> Tensor:
    """Returns each sequence's FIELDS parameters and `count` random numbers [batch, FIELDS + count].

    Sequences that are missing in the batch are greedy.
    """
    rows = []
    for sampler in samplers:
        sampling = sampler.sampling
        if sampler.greedy:
            rows.append([0.0, 1.0, 2.0, 0.0, *[0.0] * count])
        else:
            top_p = sampling.top_p if sampling.top_p < 1 else 2.0  # no sum reaches 2
            rows.append([1.0, sampling.temperature, top_p, float(sampling.top_k), *sampler.peek_uniforms(count)])
    rows += [[0.0, 1.0, 2.0, 0.0, *[0.0] * count]] * (batch - len(rows))
    return torch.tensor(rows, dtype=torch.double)


def choose(logits: Tensor, params: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the token after each node [B, N], and False where it would need more than the likeliest tokens.

    logits [B, N, V]; params: those of `sampling_params`; depth [B, N] of the nodes.
    """
    sampled, temperature, top_p, top_k = (field[:, None] for field in params[:, :FIELDS].unbind(-1))  # [B, 1] each
    uniforms = params[:, FIELDS:].gather(1, depth)  # [B, N]
    weights = (logits / temperature[..., None].float()).softmax(-1)
    ids = weights.topk(min(LIKELIEST, weights.shape[-1]), dim=-1).indices.sort(dim=-1).values
    ordered, order = weights.gather(-1, ids).sort(dim=-1, descending=True, stable=True)  # of equals the first id
    ids = ids.gather(-1, order)
    whole, cut = ordered.shape[-1] == weights.shape[-1], top_k > 0
    lowest = ordered.gather(-1, (top_k[..., None].long().clamp(1, ordered.shape[-1]) - 1).expand(*depth.shape, 1))
    kept = ordered.masked_fill((ordered < lowest) & cut[..., None], 0)  # what ties with the k-th stays
    # Without top-k the mass is that of the whole vocabulary.
    kept = kept / kept.sum(-1, keepdim=True).masked_fill(~cut[..., None], 1.0)
    # Where the k-th has no weight, which cold sampling leaves to few tokens, what ties with it has none either.
    cut_off = (ordered[..., -1] < lowest[..., 0]) | (lowest[..., 0] == 0)
    enough = torch.where(cut, cut_off, (kept.sum(-1) >= top_p) | (top_p > 1)) | whole
    among = ids.gather(-1, draw(nucleus(kept, top_p[..., None].float()), uniforms)[..., None])[..., 0]
    # A sequence without top-p and top-k draws as if it were alone.
    drawn = torch.where((top_p < 1) | cut, among, draw(weights, uniforms))
    return torch.where(sampled > 0, drawn, logits.argmax(-1)), enough | (sampled == 0)


class CudaGraphs:
    """Runs steps over a cache by its first B slots; each reads one small tensor back from the device.

    limits: those of the dynamic trees that it grows, None for static trees. capture: makes a graph of a step; None
    captures CUDA graphs, and on other devices runs steps as they are.
    """

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        taps: tuple[int, ...],
        drafter: Drafter | None = None,
        limits: DynamicTree | None = None,
        capture: Capture | None = None,
    ) -> None:
        self._engine, self._cache, self._taps, self._capture = engine, cache, taps, capture
        self._limits = limits
        self._drafter = drafter if isinstance(drafter, HeadDrafter) and drafter.fill is not None else None
        self._slots: LayerSlots | None = None  # of the drafter's layers
        self._steps: dict[tuple[int, int, bool], _GraphStep] = {}
        self._buffer: Tensor | None = None  # the cache's values when the graphs were captured
        self._pool: Any = None
        self.count = 0  # graphs captured so far
        self.failed = False
        if engine.backbone.device.type == "cuda":
            self._reserve(engine)

    def _reserve(self, engine: Engine) -> None:
        """Makes the cache large enough for the context at once, if the device's memory allows: growing drops graphs."""
        rows = engine.backbone.max_positions + ROWS[-1]
        if rows * self._cache.slots * engine.row_bytes < FREE_SHARE * free_memory(engine.backbone.device):
            self._cache.reserve(rows)

    @property
    def drafts(self) -> bool:
        """Returns True if graphs draft the tokens that the host does not know."""
        return self._drafter is not None

    def warm_up(self) -> None:
        """Captures the graphs of all sizes, so that no step waits for one."""
        started, batch = time.perf_counter(), 1
        try:
            while batch < 2 * self._cache.slots:
                for rows in ROWS:
                    for sampled in (False, True):
                        self._step(min(batch, self._cache.slots), rows, sampled)
                batch *= 2
        except RuntimeError as reason:
            self._fail(reason)
        log.info("%d CUDA graphs captured in %.1f s", self.count, time.perf_counter() - started)

    def supports(self, sequences: Several[Sequence]) -> bool:
        """Returns True for greedy and exact steps, without processors of logits or log probabilities."""
        samplers = [s.sampler for s in sequences if s.request.top is None and s.sampler.processors is None]
        simple = len(samplers) == len(sequences) and all(s.greedy or s.sampling.exact for s in samplers)
        return not self.failed and simple and all(s.sampling.top_k <= LIKELIEST for s in samplers)

    def verify(
        self, sequences: Several[Sequence], drafts: Several[Draft], guesses: Mapping[int, Draft]
    ) -> list[Accepted] | None:
        """Verifies each sequence's draft and keeps its accepted path.

        drafts: on the host. Tokens that it does not know are those of `guesses`, by the sequence's index; without
        these the graph drafts them. Returns None if an ordinary step has to take its place: where a draft is too large,
        a graph failed, or top-p needs more tokens.
        """
        if not all(draft.tree.size <= ROWS[-1] and draft.tree.max_depth < DEPTHS for draft in drafts):
            return None
        drafting = not guesses and any(UNREAD in draft.ids for draft in drafts)
        try:
            samplers = [sequence.sampler for sequence in sequences]
            return self.run(samplers, drafts, guesses, sequences if drafting else ())
        except RuntimeError as reason:
            self._fail(reason)
            return None

    def _fail(self, reason: RuntimeError) -> None:
        log.warning("CUDA graphs are given up: %s", first_line(reason))
        self.failed, self._engine.captures, self._steps = True, False, {}

    def run(
        self,
        samplers: Several[Sampler],
        drafts: Several[Draft],
        guesses: Mapping[int, Draft],
        drafting: Several[Sequence] = (),
    ) -> list[Accepted] | None:
        """Runs the graph that has room for the drafts; see `verify`. drafting: the sequences, if the graph drafts."""
        cache, size = self._cache, len(drafts)
        batch = min(1 << (size - 1).bit_length(), cache.slots)
        rows = next(rows for rows in ROWS if rows >= max(draft.tree.size for draft in drafts))
        step = self._step(batch, rows, not all(sampler.greedy for sampler in samplers))
        new = [self._unread(sequence, slot) for slot, sequence in enumerate(drafting)]
        results, states = step(cache.lengths, samplers, drafts, guesses, new)
        # The graph's next run overwrites its states.
        states = states[:size].clone()
        accepted, rest = [], results[:size].tolist()
        if not all(count for count, *_ in rest):
            return None
        for sequence, (tokens, _) in zip(drafting, new, strict=True):
            sequence.unread = []
            for layer in _drafter_of(sequence).caches:
                layer.count(range(tokens.start, tokens.end))
        for slot, (count, bonus, *path) in enumerate(rest):
            cache.lengths[slot] += count
            samplers[slot].advance(count)
            steps = len(path) // 2
            accepted.append(Accepted(path[:count], path[steps : steps + count], bonus, states[slot, :count]))
        return accepted

    def _unread(self, sequence: Sequence, slot: int) -> tuple[NewTokens, list[int]]:
        """Returns the tokens that a graph reads for the drafter of a slot's sequence, and the token after each.

        The drafter reads those at once for which a graph has no room, as after a prompt or many plain steps.
        """
        drafter = _drafter_of(sequence)
        assert self._slots is not None
        new = sequence.take_unread() if drafter.caches else sequence.unread[-1]
        cut = max(new.start, new.end - self._slots.rows)
        if cut > new.start:
            if drafter.caches:
                drafter.read(self._engine.backbone, [drafter], [new.part(new.start, cut)])
            new = new.part(cut, new.end)
        sequence.unread = [new]  # in case the graph fails
        self._slots.take(slot, drafter.caches)
        return new, [*sequence.tokens[new.start + 1 :], sequence.root]

    def _step(self, batch: int, rows: int, sampled: bool) -> _GraphStep:
        """Returns the captured step of a size; growth of the cache drops all others."""
        cache = self._cache
        cache.reserve(max(cache.lengths) + rows)
        if self._buffer is None or cache.values is not self._buffer:
            # A pool whose graphs are gone cannot be used again.
            on_device = self._engine.backbone.device.type == "cuda"
            self._steps, self._pool = {}, torch.cuda.graph_pool_handle() if on_device else None
            if self._drafter is not None:
                layers = self._drafter.decoder_layers
                self._slots = LayerSlots(layers, cache.slots, cache.capacity + DEPTHS, DEPTHS if layers else 1)
        key = batch, rows, sampled
        if key not in self._steps:
            fill = None if self._drafter is None else self._drafter.fill
            step = _GraphStep(self._engine, cache, batch, rows, self._taps, sampled, fill, self._limits, self._slots)
            step.capture(self._capture or (self._captured if self._pool is not None else lambda run: run))
            self._steps[key], self.count = step, self.count + 1
        self._buffer = cache.values
        return self._steps[key]

    def _captured(self, run: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
        """Returns the replay of a computation on the device."""
        with torch.cuda.device(self._engine.backbone.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Calls of the application's other threads must not spoil the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = run()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return out

        return replay


def _drafter_of(sequence: Sequence) -> HeadDrafter:
    assert isinstance(sequence.drafter, HeadDrafter)
    return sequence.drafter


class _GraphStep:
    """One step for a number of sequences and of nodes, on buffers that hold its inputs.

    fill, over slots for the drafter's layers, drafts the tokens that the host does not know; within limits it grows
    dynamic trees in their place.
    """

    def __init__(
        self,
        engine: Engine,
        cache: Cache,
        batch: int,
        rows: int,
        taps: tuple[int, ...],
        sampled: bool,
        fill: Fill | None,
        limits: DynamicTree | None,
        slots: LayerSlots | None,
    ) -> None:
        device, self._rows, self._count = engine.backbone.device, rows, min(rows, DEPTHS)
        self._engine, self._cache, self._taps, self._sampled = engine, cache, taps, sampled
        self._fill, self._slots = (fill, slots) if rows > 1 else (None, None)
        self._limits = limits
        reads = 0 if self._slots is None else self._slots.rows
        # Of each slot: its length; of N nodes depths, parents, ranks, tokens, and as bits the nodes that each one sees;
        # what NewTensors has of P new tokens, with their places in `hidden`.
        self._inputs = self._pack([0] * batch, [], []).to(device)  # [B, 1 + 5 N + 3 + 2 P]
        self.lengths, nodes, self._new = (
            self._inputs[:, 0],
            self._inputs[:, 1 : 1 + 5 * rows],
            self._inputs[:, 1 + 5 * rows :],
        )
        self.depth, self.parents, self.ranks, self.tokens, self.bits = nodes.unflatten(1, (5, rows)).unbind(1)
        width = engine.backbone.hidden_size * len(taps)
        self.hidden = torch.zeros(batch * reads, width, dtype=engine.dtype, device=device)
        self.params = sampling_params([], batch, self._count).to(device)
        self._every = torch.arange(rows, device=device)
        self._run_again: Callable[[], tuple[Tensor, Tensor]] = self._run

    def _pack(self, lengths: Several[int], drafts: Several[Draft], new: Several[tuple[NewTokens, list[int]]]) -> Tensor:
        """Returns the slots' lengths, drafts and new tokens (see CudaGraphs._unread) as one tensor of the host."""
        packed, place = [], 0
        for slot, length in enumerate(lengths):
            tree, ids = (drafts[slot].tree, drafts[slot].ids) if slot < len(drafts) else (ROOT_ALONE, [0])
            rest = self._rows - tree.size
            padding = [1 << node if node < 63 else -(1 << 63) for node in range(tree.size, self._rows)]
            parents = [ROOT_PARENT, *tree.parents[1:], *[PADDING] * rest]
            zeros = [0] * rest
            row = [length, *tree.depths, *zeros, *parents, *tree.ranks, *zeros, *ids, *zeros, *tree.bits, *padding]
            if self._slots is not None:
                start, places, following = 0, [0], [0]
                if slot < len(new):
                    tokens, following = new[slot]
                    start, places = tokens.start, [*range(place, place + len(following))]
                    place += len(following)
                more = [0] * (self._slots.rows - len(following))
                row += [start, self._slots.held(slot), len(following), *places, *more, *following, *more]
            packed.append(row)
        return torch.tensor(packed)

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Captures the step; its buffers hold an empty tree behind the slots' texts."""
        self._inputs.copy_(self._pack(self._cache.lengths[: len(self.lengths)], [], []))
        self._run()  # makes what is made once, such as the cache's buffers and rotary tables
        self._run_again = capture(self._run)

    @torch.inference_mode()
    def __call__(
        self,
        lengths: Several[int],
        samplers: Several[Sampler],
        drafts: Several[Draft],
        guesses: Mapping[int, Draft],
        new: Several[tuple[NewTokens, list[int]]],
    ) -> tuple[Tensor, Tensor]:
        """Returns (accepted nodes, bonus, path, its tokens) [B, 2 + 2 P] and the path's states [B, P, H * taps].

        No node is accepted where the likeliest tokens were too few.
        """
        device, size = self._inputs.device, len(self._inputs)
        self._inputs.copy_(upload(self._pack(lengths[:size], drafts, new), device))
        for slot, draft in guesses.items():
            self.tokens[slot, : draft.tree.size] = draft.tokens
        if new:
            hidden = torch.cat([tokens.hidden for tokens, _ in new])
            self.hidden[: len(hidden)] = hidden
        if self._sampled:
            self.params.copy_(upload(sampling_params(samplers, size, self._count), device))
        return self._run_again()

    def _run(self) -> tuple[Tensor, Tensor]:
        """Runs the step; it reads no value of a tensor."""
        engine = self._engine
        tree_mask = (self.bits[..., None] >> self._every & 1).bool()  # [B, N, N]
        nodes = self.depth, self.parents, self.ranks, self.tokens, tree_mask
        trees = TreeTensors(*nodes)
        if self._fill is not None and self._slots is not None:
            start, held, count, *_ = self._new.unbind(1)
            places, following = self._new[:, 3:].chunk(2, dim=1)
            new = NewTensors(self.hidden[places], following, start, held, count, self._slots.buffers)
            trees = trees if self._limits is None else GrowingTrees(self._limits, *nodes)
            self._fill(engine.backbone, new, trees)
        depth, parents, tokens, tree_mask = trees.depth, trees.parents, trees.tokens, trees.mask
        context, wide = engine.backbone.max_positions, self._cache.capacity
        layout = lay_out_at(self.lengths, tree_mask, depth, engine.masks, context, 0, wide, by_length=engine.by_length)
        states, final = engine.run(tokens, layout, self._cache, self._taps)
        logits = engine.backbone.finish_logits(engine.lm_head(final)).float()
        if self._sampled:
            chosen, certain = choose(logits, self.params, depth)
        else:
            chosen = logits.argmax(-1)  # [B, N]
            certain = torch.ones_like(chosen, dtype=torch.bool)
        count, last, path, on_path = longest_path(chosen, tokens, depth, parents, tree_mask, self._count)
        self._cache.compact(self.lengths, path)
        count = count * (certain | ~on_path).all(1, keepdim=True)
        results = torch.cat([count, chosen.gather(1, last), path, tokens.gather(1, path)], dim=1)
        return results, states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))


def captures(engine: Engine) -> bool:
    """Returns True if an engine's steps are captured: where that gives the same and is faster, by a trial."""
    if engine.captures is None:
        engine.captures = _trial(engine)
    return engine.captures


@torch.inference_mode()
def _trial(engine: Engine) -> bool:
    """Compares captured steps, greedy and sampled, with ordinary ones; a failure is logged in one line."""
    device, gains = engine.backbone.device, []
    try:
        cache = engine.new_cache()
        draft, graphs = _draft(engine, cache), CudaGraphs(engine, cache, (-1,))
        for sampling in (Sampling(), Sampling("exact", 0.8, 0.9)):

            def graph_step(rule: Sampling = sampling) -> Accepted | None:
                accepted = graphs.run([Sampler(rule)], [draft], {})
                return None if accepted is None else accepted[0]

            def plain_step(rule: Sampling = sampling) -> Accepted:
                return _ordinary_step(engine, cache, draft, rule)

            (ours, seconds), (plain, ordinary) = (_timed(engine, cache, step) for step in (graph_step, plain_step))
            if graphs.failed:
                return False
            if ours is None or plain is None or not _equal(engine, ours, plain):
                log.warning("CUDA graphs are not used: captured steps differ from ordinary ones on %s", device)
                return False
            log.debug("a captured step takes %.2f ms, an ordinary one %.2f ms", 1e3 * seconds, 1e3 * ordinary)
            gains.append(ordinary / seconds)
    except RuntimeError as reason:
        log.warning("CUDA graphs are not used: steps cannot be captured on %s: %s", device, first_line(reason))
        return False
    return gains[0] > 1


def _equal(engine: Engine, ours: Accepted, plain: Accepted) -> bool:
    """Returns True if two steps gave the same tokens (in fp32) and, up to rounding, the same states."""
    rows = min(len(ours.path), len(plain.path))
    error = float((ours.hidden[:rows] - plain.hidden[:rows]).float().norm() / plain.hidden[:rows].float().norm())
    same = (ours.path, ours.bonus) == (plain.path, plain.bonus) or engine.dtype != torch.float32  # near-ties may flip
    return same and error <= TOLERANCE[engine.dtype]


def _draft(engine: Engine, cache: Cache) -> Draft:
    """Returns a chain of the engine's next tokens after some text in the cache; the last one is wrong."""
    vocabulary = engine.backbone.vocab_size
    out, tokens = engine.forward(Plan.chain(torch.arange(BEFORE) * 37 % vocabulary), cache), []
    for _ in range(LEVELS + 1):
        assert out.logits is not None
        tokens.append(out.logits[0, -1].argmax())
        out = engine.forward(Plan.chain(tokens[-1][None]), cache)
    cache.truncate(0, BEFORE)
    tokens[-1] = (tokens[-1] + 1) % vocabulary
    return Draft(torch.stack(tokens), Tree.chain(LEVELS))


def _ordinary_step(engine: Engine, cache: Cache, draft: Draft, sampling: Sampling) -> Accepted:
    out = engine.forward(Plan(draft.tokens[None], draft.tree.depth, draft.tree.mask), cache)
    assert out.logits is not None
    ((path, bonus),) = accept(out.logits, [draft], [Sampler(sampling)])
    cache.keep(0, path)
    tokens = [draft.ids[node] for node in path]
    return Accepted(path, tokens, bonus, out.hidden[0, upload(path, out.hidden.device)])


def _timed(engine: Engine, cache: Cache, step: Callable[[], Accepted | None]) -> tuple[Accepted | None, float]:
    """Returns a step's result after the text and its least seconds."""
    result = step()

    def lap() -> None:
        cache.truncate(0, BEFORE)
        step()

    seconds = best_time(engine.backbone.device, lap, LAPS)
    cache.truncate(0, BEFORE)
    return result, seconds
