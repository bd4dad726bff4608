"""Times of forward passes by rows, and the bandwidth of memory, which bounds them."""

import gc
import logging
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from medusa_cli.engine import Cache, Engine, Plan, load_backbone
from medusa_cli.engine.autotune import best_time, copy_bandwidth
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.tree import Tree

ROWS = (1, 4, 8, 16, 32, 64)
ROUNDS = 15
log = logging.getLogger(__name__)


def time_rows(backbone: Backbone, rows: Sequence[int] = ROWS, *, context: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Returns median milliseconds of a pass by rows after `context` tokens, seconds of the prefill, the cache's bytes.

    The sizes take turns, so that drift of the machine hits all alike.
    """
    cache = backbone.engine.new_cache(capacity=context + max(rows))
    prompt = Plan.chain(torch.arange(context) % backbone.vocab_size, logits="none")
    prefill = best_time(backbone.device, lambda: backbone.engine.forward(prompt, cache), 1)
    laps: dict[int, list[float]] = {count: [] for count in rows}
    for number in range(rounds + 2):
        for count in rows:
            ids = (torch.arange(count, device=backbone.device) + number) % backbone.vocab_size
            tree = Tree((-1, *[0] * (count - 1)), tuple(range(count)))
            plan = Plan(ids[None], tree.depth, tree.mask)
            seconds = best_time(backbone.device, partial(_verify, backbone.engine, plan, cache), 1)
            if number >= 2:  # the first rounds warm up
                laps[count].append(seconds)
    medians = {str(count): 1e3 * statistics.median(times) for count, times in laps.items()}
    return {"step_ms": medians, "prefill_s": prefill, "cache_bytes": cache.nbytes}


def _verify(engine: Engine, plan: Plan, cache: Cache) -> None:
    """Runs a pass, and reads each row's most likely token as acceptance does."""
    logits = engine.forward(plan, cache).logits
    assert logits is not None
    logits.argmax(-1).tolist()


def time_engines(model: str, options: LoadOptions, contexts: Sequence[int]) -> dict[str, Any]:
    """Times passes by context and engine; engine "auto" times every engine that can run the model, one at a time."""
    document: dict[str, Any] = {"model": model, "contexts": {str(size): {} for size in contexts}}
    for engine in ("eager", "fast") if options.engine == "auto" else (options.engine,):
        try:
            backbone = load_backbone(model, replace(options, engine=engine))
        except UsageError:
            if engine == "eager" or options.engine != "auto":
                raise
            continue
        longest = backbone.max_positions - 3
        if contexts[-1] > longest:
            remedy = f"use {longest} or less"
            raise UsageError(f"@steps {contexts[-1]} leaves no position of {backbone.max_positions}", remedy)
        if "ceiling_ms" not in document:
            bandwidth, weights = copy_bandwidth(backbone.device), backbone.engine.weight_bytes
            document |= {
                "dtype": str(backbone.dtype).removeprefix("torch."),
                "device": str(backbone.device),
                "weight_bytes": weights,
                "copy_bytes_per_s": bandwidth,
                "ceiling_ms": 1e3 * weights / bandwidth,
            }
        for size in contexts:
            log.info("%s: timing passes with %s tokens in the cache", engine, f"{size:,}")
            document["contexts"][str(size)][engine] = time_rows(backbone, context=size)
        del backbone  # no two of them are held at once
        gc.collect()
    return document
