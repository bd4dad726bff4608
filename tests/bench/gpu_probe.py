"""Measures on a GPU what its open questions hang on, the most telling first; prints a JSON line for each.

Sections have limits of their own, and whatever one has reached is kept. With --smoke, all of them run on a CPU at tiny
shapes, by the kernels' plain twins, and their times mean nothing. Nothing changes the GPU's settings.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.decode import Decoder, DraftPolicy, Request, policy_of
from medusa_cli.decode.policy import DynamicTreePolicy
from medusa_cli.decode.step_times import NullDrafter, measure_step_times
from medusa_cli.device import best_time, copy_bandwidth, event_time
from medusa_cli.drafters import MedusaHeads
from medusa_cli.engine import load_backbone, plain_kernels
from medusa_cli.engine.exact import ExactPath, difference
from medusa_cli.engine.tiles import Tiles
from medusa_cli.engine.torch_layers import TorchEngine
from medusa_cli.model import Backbone
from medusa_cli.native import Format, PackedMatrix
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.tree import DynamicTree, Tree
from tests.bench.gpu_steps import HEADS, TREES, Budget, Spent, Synthetic
from tests.helpers import tiny_backbone
from tests.test_native import random_matrix

# Seconds in all, and of each section.
SECONDS = 540.0
LIMITS = {
    "unit": 15,
    "identity": 120,
    "products": 60,
    "tiles": 30,
    "profile": 60,
    "steps": 120,
    "long": 60,
}
MODELS = {"1b": "random:1b", "7b": "random:llama-2-7b"}
ROWS = (1, 8, 16, 64)
COUNTS = (1, 2, 7, 8, 16, 33, 64, 256)
PLACES = (1, 6, 31, 63)
COLUMNS = (256, 4096, 16_384)
# Replays of a timed graph, and kernels of a chain of launches.
REPLAYS = 20
LAUNCHES = 1000
# The aims, in readings of the weights or in plain steps.
AIMS = {"1b": (1.60, 1.20), "7b": (1.30, 1.10)}
LONG_AIM = 1.15
# The exact path is the default if it costs no more than this.
EXACT_COST = 1.05
CHANCE = 0.6
PATHS = ("today", "exact")


class Report:
    """Writes the lines of all sections to a file after each one, and prints them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []

    def line(self, section: str, **facts: Any) -> None:
        self.lines.append({"section": section, **facts})
        self._path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        print(json.dumps(self.lines[-1]), flush=True)

    def of(self, section: str, **wanted: Any) -> list[dict[str, Any]]:
        """Returns the lines of a section that hold these values."""
        lines = [line for line in self.lines if line["section"] == section]
        return [line for line in lines if all(line.get(key) == wanted[key] for key in wanted)]


class Lab:
    """Holds the device and the models, each loaded once."""

    def __init__(self, smoke: bool, device: str) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else device)
        self.models = {"1b": "tiny"} if smoke else MODELS
        self.rows = (1, 8) if smoke else ROWS
        self.rounds = 1 if smoke else 3
        self.bandwidth = 0.0
        self._loaded: dict[str, Backbone] = {}
        self.kernels: Any = plain_kernels
        if not smoke:
            from medusa_cli.engine import kernels

            self.kernels = kernels

    def model(self, name: str) -> Backbone:
        """Returns a model; the one before it is freed."""
        if name not in self._loaded:
            self._loaded.clear()
            if self.smoke:
                self._loaded[name] = tiny_backbone(engine="torch")
            else:
                options = LoadOptions(device=str(self.device), dtype="bf16", engine="torch")
                self._loaded[name] = load_backbone(self.models[name], options)
        return self._loaded[name]

    def choose(self, backbone: Backbone, path: str) -> TorchEngine:
        """Lets a model's steps take the exact path or today's."""
        engine = backbone.engine
        assert isinstance(engine, TorchEngine)
        engine.exact = ExactPath(engine, self.kernels) if path == "exact" else None
        return engine

    def seconds(self, work: Callable[[], Any]) -> float:
        """Returns the time of a computation within a CUDA graph, in a chain of replays."""
        work()
        if self.device.type == "cpu":
            return best_time(self.device, work, 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPLAYS):
                work()
        return event_time(self.device, graph.replay) / REPLAYS


def unit(lab: Lab) -> Iterator[dict[str, Any]]:
    """Times a reading's unit, and what a launch costs within a graph."""
    lab.bandwidth = copy_bandwidth(lab.device)
    yield {"copy_bytes_per_s": lab.bandwidth}
    for size in (1, 4096):
        x = torch.zeros(size, device=lab.device)
        count = 10 if lab.smoke else LAUNCHES
        seconds = lab.seconds(partial(add_often, x, count))
        yield {"floats": size, "us_per_kernel": 1e6 * seconds / count}


def add_often(x: Tensor, count: int) -> None:
    for _ in range(count):
        x.add_(1)


def products(lab: Lab) -> Iterator[dict[str, Any]]:
    """Times the matmuls of each model by torch and by our kernel, and compares a row's bits by rows and by place."""
    ways = {"torch": F.linear, "ours": lab.kernels.matmul}
    for name in lab.models:
        layer = lab.choose(lab.model(name), "today").layers[0]
        for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
            weight = matrix.weight
            # Copies of more than the L2 cache holds take turns.
            weights = [weight] if lab.smoke else [weight.clone() for _ in range(4)]
            x = torch.randn(COUNTS[-1], weight.shape[1], device=lab.device).to(weight.dtype)
            for way, multiply in ways.items():
                facts = {"model": name, "shape": list(weight.shape), "way": way}
                facts |= same_bits(partial(multiply, weight=weight), x)
                for rows in lab.rows:
                    seconds = lab.seconds(partial(multiply_each, multiply, x[:rows], weights))
                    yield {**facts, "rows": rows, "us": 1e6 * seconds / len(weights)}


def multiply_each(
    multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]
) -> None:
    for weight in weights:
        multiply(x, weight)


def same_bits(multiply: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, bool]:
    """Returns if a row has the same bits among any number of rows, and at any place of 64."""
    whole = multiply(x)
    few = multiply(x[:64])
    by_rows = (torch.equal(multiply(x[:rows]), whole[..., :rows, :]) for rows in COUNTS)
    by_place = (torch.equal(multiply(x[:64].roll(n, 0)), few.roll(n, -2)) for n in PLACES)
    return {"same_by_rows": all(by_rows), "same_by_place": all(by_place)}


def tiles(lab: Lab) -> Iterator[dict[str, Any]]:
    """Times matmuls of quantized weights, and compares their bits with those of the native engine."""
    count, depth = (64, 256) if lab.smoke else (4096, 4096)
    x = torch.randn(COUNTS[-1], depth)
    for format in (Format.Q4_K, Format.Q6_K, Format.Q8_0):
        packed = PackedMatrix.pack(random_matrix(format, count, depth), None, int8_rows=True)
        # Copies of more than the L2 cache holds take turns.
        copies = [Tiles.of(packed, lab.device) for _ in range(1 if lab.smoke else 8)]
        rounded = x.to(lab.device)
        ours = lab.kernels.tile_matmul(rounded, copies[:1]).cpu()
        facts = {
            "format": format.name,
            "shape": [count, depth],
            "native_bits": torch.equal(ours, torch.from_numpy(packed.multiply(x.numpy()))),
        }
        for rows in lab.rows:
            work = partial(lab.kernels.tile_matmul, rounded[:rows], copies)
            yield {**facts, "rows": rows, "us": 1e6 * lab.seconds(work) / len(copies)}


def profile(lab: Lab) -> Iterator[dict[str, Any]]:
    """Counts the kernels of a replayed step and sums their times, today and on the exact path."""
    if lab.device.type == "cpu":
        return
    from torch.profiler import ProfilerActivity

    for name in lab.models:
        backbone = lab.model(name)
        for path in PATHS:
            lab.choose(backbone, path)
            for rows in (1, 64):
                decoder = Decoder(backbone, None, policy_of(Tree.root_only()), cuda_graphs=True)
                graphs = decoder.cuda_graphs
                assert graphs is not None
                step = graphs._step(1, rows, False)
                step._run_again()
                with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as record:
                    step._run_again()
                    torch.cuda.synchronize()
                times = {
                    event.key[:60]: (event.count, event.self_device_time_total)
                    for event in record.key_averages()
                }
                longest = sorted(times, key=lambda key: -times[key][1])[:12]
                yield {
                    "model": name,
                    "path": path,
                    "rows": rows,
                    "kernels": sum(count for count, _ in times.values()),
                    "busy_ms": sum(us for _, us in times.values()) / 1e3,
                    "longest": {key: times[key] for key in longest},
                }


def steps(lab: Lab) -> Iterator[dict[str, Any]]:
    """Times steps by path and rows, plain and drafted by Medusa heads."""
    for name in lab.models:
        backbone = lab.model(name)
        weights = backbone.engine.weight_bytes
        heads = MedusaHeads.create(backbone, HEADS, 1, "own").to(backbone.dtype).eval()
        for path in PATHS:
            lab.choose(backbone, path).captures = not lab.smoke
            times = measure_step_times(backbone, NullDrafter(), rounds=lab.rounds, sizes=lab.rows)
            for rows, seconds in times.verify.items():
                yield {
                    "model": name,
                    "path": path,
                    "rows": rows,
                    "ms": 1e3 * seconds,
                    "readings": seconds * lab.bandwidth / weights,
                }
            drafted = measure_step_times(backbone, heads, rounds=lab.rounds, sizes=lab.rows[-1:])
            yield {
                "model": name,
                "path": path,
                "drafter": "medusa",
                "verify_ms": {rows: 1e3 * s for rows, s in drafted.verify.items()},
                "draft_ms": {levels: 1e3 * s for levels, s in drafted.draft.items()},
            }


def long_texts(lab: Lab) -> Iterator[dict[str, Any]]:
    """Times plain steps after longer texts."""
    for name in list(lab.models)[:1]:
        backbone = lab.model(name)
        for path in PATHS:
            lab.choose(backbone, path).captures = not lab.smoke
            for columns in COLUMNS[:1] if lab.smoke else COLUMNS:
                if columns + 64 > backbone.max_positions:
                    continue
                times = measure_step_times(
                    backbone,
                    NullDrafter(),
                    context=columns,
                    rounds=lab.rounds,
                    sizes=(1, lab.rows[-1]),
                )
                ms = {rows: 1e3 * seconds for rows, seconds in times.verify.items()}
                yield {"model": name, "path": path, "columns": times.context, "ms": ms}


def identity(lab: Lab) -> Iterator[dict[str, Any]]:
    """Compares greedy answers over trees with plain ones; today's path is to part, or the test is blind.

    The logits of random weights are flat, so near-ties are frequent.
    """
    backbone = lab.model("1b")
    engine = lab.choose(backbone, "exact")
    yield {"probe": difference(engine) or "exact"}
    prompts, count = (1, 6) if lab.smoke else (4, 256)
    requests = [
        Request(
            [(i * 37 + 11 * n) % backbone.vocab_size for i in range(64 + n)], count, stop_ids=()
        )
        for n in range(prompts)
    ]
    policies: dict[str, DraftPolicy] = {
        "chain of 4": policy_of(Tree.chain(4)),
        **{f"{nodes} nodes": policy_of(tree) for nodes, tree in TREES.items()},
        "dynamic": DynamicTreePolicy(DynamicTree(64, HEADS)),
    }
    heads = MedusaHeads.create(backbone, HEADS, 1, "own").to(backbone.dtype).eval()
    for path in PATHS:
        lab.choose(backbone, path).captures = not lab.smoke
        plain = [answers(backbone, [request], None, None, 1)[0] for request in requests]
        for tree, policy in policies.items():
            if tree == "dynamic":
                for slots in (1,) if lab.smoke else (1, 4, 8):
                    drafted = answers(backbone, requests, heads, policy, slots)
                    yield compared(path, tree, slots, drafted, plain)
            else:
                drafted = [
                    answers(backbone, [request], Synthetic(request.prompt, own, CHANCE), policy, 1)[
                        0
                    ]
                    for request, own in zip(requests, plain, strict=True)
                ]
                yield compared(path, tree, 1, drafted, plain)


def answers(
    backbone: Backbone, requests: Sequence[Request], drafter: Any, policy: Any, slots: int
) -> list[list[int]]:
    """Returns the tokens of each answer."""
    graphs = backbone.device.type == "cuda"
    decoder = Decoder(backbone, drafter, policy, slots=slots, cuda_graphs=graphs)
    tokens: list[list[int]] = [[] for _ in requests]
    for sequence, step in decoder.run(requests):
        tokens[sequence.number] += step.tokens
    return tokens


def compared(
    path: str, tree: str, slots: int, drafted: list[list[int]], plain: list[list[int]]
) -> dict[str, Any]:
    """Returns the share of the tokens before which an answer and the plain one do not part."""
    same = sum(
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
        for pair in zip(drafted, plain, strict=True)
    )
    equal = same / sum(map(len, plain))
    return {"path": path, "tree": tree, "slots": slots, "equal": equal}


def decisions(lab: Lab, report: Report) -> Iterator[dict[str, Any]]:
    """Says what the lines mean for docs and defaults."""
    drafted = report.of("identity", path="exact")
    if drafted:
        yield {"exact answers are plain ones": all(line["equal"] == 1 for line in drafted)}
        control = report.of("identity", path="today")
        yield {"today's path parts, as it must": any(line["equal"] < 1 for line in control)}
    ours = report.of("products", way="ours")
    if ours:
        exact = all(line["same_by_rows"] and line["same_by_place"] for line in ours)
        yield {"our matmul gives a row the same bits everywhere": exact}
        theirs = report.of("products", way="torch", rows=lab.rows[-1])
        cost = sum(line["us"] for line in report.of("products", way="ours", rows=lab.rows[-1]))
        yield {"our matmuls over torch's, at most rows": cost / sum(line["us"] for line in theirs)}
    quantized = report.of("tiles")
    if quantized:
        same = all(line["native_bits"] for line in quantized)
        yield {"matmuls of quantized weights have the native engine's bits": same}
    for name, (plain_aim, wide_aim) in AIMS.items():
        lines = [line for line in report.of("steps", model=name) if "rows" in line]
        ms = {(line["path"], line["rows"]): line for line in lines}
        wide = lab.rows[-1]
        for path in PATHS:
            if (path, 1) in ms and (path, wide) in ms:
                plain = ms[path, 1]
                ratio = ms[path, wide]["ms"] / plain["ms"]
                yield {
                    f"{name} {path}: a plain step in readings": plain["readings"],
                    "aim": plain_aim,
                    "holds": plain["readings"] <= plain_aim,
                }
                yield {
                    f"{name} {path}: {wide} rows in plain steps": ratio,
                    "aim": wide_aim,
                    "holds": ratio <= wide_aim,
                }
        if {("exact", wide), ("today", wide)} <= ms.keys():
            cost = max(ms["exact", n]["ms"] / ms["today", n]["ms"] for n in (1, wide))
            yield {f"{name}: the exact path costs": cost, "is the default": cost <= EXACT_COST}
    for path in PATHS:
        columns = {line["columns"]: line["ms"][1] for line in report.of("long", path=path)}
        if len(columns) > 1:
            ratio = columns.get(COLUMNS[1], 0.0) / columns[min(columns)]
            yield {f"{path}: 4,096 columns over 256": ratio, "holds": ratio <= LONG_AIM}


SECTIONS: dict[str, Callable[[Lab], Iterator[dict[str, Any]]]] = {
    "unit": unit,
    "identity": identity,
    "products": products,
    "tiles": tiles,
    "profile": profile,
    "steps": steps,
    "long": long_texts,
}


def run(lab: Lab, output: Path, seconds: float, only: Sequence[str] = ()) -> Report:
    """Runs the sections within so many seconds, and returns their lines."""
    output.mkdir(parents=True, exist_ok=True)
    report, whole = Report(output / "probe.jsonl"), Budget(seconds)
    name = "cpu" if lab.device.type == "cpu" else torch.cuda.get_device_name(lab.device)
    triton = importlib.util.find_spec("triton") is not None
    report.line("machine", device=name, torch=torch.__version__, triton=triton)
    for section, measure in SECTIONS.items():
        if only and section not in only:
            continue
        limit = whole.left if lab.smoke else min(LIMITS[section], whole.left)
        budget, started = Budget(limit), time.perf_counter()
        try:
            for facts in measure(lab):
                report.line(section, **facts)
                budget.check()
            ended = "done"
        except Spent:
            ended = "its time is spent"
        # An error ends a section, not the run.
        except Exception as reason:
            ended = f"{type(reason).__name__}: {reason}"
        report.line("end", of=section, ended=ended, s=time.perf_counter() - started)
    for decision in decisions(lab, report):
        report.line("decision", **decision)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--output", type=Path, default=Path("build/probe-gpu"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=[*SECTIONS, "tests"], default=[])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    asked = parser.parse_args()
    run(Lab(asked.smoke, asked.device), asked.output, asked.seconds, asked.only)
    if not asked.smoke and (not asked.only or "tests" in asked.only):
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
        subprocess.run(command, check=False, timeout=120)


if __name__ == "__main__":
    main()
