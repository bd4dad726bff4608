"""Times of forward passes by number of rows, and the memory bandwidth that limits them."""

import logging
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from medusa_cli.device import best_time, copy_bandwidth
from medusa_cli.engine import Engine, Plan, Slots
from medusa_cli.engine.timing import random_tokens, watched
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.tree import Tree

ROWS = (1, 4, 8, 16, 32, 64)
ROUNDS = 15
CONTEXT = 256
log = logging.getLogger(__name__)


def time_rows(
    backbone: Backbone, rows: Sequence[int] = ROWS, *, context: int, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Returns the median pass time in milliseconds by number of rows, with `context` tokens in the cache.

    Also returns the prefill time in seconds and the cache size in bytes. Passes with different row counts alternate, so
    that changes in the machine's speed affect all of them equally. Rows have different random tokens, because a mixture
    of experts reads more weights the more its tokens differ.
    """
    cache = backbone.engine.new_cache(capacity=context + max(rows))
    prompt = Plan.chain(random_tokens(context, backbone.vocab_size, 0), logits="none")
    prefill = best_time(backbone.device, lambda: backbone.engine.forward(prompt, cache), 1)
    laps: dict[int, list[float]] = {count: [] for count in rows}
    for number in range(rounds + 2):
        for count in rows:
            ids = random_tokens(count, backbone.vocab_size, number).to(backbone.device)
            tree = Tree((-1, *[0] * (count - 1)), tuple(range(count)))
            plan = Plan(ids[None], tree.depth, tree.mask)
            seconds = best_time(backbone.device, partial(_verify, backbone.engine, plan, cache), 1)
            if number >= 2:  # the first rounds are a warm-up
                laps[count].append(seconds)
    medians = {str(count): 1e3 * statistics.median(times) for count, times in laps.items()}
    return {"step_ms": medians, "prefill_s": prefill, "cache_bytes": cache.nbytes}


def _verify(engine: Engine, plan: Plan, cache: Slots) -> None:
    """Runs a pass and reads each row's most likely token, as acceptance does."""
    out = engine.forward(plan, cache)
    assert out.logits is not None
    best = out.logits.argmax(-1) if out.best is None else out.best
    best.tolist()


def time_passes(backbone: Backbone, contexts: Sequence[int]) -> dict[str, Any]:
    """Times a backbone's passes by context and number of rows. Without `contexts`, uses a short context.

    The result also has the minimum time to read the weights at the measured bandwidth. Raises
    UsageError if the longest context does not fit.
    """
    longest = backbone.max_positions - 3
    contexts = contexts or [min(CONTEXT, longest)]
    if contexts[-1] > longest:
        fault = f"@context {contexts[-1]} leaves no position of {backbone.max_positions}"
        raise UsageError(fault, f"use {longest} or less")
    bandwidth = copy_bandwidth(backbone.device)
    weights = backbone.engine.weight_bytes
    by_context = {}
    busy = None
    for size in contexts:
        log.info("timing passes with %s tokens in the cache", f"{size:,}")
        by_context[str(size)], disturbed = watched(partial(time_rows, backbone, context=size))
        busy = busy or disturbed
    return {
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "device": str(backbone.device),
        "weight_bytes": weights,
        "copy_bytes_per_s": bandwidth,
        "ceiling_ms": 1e3 * weights / bandwidth,
        "tokens": "random, a different one in each row",
        "busy": busy is not None,
        "contexts": by_context,
    }
