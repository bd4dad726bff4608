"""`make bench-gpu`: the GPU tests, identity, and times of steps at the sizes of real models, held against the aims.

Weights are random, so a synthetic drafter stands for a trained one: a node holds the model's token by a given chance.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from medusa_cli.decode import Decoder, Request, policy_of
from medusa_cli.decode.step_times import NullDrafter, measure_step_times
from medusa_cli.device import copy_bandwidth, upload
from medusa_cli.drafters import Drafter, MedusaHeads, NewTokens
from medusa_cli.engine import Plan, load_backbone
from medusa_cli.model import Backbone
from medusa_cli.model.load import resolve_device
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.tree import Draft, DynamicTree, Tree

ROWS = (1, 4, 8, 16, 32, 64)
ROUNDS = 9
PREFILL = 1024
HEADS = 4
PROMPT, ANSWER = 64, 128
CHANCES = (0.3, 0.6, 0.8)
# Trees of 16 and 64 nodes, as wide at the top as a search makes them.
TREES = {16: Tree.dense([3, 2, 1]), 64: Tree.dense([9, 2, 1, 1])}
# The aims: a step of 64 nodes in plain steps; a plain step in readings of the weights at a copy's bandwidth.
WIDE_AIM, PLAIN_AIM = 1.10, 1.15
# The factor by which a random model's embeddings are scaled.
LOUD = 500.0
# The budget, and what loading a 7B may take of it.
SECONDS, LOAD_S = 460.0, 60.0
GPU_TESTS = ("tests/test_engine.py", "tests/test_cuda_attention.py")


class Synthetic(NullDrafter):
    """Puts the right token on each node by a chance; the answer is known."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], chance: float) -> None:
        super().__init__()
        self.text, self.chance, self.random = [*prompt, *answer], chance, random.Random(0)

    def draft(
        self,
        backbone: Backbone,
        sequences: Sequence[Drafter],
        new: Sequence[NewTokens],
        tree: Tree | DynamicTree,
    ) -> list[Draft]:
        assert isinstance(tree, Tree)
        drafts = []
        for tokens in new:
            ahead = [*self.text[tokens.end + 1 :], *[0] * (tree.max_depth + 1)]
            ids = [tokens.root]
            for depth in tree.depths[1:]:
                true = self.random.random() < self.chance
                ids.append(ahead[depth - 1] if true else self.random.randrange(backbone.vocab_size))
            drafts.append(Draft(upload(ids, backbone.device), tree))
        return drafts


class Spent(Exception):
    """Says that the budget is spent."""


class Budget:
    """Seconds for all sections; one that does not fit is broken off or skipped, and named."""

    def __init__(self, seconds: float) -> None:
        self._end, self.skipped = time.perf_counter() + seconds, list[str]()

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()

    def check(self, *_: object) -> None:
        if self.left <= 0:
            raise Spent

    def run(self, section: str, work: Callable[[], Any], least: float = 0.0) -> Any:
        """Returns what a section returns, None if fewer than `least` seconds are left or it is broken off."""
        try:
            if self.left > least:
                return work()
        except Spent:
            pass
        self.skipped.append(section)
        return None


def time_model(
    model: str, device: str, budget: Budget, graphs: bool | None = None
) -> dict[str, Any]:
    """Returns step, draft and prefill times of a model by engine: torch, where steps are captured "graph", and eager.

    One that fails holds its error instead. ceiling_ms: reading the weights once at the bandwidth of a copy. graphs:
    None where the device captures them.
    """
    bandwidth = copy_bandwidth(torch.device(device))
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    result: dict[str, Any] = {
        "model": model,
        "device": name,
        "copy_bytes_per_s": bandwidth,
        "engines": {},
    }
    for engine in ("torch", "eager"):
        load = partial(
            load_backbone, model, LoadOptions(device=device, dtype="bf16", engine=engine)
        )
        backbone = budget.run(f"{model} {engine}", load, LOAD_S)
        if backbone is None:
            continue
        decide(backbone)
        weights = backbone.engine.weight_bytes
        result |= {"weight_bytes": weights, "ceiling_ms": 1e3 * weights / bandwidth}
        captured = engine == "torch" and (
            backbone.engine.captures is not False if graphs is None else graphs
        )
        result["by_length"] = backbone.engine.by_length or result.get("by_length", False)
        for cuda_graphs in (True, False) if captured else (False,):
            kind = "graph" if cuda_graphs else engine
            try:
                times = budget.run(
                    f"{model} {kind} steps", partial(time_engine, backbone, cuda_graphs, budget)
                )
                if times is not None and engine == "torch":
                    drafts = budget.run(
                        f"{model} {kind} drafts",
                        partial(time_drafts, backbone, cuda_graphs, budget),
                    )
                    times["synthetic"] = drafts or []
            except (RuntimeError, torch.AcceleratorError) as reason:
                times = {"error": str(reason).splitlines()[0]}
            if times is not None:
                result["engines"][kind] = times
        del backbone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return result


@torch.no_grad()
def decide(backbone: Backbone) -> None:
    """Makes the successor of each token certain.

    Random weights leave near-ties, which one row and the rows of a tree round differently. Answers
    would then part, and all later drafts would be wrong.
    """
    embedding = backbone.embedding.weight
    embedding.mul_(LOUD)  # the layers add little to it
    backbone.lm_head_weight.copy_(embedding.roll(1, 0))


def time_engine(backbone: Backbone, cuda_graphs: bool, budget: Budget) -> dict[str, Any]:
    """Times one engine's steps by rows, drafts of fresh Medusa heads, which guess as fast as trained ones, prefill."""
    heads = MedusaHeads.create(backbone, HEADS, 1, "own").to(backbone.dtype).eval()
    backbone.engine.captures = cuda_graphs
    measure = partial(measure_step_times, rounds=ROUNDS, show=budget.check)
    verify, costs = (
        measure(backbone, NullDrafter(), sizes=ROWS).verify,
        measure(backbone, heads, sizes=(1, 16)),
    )
    # A graph drafts within the step.
    drafting = costs.draft[HEADS] + max(0.0, costs.verify[16] - verify[16])
    ids = torch.arange(min(PREFILL, backbone.max_positions - 1)) % backbone.vocab_size
    laps = []
    for _ in range(3):
        budget.check()
        start = time.perf_counter()
        backbone.engine.forward(Plan.chain(ids), backbone.engine.new_cache()).logits.argmax(
            -1
        ).tolist()
        laps.append(time.perf_counter() - start)
    return {
        "step_ms": {rows: 1e3 * seconds for rows, seconds in verify.items()},
        "draft_ms": 1e3 * drafting,
        "prefill_ms": 1e3 * min(laps),
        "prefill_tokens": len(ids),
    }


def time_drafts(backbone: Backbone, cuda_graphs: bool, budget: Budget) -> list[dict[str, Any]]:
    """Decodes with synthetic drafts by nodes and chance; returns tokens per step, tokens a second and the same tokens.

    "same" counts the first tokens that plain decoding gives, too.
    """
    prompt = [i * 37 % backbone.vocab_size for i in range(min(PROMPT, backbone.max_positions // 4))]
    plain, plain_rate, _ = decode(backbone, None, None, prompt, cuda_graphs, budget)
    results = [
        {
            "nodes": 1,
            "chance": 0.0,
            "tokens_per_step": 1.0,
            "tokens_per_s": plain_rate,
            "same": len(plain),
        }
    ]
    for nodes, tree in TREES.items():
        for chance in CHANCES:
            drafter = Synthetic(prompt, plain, chance)
            answer, rate, length = decode(backbone, drafter, tree, prompt, cuda_graphs, budget)
            same = next(
                (i for i, (a, b) in enumerate(zip(answer, plain, strict=True)) if a != b),
                len(plain),
            )
            results.append(
                {
                    "nodes": nodes,
                    "chance": chance,
                    "tokens_per_step": length,
                    "tokens_per_s": rate,
                    "same": same,
                }
            )
    return results


def decode(
    backbone: Backbone,
    drafter: Drafter | None,
    tree: Tree | None,
    prompt: list[int],
    cuda_graphs: bool,
    budget: Budget,
) -> tuple[list[int], float, float]:
    """Returns an answer's tokens, tokens a second and tokens per step, both without the prompt's pass."""
    decoder = Decoder(
        backbone, drafter, None if tree is None else policy_of(tree), cuda_graphs=cuda_graphs
    )
    count = min(ANSWER, backbone.max_positions - len(prompt) - 8)
    sequence, first = decoder.admit(Request(prompt, count, stop_ids=()))
    tokens, steps, start = list(first.tokens), 0, time.perf_counter()
    while not sequence.done:
        budget.check()
        tokens += decoder.step()[0][1].tokens
        steps += 1
    return tokens, (len(tokens) - 1) / (time.perf_counter() - start), (len(tokens) - 1) / steps


def aims_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the aims for a model's fastest engine, the values measured, and if they hold."""
    engine = next((engine for engine in ("graph", "torch") if engine in result["engines"]), None)
    if engine is None:
        return []
    times = result["engines"][engine]
    if "error" in times:
        return [
            {
                "aim": f"{engine} steps run",
                "model": result["model"],
                "holds": False,
                "value": times["error"],
            }
        ]
    step = times["step_ms"]
    values = {
        f"a step of 64 nodes takes at most {WIDE_AIM} plain steps": (
            step.get(64, float("inf")) / step[1],
            WIDE_AIM,
        ),
        f"a plain step takes at most {PLAIN_AIM} readings of the weights": (
            step[1] / result["ceiling_ms"],
            PLAIN_AIM,
        ),
    }
    return [
        {"aim": aim, "model": result["model"], "value": value, "holds": value <= limit}
        for aim, (value, limit) in values.items()
    ]


def table(document: dict[str, Any]) -> str:
    """Returns all results as one table in Markdown: a line an engine of a model."""
    drafts = [f"{nodes} at {chance}" for nodes in TREES for chance in CHANCES]
    head = [
        "model",
        "engine",
        *(f"{rows} rows" for rows in ROWS),
        "drafting",
        "prefill",
        "plain tokens/s",
        *drafts,
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for result in document["results"]:
        for engine, times in result["engines"].items():
            if "error" in times:
                cells = [times["error"]]
            else:
                milliseconds = [
                    *(times["step_ms"].get(rows) for rows in ROWS),
                    times["draft_ms"],
                    times["prefill_ms"],
                ]
                cells = ["" if ms is None else f"{ms:.2f}" for ms in milliseconds]
                cells += [f"{draft['tokens_per_s']:.1f}" for draft in times.get("synthetic", ())]
            cells += [""] * (len(head) - 2 - len(cells))
            lines.append(f"| {result['model']} | {engine} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(
    models: Sequence[str], device: str, output: Path, seconds: float, graphs: bool | None = None
) -> None:
    """Measures models within so many seconds, writes one document after each, and prints it as a table at the end."""
    budget, output = Budget(seconds), output / "steps.json"
    document: dict[str, Any] = {
        "seconds": seconds,
        "results": [],
        "aims": [],
        "skipped": budget.skipped,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    if device.startswith("cuda"):
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *GPU_TESTS]
        try:
            passed = subprocess.run(command, check=False, timeout=budget.left / 2).returncode == 0
            document["aims"].append({"aim": "the GPU tests pass", "holds": passed})
        except subprocess.TimeoutExpired:
            budget.skipped.append("the GPU tests")
    for model in models:
        result = time_model(model, device, budget, graphs)
        document["results"].append(result)
        document["aims"] += aims_of(result)
        output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"Milliseconds; tokens/s by nodes and chance of a synthetic draft\n\n{table(document)}\n")
    for aim in document["aims"]:
        value = (
            f"{aim['value']:.3f}" if isinstance(aim.get("value"), float) else aim.get("value", "")
        )
        print(
            f"{'holds' if aim['holds'] else 'FAILS'}: {aim.get('model', '')} {aim['aim']} {value}"
        )
    for section in budget.skipped:
        print(f"skipped, {seconds:.0f} s were spent: {section}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="random:1b,random:llama-2-7b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=Path("build/bench-gpu"))
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="what does not fit is skipped and named"
    )
    asked = parser.parse_args()
    run(asked.models.split(","), resolve_device(asked.device), asked.output, asked.seconds)


if __name__ == "__main__":
    main()
