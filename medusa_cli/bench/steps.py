"""Times of forward passes by rows, and the ceilings that memory and arithmetic set."""

import gc
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.decode.costs import costs_for
from medusa_cli.drafters import load_drafter
from medusa_cli.engine import Cache, Engine, Plan, load_backbone
from medusa_cli.engine.autotune import best_time
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.model.load import peak_memory, reset_peak
from medusa_cli.runs.accuracies import stamp_of
from medusa_cli.runs.provenance import describe_drafter
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run
from medusa_cli.tree import Tree
from medusa_cli.tree.search import Accuracies, Budget, Costs, budgets

ROWS = (1, 4, 8, 16, 32, 64)
ROUNDS = 15
CONTEXT = 384
COPIED_BYTES = 256 * 2**20
PRODUCT_SIDE = 1024
log = logging.getLogger(__name__)


def copy_bandwidth(device: torch.device) -> float:
    """Returns the bytes a second, read and written, that a plain copy moves."""
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / best_time(device, lambda: target.copy_(source))


def operations_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the multiplications and additions a second of a large product of matrices."""
    left, right = (torch.randn(PRODUCT_SIDE, PRODUCT_SIDE, device=device).to(dtype) for _ in range(2))
    return 2 * PRODUCT_SIDE**3 / best_time(device, lambda: left @ right)


def time_rows(
    backbone: Backbone, rows: Sequence[int] = ROWS, *, context: int = CONTEXT, rounds: int = ROUNDS
) -> dict[str, Any]:
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


def time_passes(backbone: Backbone) -> dict[str, Any]:
    """Returns milliseconds of a pass by rows on the backbone's engine, and what its ceilings are computed from."""
    context = min(CONTEXT, backbone.max_positions - 3)
    log.info("timing passes by rows")
    return {
        "engine": backbone.engine.title,
        "context": context,
        "rounds": ROUNDS,
        "step_ms": time_rows(backbone, context=context)["step_ms"],
        "weight_bytes": backbone.engine.weight_bytes,
        "copy_bytes_per_s": copy_bandwidth(backbone.device),
    }


def find_budget(
    run: Run, accuracies: Accuracies, options: LoadOptions, again: bool, on_progress: Callable[[int], None]
) -> tuple[Budget, list[Budget], Costs]:
    """Returns the tree with the most expected tokens a second, the best of each size, and the costs of a run's steps.

    Steps are timed unless their times are stored, or `again`. on_progress: receives the number of timed steps.
    """
    model = str(describe_drafter(run.drafter_dir).provenance.identity.get("id") or DEFAULT_MODEL)
    backbone = load_backbone(model, options, adapter=run.adapter)
    drafter = load_drafter(run.drafter_dir, backbone)
    costs = costs_for(backbone, drafter, stamp_of(run.drafter_dir), again=again, on_progress=on_progress)
    sizes = budgets(accuracies, costs)
    return max(sizes, key=lambda budget: budget.tokens_per_s), sizes, costs


def time_engines(model: str, options: LoadOptions, contexts: Sequence[int]) -> dict[str, Any]:
    """Times passes by context and engine; engine "auto" times every engine that can run the model, one at a time."""
    document: dict[str, Any] = {"model": model, "contexts": {str(size): {} for size in contexts}, "peak_bytes": {}}
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
            reset_peak(backbone.device)
            document["contexts"][str(size)][engine] = time_rows(backbone, context=size)
            peak = peak_memory(backbone.device)
            document["peak_bytes"][str(size)] = max(document["peak_bytes"].get(str(size), 0), peak)
        del backbone  # no two of them are held at once
        gc.collect()
    return document
