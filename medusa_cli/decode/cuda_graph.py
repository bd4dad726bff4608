"""How sequences side by side choose their tokens, as tensors alone: what a captured step does in place of `Rule`."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_cli.decode.accept import accept
from medusa_cli.decode.sampling import Sampler, Sampling, draw, nucleus
from medusa_cli.decode.stats import Accepted
from medusa_cli.drafters.base import Draft
from medusa_cli.engine import Cache, Engine, ExtraRows, Plan
from medusa_cli.engine.fast import TOLERANCE
from medusa_cli.engine.plan import lay_out_at
from medusa_cli.tree.tree import Tree

# All greedy; some sampled; some of those from the likeliest tokens alone.
GREEDY, WHOLE, CUT = "greedy", "whole", "cut"
# What is said of a sequence before its random numbers: whether it samples, temperature, top_p, top_k.
FIELDS = 4


def kind_of(rules: Sequence[Sampler]) -> str:
    """What the sequences need together: each kind does what the ones before it do."""
    sampled = [rule.sampling for rule in rules if not rule.greedy]
    if not sampled:
        return GREEDY
    return CUT if any(one.top_p < 1 or one.top_k for one in sampled) else WHOLE


def demands(rules: Sequence[Sampler], tree: Tree, kind: str) -> Tensor | None:
    """How each sequence chooses, and the numbers of its next tokens [B, FIELDS + depths]; None where all are greedy."""
    if kind == GREEDY:
        return None
    rows = []
    for rule in rules:
        said = [0.0, 1.0, 1.0, 0.0]
        if not rule.greedy:
            one = rule.sampling
            said = [1.0, one.temperature, one.top_p if one.top_p < 1 else 2.0, float(one.top_k)]  # 2: no sum gets there
        rows.append(
            [*said, *(rule.peek_uniforms(tree.max_depth + 1) if not rule.greedy else [0.0] * (tree.max_depth + 1))]
        )
    return torch.tensor(rows, dtype=torch.double)


def choose(logits: Tensor, demands: Tensor, depth: Tensor, kind: str) -> Tensor:
    """The token after each node [B, N] by logits [B, N, V] and what `demands` says; depth [N] of the nodes."""
    best = logits.argmax(-1)
    if kind == GREEDY:
        return best
    sampled, heat, top_p, top_k = (one[:, None] for one in demands[:, :FIELDS].unbind(-1))  # [B, 1] each
    uniforms = demands[:, FIELDS:][:, depth]  # [B, N]
    weights = (logits / heat[..., None].float()).softmax(-1)
    drawn = draw(weights, uniforms)
    if kind == CUT:
        ordered, ids = weights.sort(dim=-1, descending=True)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill((rank >= top_k[..., None]) & (top_k[..., None] > 0), 0)
        ordered = nucleus(ordered / ordered.sum(-1, keepdim=True), top_p[..., None].float())
        among = ids.gather(-1, draw(ordered, uniforms)[..., None])[..., 0]
        # A sequence draws by its own numbers the same, whoever is beside it.
        drawn = torch.where((top_p < 1) | (top_k > 0), among, drawn)
    return torch.where(sampled > 0, drawn, best)


# Attention reads a multiple of so many columns: few graphs, and little read for nothing.
COLUMNS = 512
# Passes before a capture, so that libraries have chosen their kernels and made their workspaces.
WARM_UPS = 2
log = logging.getLogger(__name__)


class CudaGraphs:
    """Steps over a cache by its first B slots; each reads one small tensor back from the device."""

    def __init__(self, engine: Engine, cache: Cache, taps: tuple[int, ...]) -> None:
        self._engine, self._cache, self._taps = engine, cache, taps
        self._lengths = torch.zeros(cache.slots, dtype=torch.long, device=engine.backbone.device)
        self._steps: dict[tuple[Tree, int, int, str], _GraphStep] = {}
        self._buffer = 0  # where the cache lay when the graphs were made
        # One step runs at a time, so all graphs may use the same memory.
        on_device = engine.backbone.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_device else None

    def supports(self, drafts: Sequence[Draft], rules: Sequence[Sampler], pseudo: ExtraRows | None) -> bool:
        """Whether a step is of a kind that runs so: greedy or exact, over one tree for all, no pseudo rows."""
        alike = all(draft.tree is drafts[0].tree for draft in drafts)
        fits = alike and pseudo is None and all(rule.greedy or rule.sampling.mode == "exact" for rule in rules)
        if not fits:
            log.debug("this step runs uncaptured")
        return fits

    def verify(self, tokens: Tensor, tree: Tree, rules: Sequence[Sampler]) -> list[Accepted]:
        """Verify tokens [B, N] over a tree and keep each sequence's accepted path."""
        cache, size, kind = self._cache, len(tokens), kind_of(rules)
        wide = -(-(max(cache.lengths[:size]) + tree.size) // COLUMNS) * COLUMNS
        cache.reserve(wide)
        assert cache.values is not None
        if cache.values.data_ptr() != self._buffer:
            self._steps, self._buffer = {}, cache.values.data_ptr()
        self._lengths.copy_(torch.tensor(cache.lengths))
        key = (tree, wide, size, kind)
        if key not in self._steps:
            self._steps[key] = _GraphStep(self._engine, cache, self._lengths[:size], tree, wide, self._taps, kind)
        found, hidden = self._steps[key](tokens, demands(rules, tree, kind), self._pool)
        settled = []
        for slot, (count, bonus, *path) in enumerate(found.tolist()):
            cache.lengths[slot] += count
            rules[slot].advance(count)
            # The graph's next run overwrites its states.
            settled.append(Accepted(path[:count], bonus, hidden[slot, :count].clone()))
        return settled


class _GraphStep:
    """One step for one tree, one number of columns and one number of sequences."""

    def __init__(
        self, engine: Engine, cache: Cache, lengths: Tensor, tree: Tree, wide: int, taps: tuple[int, ...], kind: str
    ) -> None:
        device, size = engine.backbone.device, tree.size
        self._kind = kind
        self._engine, self._cache, self._lengths, self._wide, self._taps = engine, cache, lengths, wide, taps
        self._tokens = torch.zeros(len(lengths), size, dtype=torch.long, device=device)
        # Of each sequence how it chooses, and the random numbers of its next tokens.
        numbers = FIELDS + tree.max_depth + 1 if kind != GREEDY else 0
        self._demands = torch.zeros(len(lengths), numbers, dtype=torch.double, device=device)
        self._depth, self._sees = tree.depth.to(device), tree.mask.to(device)
        self._parents = torch.tensor([max(parent, 0) for parent in tree.parents], device=device)
        self._root = torch.arange(size, device=device) == 0
        # The deepest node wins, of equals the first.
        self._worth = self._depth * size + torch.arange(size - 1, -1, -1, device=device)
        # Beyond a path's end every row stays where it is.
        full = list(range(tree.max_depth + 1))
        paths = [tree.path(node) for node in range(size)]
        self._paths = torch.tensor([path + full[len(path) :] for path in paths], device=device)  # [N, P]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, demands: Tensor | None, pool: Any) -> tuple[Tensor, Tensor]:
        """Tokens [B, N] to (accepted rows, bonus, path) [B, 2 + P] and the path's states [B, P, H * taps].

        demands: what `choosing.demands` says of the sequences; pool: the graphs' memory, None runs without a graph.
        """
        self._tokens.copy_(tokens)
        if demands is not None:
            self._demands.copy_(demands)
        if pool is None:
            return self._run()
        if self._graph is None:
            self._capture(pool)
        assert self._graph is not None and self._out is not None
        self._graph.replay()
        return self._out

    def _capture(self, pool: Any) -> None:
        lengths, device = self._lengths.clone(), self._tokens.device
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    self._run()
                    self._lengths.copy_(lengths)  # what a pass writes behind them, the next one writes again
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                self._out = self._run()

    def _run(self) -> tuple[Tensor, Tensor]:
        """The step itself: no value of a tensor is looked at."""
        engine, positions = self._engine, self._engine.backbone.max_positions
        layout = lay_out_at(self._lengths, self._sees[None], self._depth[None], engine.masks, positions, 0, self._wide)
        states, final = engine.run(self._tokens, layout, self._cache, self._taps)
        chosen = choose(engine.lm_head(final).float(), self._demands, self._depth, self._kind)  # [B, N]
        right = (chosen[:, self._parents] == self._tokens) | self._root
        stands = (right[:, None] | ~self._sees).all(-1)  # every ancestor was right too
        # No torch.where with a number: it would be copied from the host, which no capture allows.
        best = self._worth.expand_as(stands).masked_fill(~stands, -1).argmax(-1, keepdim=True)  # [B, 1]
        path = self._paths[best[:, 0]]  # [B, P]
        self._cache.compact(self._lengths, path)
        count = self._depth[best] + 1
        self._lengths += count[:, 0]
        found = torch.cat([count, chosen.gather(1, best), path], dim=1)
        return found, states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))


# Tokens before the step, levels of its draft, and how often it is run.
BEFORE, LEVELS, LAPS = 12, 4, 5
log_trial = logging.getLogger(__name__)


def captures(engine: Engine) -> bool:
    """Whether an engine's steps are to be captured; tried where that is not known yet.

    They are where they give what uncaptured ones give, and are faster. A device on which they fail says so in one line.
    """
    if engine.captures is None:
        engine.captures = _trial(engine)
    return engine.captures


@torch.inference_mode()
def _trial(engine: Engine) -> bool:
    try:
        cache = engine.new_cache()
        draft = _draft(engine, cache)
        captured, rules = CudaGraphs(engine, cache, (-1,)), [Sampler(Sampling())]
        ours, seconds = _run(engine, cache, lambda: captured.verify(draft.tokens[None], draft.tree, rules)[0])
        plain, slower = _run(engine, cache, lambda: _uncaptured(engine, cache, draft, rules))
    except RuntimeError as reason:
        log_trial.warning("steps cannot be captured on %s and run without: %s", engine.backbone.device, _line(reason))
        return False
    rows = min(len(ours.path), len(plain.path))
    error = float((ours.hidden[:rows] - plain.hidden[:rows]).float().norm() / plain.hidden[:rows].float().norm())
    alike = (ours.path, ours.bonus) == (plain.path, plain.bonus) or engine.dtype != torch.float32  # near-ties may flip
    if not alike or not error <= TOLERANCE[engine.dtype]:
        log_trial.warning("captured steps give something else on %s; steps run without", engine.backbone.device)
        return False
    log_trial.debug("a captured step takes %.2f ms, an uncaptured one %.2f ms", 1e3 * seconds, 1e3 * slower)
    return seconds < slower


def _draft(engine: Engine, cache: Cache) -> Draft:
    """A chain of the engine's own next tokens after some text, the last one wrong; the text stays in the cache."""
    device = engine.backbone.device
    text = torch.arange(BEFORE, device=device) * 37 % engine.backbone.vocab_size
    out, tokens = engine.forward(Plan.chain(text), cache), []
    for _ in range(LEVELS + 1):
        assert out.logits is not None
        tokens.append(out.logits[0, -1].argmax())
        out = engine.forward(Plan.chain(tokens[-1][None]), cache)
    cache.truncate(0, BEFORE)
    tokens[-1] = (tokens[-1] + 1) % engine.backbone.vocab_size
    return Draft(torch.stack(tokens), Tree.chain(LEVELS))


def _uncaptured(engine: Engine, cache: Cache, draft: Draft, rules: list[Sampler]) -> Accepted:
    tree = draft.tree
    plan = Plan(draft.tokens[None], tree.depth, tree.mask)
    out = engine.forward(plan, cache)
    assert out.logits is not None
    ((path, bonus),) = accept(out.logits, [draft], rules)
    cache.keep(0, path)
    rows: Tensor = torch.tensor(path, device=draft.tokens.device)
    return Accepted(path, bonus, out.hidden[0, rows])


def _run(engine: Engine, cache: Cache, step: Callable[[], Accepted]) -> tuple[Accepted, float]:
    """What a step gives after the text, and the least seconds of some laps; the first one warms up."""
    found, least = step(), float("inf")
    for _ in range(LAPS):
        cache.truncate(0, BEFORE)
        start = time.perf_counter()
        found = step()
        if engine.backbone.device.type == "cuda":
            torch.cuda.synchronize(engine.backbone.device)
        least = min(least, time.perf_counter() - start)
    cache.truncate(0, BEFORE)
    return found, least


def _line(reason: Exception) -> str:
    return (str(reason).splitlines() or [type(reason).__name__])[0]
