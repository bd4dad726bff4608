"""Whole decoding steps captured as CUDA graphs: draft tokens and trees in, accepted paths out.

The tree is data: a graph serves all trees up to a maximum number of nodes, and all batches up to a
maximum number of sequences. Therefore a few graphs, captured before the first step, serve static
and dynamic trees and n-gram matches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medusa_cli.decode.accept import accept, longest_path
from medusa_cli.decode.answer import Accepted
from medusa_cli.decode.policy import ROOT, Proposal, complete
from medusa_cli.decode.sampler import Sampler, draw, nucleus
from medusa_cli.decode.sampling import Sampling
from medusa_cli.decode.sequence import Sequence
from medusa_cli.device import best_time, free_memory, numbered, upload
from medusa_cli.drafters.base import Drafter, NewTokens
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.slots import LayerSlots, NewTensors
from medusa_cli.engine import Cache, Engine, Plan
from medusa_cli.engine.engine import LayoutEngine
from medusa_cli.engine.plan import lay_out_at
from medusa_cli.engine.torch_layers import TOLERANCE
from medusa_cli.errors import first_line
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.tensors import GrowingTrees, TreeTensors, outline
from medusa_cli.tree.tree import PADDING, UNREAD, unread_draft

# Sizes of graphs in nodes; batch sizes are powers of two.
ROWS = (1, 16, 64)
# Maximum number of accepted nodes per path, and of tokens that a drafter reads in a graph.
DEPTHS = 32
# Parameters per sequence, stored before its random numbers: 1 if it samples, temperature, top-p,
# top-k.
NO_TOP_P = 2.0  # no sum of probabilities reaches it
GREEDY = (0.0, 1.0, NO_TOP_P, 0.0)
FIELDS = len(GREEDY)
# Top-p and top-k choose among this many of the most likely tokens.
LIKELIEST = 1024
# Warm-up runs before a capture, in which libraries choose kernels and allocate workspaces.
WARM_UPS = 2
# The whole context is reserved only if that takes less than this share of the free memory.
FREE_SHARE = 0.8
# For the trial: tokens before the step, levels of its draft, and repetitions.
BEFORE = 12
LEVELS = 4
LAPS = 5
log = logging.getLogger(__name__)

# Turns a computation on fixed buffers into a function that replays it.
Capture = Callable[[Callable[[], tuple[Tensor, Tensor]]], Callable[[], tuple[Tensor, Tensor]]]


def sampling_params(samplers: list[Sampler], batch: int, count: int) -> Tensor:
    """Returns FIELDS parameters and `count` random numbers per sequence, [batch, FIELDS + count].

    The batch is padded with greedy sequences.
    """
    rows = [[*GREEDY, *[0.0] * count] for _ in range(batch)]
    for number, sampler in enumerate(samplers):
        if not sampler.greedy:
            sampling = sampler.sampling
            top_p = sampling.top_p if sampling.top_p < 1 else NO_TOP_P
            fields = (1.0, sampling.temperature, top_p, float(sampling.top_k))
            rows[number] = [*fields, *sampler.peek_uniforms(count)]
    return torch.tensor(rows, dtype=torch.double)


def choose(logits: Tensor, params: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the token chosen after each node [B, N].

    Also returns a mask [B, N] that is False if LIKELIEST tokens are too few to choose from. logits
    [B, N, V]; params: the result of `sampling_params`; depth [B, N]: the depths of the nodes.
    """
    fields = params[:, :FIELDS].unbind(-1)
    sampled, temperature, top_p, top_k = (field[:, None] for field in fields)  # [B, 1] each
    uniforms = params[:, FIELDS:].gather(1, depth)  # [B, N]
    weights = (logits / temperature[..., None].float()).softmax(-1)
    ids = weights.topk(min(LIKELIEST, weights.shape[-1]), dim=-1).indices.sort(dim=-1).values
    # The sort is stable: among equal weights, the lowest id comes first.
    ordered, order = weights.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    whole = ordered.shape[-1] == weights.shape[-1]
    cut = top_k > 0
    last = top_k[..., None].long().clamp(1, ordered.shape[-1]) - 1
    lowest = ordered.gather(-1, last.expand(*depth.shape, 1))
    kept = ordered.masked_fill((ordered < lowest) & cut[..., None], 0)  # ties with the k-th stay
    # Without top-k, the mass is relative to the whole vocabulary.
    kept = kept / kept.sum(-1, keepdim=True).masked_fill(~cut[..., None], 1.0)
    # If the k-th token has no weight, as at low temperature, tokens that tie with it have none
    # either.
    cut_off = (ordered[..., -1] < lowest[..., 0]) | (lowest[..., 0] == 0)
    enough = torch.where(cut, cut_off, (kept.sum(-1) >= top_p) | (top_p > 1)) | whole
    place = draw(nucleus(kept, top_p[..., None].float()), uniforms)
    among = ids.gather(-1, place[..., None])[..., 0]
    # A sequence without top-p and top-k draws from the whole vocabulary.
    drawn = torch.where((top_p < 1) | cut, among, draw(weights, uniforms))
    return torch.where(sampled > 0, drawn, logits.argmax(-1)), enough | (sampled == 0)


class CudaGraphs:
    """Runs steps over the first B slots of a cache.

    Each step reads one small tensor back from the device. limits: those of the dynamic trees that
    graphs grow; None for static trees. capture: makes a graph of a step. None captures CUDA graphs;
    on other devices, it runs steps uncaptured. context: the expected maximum length of a sequence.
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
        self._steps: dict[tuple[int, int, bool], _GraphStep] = {}
        self._buffer: Tensor | None = None  # the cache's values when the graphs were captured
        self._pool: Any = None
        self.count = 0  # graphs captured so far
        self.failed = False
        if engine.backbone.device.type == "cuda":
            self._reserve(engine, context or engine.backbone.max_positions)

    def _reserve(self, engine: LayoutEngine, context: int) -> None:
        """Reserves the cache for the whole context if memory allows, because growth drops all graphs."""
        rows = context + ROWS[-1]
        needed = rows * self._cache.slots * engine.row_bytes
        free = free_memory(engine.backbone.device)
        if rows > self._cache.capacity and needed < FREE_SHARE * free:
            self._cache.resize(rows)

    @property
    def drafts(self) -> bool:
        """Returns True if graphs draft the tokens that the host does not know."""
        return self._drafter is not None

    def warm_up(self, drafting: bool) -> None:
        """Captures graphs for all batches before the first step: of one row, and if drafting also of trees."""
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
        """Returns True for greedy and exact sampling without logits processors or log probabilities."""
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
        The host reads no draft token. Returns None if a graph cannot run the step: a draft is too
        large, a graph failed, or top-p needs more tokens.
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
        """Runs the graph that has room for the drafts; see `step`.

        drafting: the sequences, if the graph drafts for them.
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

        If a graph does not have room for all of them, the drafter reads the first ones here. This
        happens after a prompt or many plain steps.
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

    def _step(self, batch: int, rows: int, sampled: bool) -> _GraphStep:
        """Returns the captured step of a size. If the cache has grown, all earlier captures are dropped."""
        cache = self._cache
        cache.reserve(max(cache.lengths) + rows)
        if self._buffer is None or cache.values is not self._buffer:
            # A pool whose graphs are gone cannot be used again.
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
            step = _GraphStep(
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

    def _captured(
        self, run: Callable[[], tuple[Tensor, Tensor]]
    ) -> Callable[[], tuple[Tensor, Tensor]]:
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

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return out

        return replay


def _is_simple(sampler: Sampler) -> bool:
    """Returns True for greedy and exact sampling that a graph supports."""
    if sampler.processors is not None or sampler.sampling.top_k > LIKELIEST:
        return False
    return sampler.greedy or sampler.sampling.exact


def _drafter_of(sequence: Sequence) -> HeadDrafter:
    assert isinstance(sequence.drafter, HeadDrafter)
    return sequence.drafter


class _GraphStep:
    """Runs steps of one size, in sequences and nodes, on buffers that hold the inputs.

    The drafter, with slots for its layers, drafts the tokens that the host does not know. With
    `limits`, it grows dynamic trees in their place.
    """

    def __init__(
        self,
        engine: LayoutEngine,
        cache: Cache,
        batch: int,
        rows: int,
        taps: tuple[int, ...],
        sampled: bool,
        drafter: HeadDrafter | None,
        limits: DynamicTree | None,
        slots: LayerSlots | None,
    ) -> None:
        device = engine.backbone.device
        self._rows = rows
        self._count = min(rows, DEPTHS)
        self._engine = engine
        self._cache = cache
        self._taps = taps
        self._sampled = sampled
        self._drafter = drafter if rows > 1 else None
        self._slots = slots if rows > 1 else None
        self._limits = limits
        reads = 0 if self._slots is None else self._slots.rows
        # For each node, the bits of one that sees only itself.
        self._own_bits = [1 << node if node < 63 else -(1 << 63) for node in range(rows)]
        # Each row holds the length of a slot, the depths, parents, ranks and tokens of N nodes, and
        # bits for the nodes that each one sees. The fields of NewTensors for P new tokens follow,
        # with the places of these tokens in `hidden`.
        self._inputs = self._pack([0] * batch, [], []).to(device)  # [B, 1 + 5 N + 3 + 2 P]
        self.lengths = self._inputs[:, 0]
        nodes = self._inputs[:, 1 : 1 + 5 * rows]
        self._new = self._inputs[:, 1 + 5 * rows :]
        self.depth, self.parents, self.ranks, self.tokens, self.bits = nodes.unflatten(
            1, (5, rows)
        ).unbind(1)
        width = engine.backbone.hidden_size * len(taps)
        self.hidden = torch.zeros(batch * reads, width, dtype=engine.dtype, device=device)
        self.params = sampling_params([], batch, self._count).to(device)
        self._every = numbered(rows, device)
        self._ones = torch.ones_like(self.tokens)
        self._itself = torch.ones(batch, 1, 1, dtype=torch.bool, device=device)
        self._run_again: Callable[[], tuple[Tensor, Tensor]] = self._run

    def _pack(
        self, lengths: list[int], drafts: list[Draft], new: list[tuple[NewTokens, list[int]]]
    ) -> Tensor:
        """Returns the inputs of a run as one tensor on the host. new: the results of CudaGraphs._unread."""
        packed = []
        place = 0
        empty = unread_draft(0, ROOT)
        for slot, length in enumerate(lengths):
            draft = drafts[slot] if slot < len(drafts) else empty
            tree = draft.tree
            rest = [0] * (self._rows - tree.size)
            absent = [PADDING] * len(rest)
            row = [length, *tree.depths, *rest, *tree.parents, *absent, *tree.ranks, *rest]
            row += [*draft.ids, *rest, *tree.bits, *self._own_bits[tree.size :]]
            if self._slots is not None:
                start = 0
                first = 0
                following = [0]
                if slot < len(new):
                    tokens, following = new[slot]
                    start = tokens.start
                    first = place
                    place += len(following)
                more = [0] * (self._slots.rows - len(following))
                row += [start, self._slots.held(slot), len(following)]
                row += [*range(first, first + len(following)), *more, *following, *more]
            packed.append(row)
        return torch.tensor(packed)

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Captures the step while its buffers hold only roots, after the texts in the slots."""
        self._inputs.copy_(self._pack(self._cache.lengths[: len(self.lengths)], [], []))
        self._run()  # allocates the cache's buffers and rotary tables
        self._run_again = capture(self._run)

    @torch.inference_mode()
    def __call__(
        self,
        lengths: list[int],
        samplers: list[Sampler],
        drafts: list[Draft],
        guesses: Mapping[int, Draft],
        new: list[tuple[NewTokens, list[int]]],
    ) -> tuple[Tensor, Tensor]:
        """Returns the results [B, 2 + 2 P] and the hidden states of the path [B, P, H * taps].

        The results are the number of accepted nodes, the bonus token, the path, and its tokens.

        A count of 0 accepted nodes means that the most likely tokens were too few to choose from.
        """
        device = self._inputs.device
        size = len(self._inputs)
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
        """Runs the step without reading the value of a tensor."""
        engine = self._engine
        if self._rows == 1:
            return self._run_roots()
        tree_mask = (self.bits[..., None] >> self._every & 1).bool()  # [B, N, N]
        nodes = self.depth, self.parents, self.ranks, self.tokens, tree_mask
        trees = TreeTensors(*nodes)
        if self._drafter is not None and self._slots is not None:
            start, held, count, *_ = self._new.unbind(1)
            places, following = self._new[:, 3:].chunk(2, dim=1)
            new = NewTensors(
                self.hidden[places], following, start, held, count, self._slots.buffers
            )
            trees = trees if self._limits is None else GrowingTrees(self._limits, *nodes)
            self._drafter.fill(engine.backbone, new, trees)
        states, chosen, certain = self._verify(trees.tokens, trees.depth, trees.mask)
        count, last, path, on_path = longest_path(
            chosen, trees.tokens, trees.depth, trees.parents, trees.mask, self._count
        )
        self._cache.compact(self.lengths, path)
        if certain is not None:
            count = count * (certain | ~on_path).all(1, keepdim=True)
        accepted = trees.tokens.gather(1, path)
        results = torch.cat([count, chosen.gather(1, last), path, accepted], dim=1)
        return results, states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))

    def _run_roots(self) -> tuple[Tensor, Tensor]:
        """Runs the step of roots without a tree: each is accepted, and lies where it stays."""
        states, chosen, certain = self._verify(self.tokens, self.depth, self._itself)
        count = self._ones if certain is None else certain.long()
        return torch.cat([count, chosen, self.depth, self.tokens], dim=1), states

    def _verify(
        self, tokens: Tensor, depth: Tensor, tree_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the states of nodes, the token chosen after each one, and `certain` (see `choose`) if it samples."""
        engine = self._engine
        layout = lay_out_at(
            self.lengths,
            tree_mask,
            depth,
            engine.masks,
            engine.backbone.max_positions,
            0,
            self._cache.capacity,
            by_length=engine.by_length,
            exact=engine.exact is not None,
        )
        states, final = engine.run(tokens, layout, self._cache, self._taps)
        logits = engine.backbone.finish_logits(engine.lm_head(final))
        if self._sampled:
            return states, *choose(logits.float(), self.params, depth)
        # The order of 16-bit logits is that of their fp32 copies.
        return states, logits.argmax(-1), None


def captures(engine: Engine) -> bool:
    """Returns True if a trial shows that an engine's captured steps equal ordinary ones and are faster."""
    if not isinstance(engine, LayoutEngine):
        return False
    if engine.captures is None:
        engine.captures = _trial(engine)
    return engine.captures


@torch.inference_mode()
def _trial(engine: LayoutEngine) -> bool:
    """Returns True if captured steps agree with ordinary ones, greedy and sampled, and greedy ones are faster.

    A failure is logged in one line.
    """
    device = engine.backbone.device
    gains = []
    try:
        cache = engine.new_cache()
        draft = _draft(engine, cache)
        graphs = CudaGraphs(engine, cache, (-1,))
        for sampling in (Sampling(), Sampling("exact", 0.8, 0.9)):
            ours, seconds = _timed(engine, cache, partial(_graph_step, graphs, draft, sampling))
            step = partial(_ordinary_step, engine, cache, draft, sampling)
            plain, ordinary = _timed(engine, cache, step)
            if graphs.failed or plain is None:
                return False
            if ours is None:  # too flat a distribution for top-p; steps on it are ordinary ones
                continue
            if not _equal(engine, ours, plain):
                log.warning(f"CUDA graphs are not used: captured steps differ on {device}")
                return False
            gains.append(ordinary / seconds)
    except RuntimeError as reason:
        why = first_line(reason)
        log.warning(f"CUDA graphs are not used: steps cannot be captured on {device}: {why}")
        return False
    return gains[0] > 1


def _graph_step(graphs: CudaGraphs, draft: Draft, sampling: Sampling) -> Accepted | None:
    accepted = graphs.run([Sampler(sampling)], [draft], {})
    return None if accepted is None else accepted[0]


def _equal(engine: LayoutEngine, ours: Accepted, plain: Accepted) -> bool:
    """Returns True if two steps agree in their states up to rounding and, in fp32, in their tokens."""
    rows = min(len(ours.path), len(plain.path))
    expected = plain.hidden[:rows]
    error = float((ours.hidden[:rows] - expected).float().norm() / expected.float().norm())
    same = (ours.path, ours.bonus) == (plain.path, plain.bonus)
    # In 16 bits, near-ties may flip.
    return (same or engine.dtype != torch.float32) and error <= TOLERANCE[engine.dtype]


def _draft(engine: LayoutEngine, cache: Cache) -> Draft:
    """Returns a chain of the tokens that the engine predicts after BEFORE tokens; the last one is made wrong."""
    vocabulary = engine.backbone.vocab_size
    out = engine.forward(Plan.chain(torch.arange(BEFORE) * 37 % vocabulary), cache)
    tokens = []
    for _ in range(LEVELS + 1):
        assert out.logits is not None
        tokens.append(out.logits[0, -1].argmax())
        out = engine.forward(Plan.chain(tokens[-1][None]), cache)
    cache.truncate(0, BEFORE)
    tokens[-1] = (tokens[-1] + 1) % vocabulary
    return Draft(torch.stack(tokens), Tree.chain(LEVELS))


def _ordinary_step(
    engine: LayoutEngine, cache: Cache, draft: Draft, sampling: Sampling
) -> Accepted:
    out = engine.forward(Plan(draft.tokens[None], draft.tree.depth, draft.tree.mask), cache)
    assert out.logits is not None
    ((path, bonus),) = accept(out.logits, [draft], [Sampler(sampling)])
    cache.keep(0, path)
    tokens = [draft.ids[node] for node in path]
    rows = upload(path, out.hidden.device)
    return Accepted(path, tokens, draft.tokens[rows], bonus, out.hidden[0, rows])


def _timed(
    engine: LayoutEngine, cache: Cache, step: Callable[[], Accepted | None]
) -> tuple[Accepted | None, float]:
    """Returns the result of a step and its shortest duration in seconds."""
    result = step()

    def lap() -> None:
        cache.truncate(0, BEFORE)
        step()

    seconds = best_time(engine.backbone.device, lap, LAPS)
    cache.truncate(0, BEFORE)
    return result, seconds
