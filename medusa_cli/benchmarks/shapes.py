"""What steps cost at the sizes of real models: random weights, each engine, under the device's own ceilings."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.benchmarks.rows import copy_bandwidth
from medusa_cli.decoding.costs import measure_costs
from medusa_cli.drafters import MedusaHeads
from medusa_cli.engines import Plan, load_backbone
from medusa_cli.errors import first_line

ROWS = (1, 4, 8, 16, 32, 64)
PREFILL = 1024
ROUNDS = 9


def time_shape(
    model: str,
    device: str,
    *,
    rows: Sequence[int] = ROWS,
    prefill: int = PREFILL,
    rounds: int = ROUNDS,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Milliseconds of whole steps by rows, of a prefill and of drafting, by the way of running a model's steps.

    The ways are "eager", "fast" and, where the device captures steps, "captured". A way that fails is named with its
    error, and the others are measured all the same. ceiling_ms is what reading the weights takes at the bandwidth of a
    copy.
    """
    bandwidth = copy_bandwidth(torch.device(device))
    found: dict[str, Any] = {"model": model, "device": _name(device), "copy_bytes_per_s": bandwidth, "ways": {}}
    for engine in ("eager", "fast"):
        backbone = load_backbone(model, device=device, dtype="bf16", engine=engine)
        found["weight_bytes"] = backbone.engine.weight_bytes
        found["ceiling_ms"] = 1e3 * backbone.engine.weight_bytes / bandwidth
        for captured in (False, True) if backbone.engine.captures is not False else (False,):
            way = "captured" if captured else engine
            say(f"{model}: {way}")
            try:
                found["ways"][way] = _time(backbone, captured, rows, prefill, rounds)
            except (RuntimeError, torch.AcceleratorError) as reason:
                found["ways"][way] = {"error": first_line(reason)}
        del backbone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def _time(backbone: Backbone, captured: bool, rows: Sequence[int], prefill: int, rounds: int) -> dict[str, Any]:
    """One way's times; the drafter is fresh Medusa heads, which guess badly in the time that trained ones take."""
    heads = MedusaHeads.create(backbone, 4, 1, "own").to(backbone.dtype).eval()
    costs = measure_costs(backbone, heads, rounds=rounds, sizes=rows, captured=captured)
    engine = backbone.engine
    ids = torch.arange(min(prefill, backbone.max_positions - 1)) % backbone.vocab_size
    laps = []
    for _ in range(3):
        start = time.perf_counter()
        engine.forward(Plan.chain(ids), engine.new_cache()).logits.argmax(-1).tolist()
        laps.append(time.perf_counter() - start)
    return {
        "step_ms": {str(count): 1e3 * seconds for count, seconds in costs.verify.items()},
        "draft_ms": {str(depth): 1e3 * seconds for depth, seconds in costs.draft.items()},
        "prefill_ms": 1e3 * min(laps),
        "prefill_tokens": len(ids),
    }


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """The tables as a page of Markdown."""
    lines = ["# Steps by rows at the sizes of real models", ""]
    for one in found:
        ways = one["ways"]
        sizes = sorted({int(count) for way in ways.values() for count in way.get("step_ms", {})})
        lines += [
            f"## {one['model']} on {one['device']}",
            "",
            f"{one['weight_bytes'] / 1e9:.1f} GB of weights at {one['copy_bytes_per_s'] / 1e9:,.0f} GB/s: "
            f"{one['ceiling_ms']:.2f} ms a step at the least. Milliseconds:",
            "",
            "| way | " + " | ".join(f"{count} rows" for count in sizes) + " | drafting 4 levels | prefill |",
            "|---|" + "---|" * (len(sizes) + 2),
        ]
        for name, way in ways.items():
            if "error" in way:
                lines.append(f"| {name} | failed: {way['error']} |")
                continue
            cells = [f"{way['step_ms'].get(str(count), float('nan')):.2f}" for count in sizes]
            drafting = f"{way['draft_ms']['4']:.2f}"
            filled = f"{way['prefill_ms']:.1f} for {way['prefill_tokens']:,}"
            lines.append(f"| {name} | " + " | ".join([*cells, drafting, filled]) + " |")
        lines.append("")
    return "\n".join(lines)
