"""The trial that decides, once per engine, whether decoding steps are captured as CUDA graphs."""

import logging
from collections.abc import Callable
from functools import partial

import torch

from medusa_cli.decode.accept import accept
from medusa_cli.decode.answer import Accepted
from medusa_cli.decode.cuda_graph import CudaGraphs
from medusa_cli.decode.sampler import Sampler
from medusa_cli.decode.sampling_options import Sampling
from medusa_cli.device import best_time, upload
from medusa_cli.engine import Cache, Engine, Plan
from medusa_cli.engine.engine import LayoutEngine
from medusa_cli.engine.torch_layers import TOLERANCE
from medusa_cli.errors import first_line
from medusa_cli.tree import Draft, Tree

# The number of tokens in the cache before the timed step, the levels of the step's draft, and the
# number of timed repetitions.
BEFORE = 12
LEVELS = 4
LAPS = 5
log = logging.getLogger(__name__)


def captures(engine: Engine) -> bool:
    """Returns True if a trial shows that an engine's captured steps agree with ordinary steps and are faster."""
    if not isinstance(engine, LayoutEngine):
        return False
    if engine.captures is None:
        engine.captures = _trial(engine)
    return engine.captures


@torch.inference_mode()
def _trial(engine: LayoutEngine) -> bool:
    """Returns True if captured steps, greedy and sampled, agree with ordinary steps, and greedy steps get faster.

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
            # The distribution is too flat for top-p in a graph. Decoding takes an ordinary step then.
            if ours is None:
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
    # In 16 bits, nearly equal logits may change their order.
    return (same or engine.dtype != torch.float32) and error <= TOLERANCE[engine.dtype]


def _draft(engine: LayoutEngine, cache: Cache) -> Draft:
    """Returns a chain of the tokens that the engine predicts after BEFORE tokens, with a wrong last token."""
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
