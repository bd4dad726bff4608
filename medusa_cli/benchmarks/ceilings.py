"""What a pass by rows costs here, and the two ceilings no pass can beat: reading the weights, and multiplying them."""

import time
from collections.abc import Callable
from typing import Any

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.benchmarks.rows import ROUNDS, ROWS, copy_bandwidth, time_rows

CONTEXT = 384
SIDE = 1024
TRIALS = 5
# Passes that `measure_rows` makes, for a progress bar.
PASSES = (ROUNDS + 2) * len(ROWS)


def operations_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Multiplications and additions a second of a square product of matrices of this type; the best of a few."""
    left = torch.randn(SIDE, SIDE, device=device).to(dtype)
    right = torch.randn(SIDE, SIDE, device=device).to(dtype)
    best = float("inf")
    for _ in range(TRIALS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * SIDE**3 / best


def multiplied(backbone: Backbone) -> int:
    """Weights that a row is multiplied by: those of every linear layer, whatever an engine made of its matrix."""
    layers = [one for one in backbone.model.modules() if "in_features" in vars(one)]
    # An adapter's layer bears the sizes of the one that it holds.
    return sum(int(one.in_features) * int(one.out_features) for one in layers if not hasattr(one, "base_layer"))


def measure_rows(backbone: Backbone, on_progress: Callable[[int], None] = lambda steps: None) -> dict[str, Any]:
    """Median milliseconds of a pass by rows on the backbone's engine, and what the ceilings are computed from."""
    context = min(CONTEXT, backbone.max_positions - 3)
    timed = time_rows({"own": backbone}, context=context, on_progress=on_progress)["own"]
    return {
        "engine": backbone.engine.title,
        "context": context,
        "rounds": ROUNDS,
        "step_ms": {str(count): 1e3 * seconds for count, seconds in timed.seconds.items()},
        "weight_bytes": backbone.engine.weight_bytes,
        "weights": multiplied(backbone),
        "copy_bytes_per_s": copy_bandwidth(backbone.device),
        "operations_per_s": operations_rate(backbone.device, backbone.dtype),
    }
