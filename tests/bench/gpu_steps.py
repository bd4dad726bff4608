"""`make bench-gpu`: milliseconds of whole steps by rows at the sizes of real models, with random weights."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from medusa_cli.bench.steps import copy_bandwidth
from medusa_cli.decode.costs import measure_costs
from medusa_cli.drafters import MedusaHeads
from medusa_cli.engine import Plan, load_backbone
from medusa_cli.model import Backbone
from medusa_cli.model.load import resolve_device
from medusa_cli.runs.resolve import LoadOptions

ROWS = (1, 4, 8, 16, 32, 64)
ROUNDS = 9
PREFILL = 1024
HEADS = 4


def time_model(model: str, device: str) -> dict[str, Any]:
    """Returns step, draft and prefill times of a model by engine: eager, fast and, where steps are captured, "graph".

    One that fails holds its error instead. ceiling_ms: reading the weights once at the bandwidth of a copy.
    """
    bandwidth = copy_bandwidth(torch.device(device))
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    result: dict[str, Any] = {"model": model, "device": name, "copy_bytes_per_s": bandwidth, "engines": {}}
    for engine in ("eager", "fast"):
        backbone = load_backbone(model, LoadOptions(device=device, dtype="bf16", engine=engine))
        weights = backbone.engine.weight_bytes
        result |= {"weight_bytes": weights, "ceiling_ms": 1e3 * weights / bandwidth}
        for captured in (False, True) if backbone.engine.captures is not False else (False,):
            try:
                times = time_engine(backbone, captured)
            except (RuntimeError, torch.AcceleratorError) as reason:
                times = {"error": str(reason).splitlines()[0]}
            result["engines"]["graph" if captured else engine] = times
        del backbone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return result


def time_engine(backbone: Backbone, captured: bool) -> dict[str, Any]:
    """Times one engine under fresh Medusa heads, which guess badly in the time that trained ones take."""
    heads = MedusaHeads.create(backbone, HEADS, 1, "own").to(backbone.dtype).eval()
    costs = measure_costs(backbone, heads, rounds=ROUNDS, sizes=ROWS, cuda_graphs=captured)
    ids = torch.arange(min(PREFILL, backbone.max_positions - 1)) % backbone.vocab_size
    laps = []
    for _ in range(3):
        start = time.perf_counter()
        backbone.engine.forward(Plan.chain(ids), backbone.engine.new_cache()).logits.argmax(-1).tolist()
        laps.append(time.perf_counter() - start)
    return {
        "step_ms": {rows: 1e3 * seconds for rows, seconds in costs.verify.items()},
        "draft_ms": {depth: 1e3 * seconds for depth, seconds in costs.draft.items()},
        "prefill_ms": 1e3 * min(laps),
        "prefill_tokens": len(ids),
    }


def show(result: dict[str, Any]) -> None:
    """Prints the times of a model, one line an engine."""
    weights = f"{result['weight_bytes'] / 1e9:.1f} GB of weights"
    print(
        f"{result['model']} on {result['device']}; reading {weights} takes {result['ceiling_ms']:.2f} ms; ms by rows:"
    )
    for engine, times in result["engines"].items():
        if "error" in times:
            print(f"  {engine}: failed: {times['error']}")
            continue
        steps = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in times["step_ms"].items())
        prefill = f"prefill {times['prefill_ms']:.1f} for {times['prefill_tokens']:,} tokens"
        print(f"  {engine}: {steps}; drafting {HEADS} levels {times['draft_ms'][HEADS]:.2f}; {prefill}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="random:1b,random:llama-2-7b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=Path("build/bench-gpu"))
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    results = []
    for model in asked.models.split(","):
        results.append(time_model(model, resolve_device(asked.device)))
        # Written after each model: a later one may fail.
        (asked.output / "steps.json").write_text(json.dumps(results, indent=1) + "\n")
        show(results[-1])


if __name__ == "__main__":
    main()
