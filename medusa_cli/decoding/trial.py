"""Whether captured steps are used on a device: tried once for an engine, against its uncaptured ones."""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from medusa_cli.decoding.accept import accept
from medusa_cli.decoding.captured import Captured
from medusa_cli.decoding.sampling import Rule, Sampling
from medusa_cli.decoding.types import Settled
from medusa_cli.drafters.base import Draft
from medusa_cli.engines import Cache, Engine, Plan
from medusa_cli.engines.lean import TOLERANCE
from medusa_cli.tree.tree import Tree

# Tokens before the step, levels of its draft, and how often it is run.
BEFORE, LEVELS, LAPS = 12, 4, 5
log = logging.getLogger(__name__)


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
        captured, rules = Captured(engine, cache, (-1,)), [Rule(Sampling())]
        ours, seconds = _run(engine, cache, lambda: captured.verify(draft.tokens[None], draft.tree, rules)[0])
        plain, slower = _run(engine, cache, lambda: _uncaptured(engine, cache, draft, rules))
    except RuntimeError as reason:
        log.warning("steps cannot be captured on %s and run without: %s", engine.backbone.device, _line(reason))
        return False
    rows = min(len(ours.path), len(plain.path))
    error = float((ours.hidden[:rows] - plain.hidden[:rows]).float().norm() / plain.hidden[:rows].float().norm())
    alike = (ours.path, ours.bonus) == (plain.path, plain.bonus) or engine.dtype != torch.float32  # near-ties may flip
    if not alike or not error <= TOLERANCE[engine.dtype]:
        log.warning("captured steps give something else on %s; steps run without", engine.backbone.device)
        return False
    log.debug("a captured step takes %.2f ms, an uncaptured one %.2f ms", 1e3 * seconds, 1e3 * slower)
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


def _uncaptured(engine: Engine, cache: Cache, draft: Draft, rules: list[Rule]) -> Settled:
    tree = draft.tree
    plan = Plan(draft.tokens[None], tree.depth, tree.mask)
    out = engine.forward(plan, cache)
    assert out.logits is not None
    (verdict,) = accept(out.logits, [draft], rules)
    cache.keep(0, verdict.path)
    path: Tensor = torch.tensor(verdict.path, device=draft.tokens.device)
    return Settled(verdict.path, verdict.bonus, out.hidden[0, path])


def _run(engine: Engine, cache: Cache, step: Callable[[], Settled]) -> tuple[Settled, float]:
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
