"""Whole decoding steps captured as CUDA graphs: draft tokens in, accepted paths out, by tensors alone."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any

import torch
from torch import Tensor

from medusa_cli.decode.accept import accept
from medusa_cli.decode.sampling import Sampler, Sampling, draw, nucleus
from medusa_cli.decode.sequence import Sequence
from medusa_cli.decode.stats import Accepted
from medusa_cli.engine import Cache, Engine, Plan
from medusa_cli.engine.autotune import best_time
from medusa_cli.engine.fast import TOLERANCE
from medusa_cli.engine.plan import lay_out_at
from medusa_cli.errors import first_line
from medusa_cli.tree import Draft, Tree

# The sampling that a step's sequences need: all greedy; some sampled; some of those with top-p or top-k.
GREEDY, SAMPLED, TRUNCATED = "greedy", "sampled", "truncated"
# Parameters of a sequence before its random numbers: 1 if it samples, temperature, top-p, top-k.
FIELDS = 4
# Attention reads a multiple of so many columns: few graphs, and few columns read in vain.
COLUMNS = 512
# Passes before a capture, in which libraries choose kernels and make workspaces.
WARM_UPS = 2
# The trial: tokens before the step, levels of its draft, laps.
BEFORE, LEVELS, LAPS = 12, 4, 5
log = logging.getLogger(__name__)


def sampling_kind(samplers: Several[Sampler]) -> str:
    """Returns the kind of sampling that serves all sequences."""
    sampled = [sampler.sampling for sampler in samplers if not sampler.greedy]
    if not sampled:
        return GREEDY
    return TRUNCATED if any(sampling.top_p < 1 or sampling.top_k for sampling in sampled) else SAMPLED


def sampling_params(samplers: Several[Sampler], tree: Tree) -> Tensor:
    """Returns each sequence's FIELDS parameters and the random numbers of its next tokens [B, FIELDS + depths]."""
    rows = []
    for sampler in samplers:
        sampling, count = sampler.sampling, tree.max_depth + 1
        if sampler.greedy:
            rows.append([0.0, 1.0, 1.0, 0.0, *[0.0] * count])
        else:
            top_p = sampling.top_p if sampling.top_p < 1 else 2.0  # no sum reaches 2
            rows.append([1.0, sampling.temperature, top_p, float(sampling.top_k), *sampler.peek_uniforms(count)])
    return torch.tensor(rows, dtype=torch.double)


def choose(logits: Tensor, params: Tensor, depth: Tensor, kind: str) -> Tensor:
    """Returns the token after each node [B, N] by logits [B, N, V], `sampling_params` and the nodes' depth [N]."""
    best = logits.argmax(-1)
    if kind == GREEDY:
        return best
    sampled, temperature, top_p, top_k = (field[:, None] for field in params[:, :FIELDS].unbind(-1))  # [B, 1] each
    uniforms = params[:, FIELDS:][:, depth]  # [B, N]
    scores = logits / temperature[..., None].float()
    drawn = draw(scores.softmax(-1), uniforms)
    if kind == TRUNCATED:
        ordered, ids = scores.sort(dim=-1, descending=True)
        last = top_k[..., None].long().clamp(1, ordered.shape[-1]) - 1
        lowest = ordered.gather(-1, last.expand(*ordered.shape[:-1], 1))  # what ties with the k-th stays
        ordered = ordered.masked_fill((ordered < lowest) & (top_k[..., None] > 0), -torch.inf)
        ordered = nucleus(ordered.softmax(-1), top_p[..., None].float())
        among = ids.gather(-1, draw(ordered, uniforms)[..., None])[..., 0]
        # A sequence without top-p and top-k draws as if it were alone.
        drawn = torch.where((top_p < 1) | (top_k > 0), among, drawn)
    return torch.where(sampled > 0, drawn, best)


class CudaGraphs:
    """Runs steps over a cache by its first B slots; each reads one small tensor back from the device."""

    def __init__(self, engine: Engine, cache: Cache, taps: tuple[int, ...]) -> None:
        self._engine, self._cache, self._taps = engine, cache, taps
        self._lengths = torch.zeros(cache.slots, dtype=torch.long, device=engine.backbone.device)
        self._steps: dict[tuple[Tree, int, int, str], _GraphStep] = {}
        self._buffer = 0  # the cache's address when the graphs were captured
        # One step runs at a time, so all graphs may use the same memory.
        on_device = engine.backbone.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_device else None

    def supports(self, sequences: Several[Sequence], drafts: Several[Draft]) -> bool:
        """Returns True for greedy and exact steps over one tree for all, without processors and log probabilities."""
        rules = [s.sampler for s in sequences if s.request.top is None and s.sampler.processors is None]
        simple = len(rules) == len(drafts) and all(s.greedy or s.sampling.exact for s in rules)
        return simple and all(draft.tree is drafts[0].tree for draft in drafts)

    def verify(self, samplers: Several[Sampler], drafts: Several[Draft]) -> list[Accepted]:
        """Verifies drafts over one tree and keeps each sequence's accepted path."""
        cache, tree, size, kind = self._cache, drafts[0].tree, len(drafts), sampling_kind(samplers)
        wide = -(-(max(cache.lengths[:size]) + tree.size) // COLUMNS) * COLUMNS
        cache.reserve(wide)
        assert cache.values is not None
        if cache.values.data_ptr() != self._buffer:
            self._steps, self._buffer = {}, cache.values.data_ptr()
        self._lengths.copy_(torch.tensor(cache.lengths))
        key = (tree, wide, size, kind)
        if key not in self._steps:
            self._steps[key] = _GraphStep(self._engine, cache, self._lengths[:size], tree, wide, self._taps, kind)
        params = sampling_params(samplers, tree) if kind != GREEDY else None
        results, hidden = self._steps[key](torch.stack([draft.tokens for draft in drafts]), params, self._pool)
        accepted = []
        for slot, (count, bonus, *path) in enumerate(results.tolist()):
            cache.lengths[slot] += count
            samplers[slot].advance(count)
            # The graph's next run overwrites its states.
            accepted.append(Accepted(path[:count], bonus, hidden[slot, :count].clone()))
        return accepted


class _GraphStep:
    """One step for one tree, one number of columns and one number of sequences."""

    def __init__(
        self, engine: Engine, cache: Cache, lengths: Tensor, tree: Tree, wide: int, taps: tuple[int, ...], kind: str
    ) -> None:
        device, size = engine.backbone.device, tree.size
        self._engine, self._cache, self._lengths, self._wide = engine, cache, lengths, wide
        self._taps, self.kind = taps, kind
        self._tokens = torch.zeros(len(lengths), size, dtype=torch.long, device=device)
        numbers = FIELDS + tree.max_depth + 1 if kind != GREEDY else 0
        self._params = torch.zeros(len(lengths), numbers, dtype=torch.double, device=device)
        self._depth, self._sees = tree.depth.to(device), tree.mask.to(device)
        self._parents = torch.tensor([max(parent, 0) for parent in tree.parents], device=device)
        self._root = torch.arange(size, device=device) == 0
        # The deepest node wins, of equals the first.
        self._worth = self._depth * size + torch.arange(size - 1, -1, -1, device=device)
        # Beyond a path's end every row stays in its place.
        full = list(range(tree.max_depth + 1))
        paths = [tree.path(node) for node in range(size)]
        self._paths = torch.tensor([path + full[len(path) :] for path in paths], device=device)  # [N, P]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, params: Tensor | None, pool: Any) -> tuple[Tensor, Tensor]:
        """Returns (accepted rows, bonus, path) [B, 2 + P] and the path's states [B, P, H * taps] of tokens [B, N].

        pool: the graphs' memory; None runs without a graph.
        """
        self._tokens.copy_(tokens)
        if params is not None:
            self._params.copy_(params)
        if pool is None:
            return self._run()
        if self._graph is None:
            self._capture(pool)
        assert self._graph is not None and self._out is not None
        self._graph.replay()
        return self._out

    def _capture(self, pool: Any) -> None:
        lengths = self._lengths.clone()
        with torch.cuda.device(self._tokens.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    self._run()
                    self._lengths.copy_(lengths)  # the next pass writes the same rows again
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                self._out = self._run()

    def _run(self) -> tuple[Tensor, Tensor]:
        """Runs the step; it reads no value of a tensor."""
        engine, context = self._engine, self._engine.backbone.max_positions
        layout = lay_out_at(self._lengths, self._sees[None], self._depth[None], engine.masks, context, 0, self._wide)
        states, final = engine.run(self._tokens, layout, self._cache, self._taps)
        chosen = choose(engine.lm_head(final).float(), self._params, self._depth, self.kind)  # [B, N]
        matches = (chosen[:, self._parents] == self._tokens) | self._root
        accepted = (matches[:, None] | ~self._sees).all(-1)  # a node and all its ancestors match
        # No torch.where with a number: it would be copied from the host, which no capture allows.
        last = self._worth.expand_as(accepted).masked_fill(~accepted, -1).argmax(-1, keepdim=True)  # [B, 1]
        path = self._paths[last[:, 0]]  # [B, P]
        self._cache.compact(self._lengths, path)
        count = self._depth[last] + 1
        self._lengths += count[:, 0]
        results = torch.cat([count, chosen.gather(1, last), path], dim=1)
        return results, states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))


def captures(engine: Engine) -> bool:
    """Returns True if an engine's steps are captured: where that gives the same and is faster, by a trial."""
    if engine.captures is None:
        engine.captures = _trial(engine)
    return engine.captures


@torch.inference_mode()
def _trial(engine: Engine) -> bool:
    """Compares a captured step with an ordinary one; a failure is logged in one line."""
    device = engine.backbone.device
    try:
        cache = engine.new_cache()
        draft = _draft(engine, cache)
        graphs, samplers = CudaGraphs(engine, cache, (-1,)), [Sampler(Sampling())]
        ours, seconds = _timed(engine, cache, lambda: graphs.verify(samplers, [draft])[0])
        plain, ordinary = _timed(engine, cache, lambda: _ordinary_step(engine, cache, draft, samplers))
    except RuntimeError as reason:
        log.warning("CUDA graphs are not used: steps cannot be captured on %s: %s", device, first_line(reason))
        return False
    rows = min(len(ours.path), len(plain.path))
    error = float((ours.hidden[:rows] - plain.hidden[:rows]).float().norm() / plain.hidden[:rows].float().norm())
    same = (ours.path, ours.bonus) == (plain.path, plain.bonus) or engine.dtype != torch.float32  # near-ties may flip
    if not same or not error <= TOLERANCE[engine.dtype]:
        log.warning("CUDA graphs are not used: captured steps differ from ordinary ones on %s", device)
        return False
    log.debug("a captured step takes %.2f ms, an ordinary one %.2f ms", 1e3 * seconds, 1e3 * ordinary)
    return seconds < ordinary


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


def _ordinary_step(engine: Engine, cache: Cache, draft: Draft, samplers: list[Sampler]) -> Accepted:
    out = engine.forward(Plan(draft.tokens[None], draft.tree.depth, draft.tree.mask), cache)
    assert out.logits is not None
    ((path, bonus),) = accept(out.logits, [draft], samplers)
    cache.keep(0, path)
    return Accepted(path, bonus, out.hidden[0, torch.tensor(path, device=draft.tokens.device)])


def _timed(engine: Engine, cache: Cache, step: Callable[[], Accepted]) -> tuple[Accepted, float]:
    """Returns a step's result after the text and its least seconds."""
    result = step()

    def lap() -> None:
        cache.truncate(0, BEFORE)
        step()

    seconds = best_time(engine.backbone.device, lap, LAPS)
    cache.truncate(0, BEFORE)
    return result, seconds
