"""`medusa bench --steps`: every size and engine timed, bad flags refused."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from medusa_cli.bench.steps import ROWS, copy_bandwidth, time_rows
from medusa_cli.engine import attach
from medusa_cli.engine.kernels import Kernel
from medusa_cli.model import Backbone, random_model
from tests.bench import gpu_steps
from tests.helpers import medusa, save_run, tiny_backbone, tiny_model


def steps(model: str, contexts: str, *words: str) -> Result:
    return medusa("bench", "--steps", contexts, "--model", model, "--dtype", "fp32", *words)


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_every_size_is_timed(engine: str) -> None:
    times = time_rows(tiny_backbone(engine=engine), (1, 2, 7), context=9, rounds=2)
    assert list(times["step_ms"]) == ["1", "2", "7"] and min(times["prefill_s"], *times["step_ms"].values()) > 0
    # Two layers, keys and values, two key heads, 9 + 7 positions, 8 wide, fp32; the fast engine's cache has blocks.
    exact = 2 * 2 * 2 * 16 * 8 * 4
    assert times["cache_bytes"] == exact if engine == "eager" else times["cache_bytes"] >= exact
    assert copy_bandwidth(torch.device("cpu")) > 1e8


def test_a_random_model_of_a_named_shape_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(random_model.SHAPES, "small", (64, 32, 64, 2, 4, 2, 128))
    document = json.loads(steps("random:small", "20", "--json").stdout)
    assert document["model"] == "random:small" and document["dtype"] == "float32"
    refused = steps("random:huge", "20")
    assert refused.exit_code == 2 and "huge" in refused.stderr


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_a_step_reads_every_weight_once(family: str, tied: bool) -> None:
    network = tiny_model(family)
    every = sum(weight.numel() for weight in network.parameters()) * 4
    spared = 0 if tied else network.get_input_embeddings().weight.numel() * 4
    backbone = Backbone(network)
    assert attach(backbone).weight_bytes == every - spared
    # The fast engine counts the matrices that its products read, and neither gains nor biases.
    vectors = sum(weight.numel() for weight in network.parameters() if weight.dim() == 1) * 4
    assert attach(backbone, "fast", Kernel("fp32")).weight_bytes == every - spared - vectors


def test_the_command_prints_a_table_or_json(model: str) -> None:
    shown = steps(model, "20")
    assert shown.exit_code == 0 and "eager" in shown.stdout and "fast" in shown.stdout, shown.stderr
    document = json.loads(steps(model, "440,20", "--json", "--engine", "fast").stdout)
    assert list(document["contexts"]) == ["20", "440"] and list(document["contexts"]["440"]) == ["fast"]
    small, large = (document["contexts"][size]["fast"] for size in ("20", "440"))
    assert list(small["step_ms"]) == [str(n) for n in ROWS] and small["cache_bytes"] < large["cache_bytes"]
    assert document["ceiling_ms"] > 0 and document["weight_bytes"] > 0


def test_a_run_names_the_model(model: str, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", model, tree=None)
    words = ["bench", "--steps", "9", "--run", str(run.path), "--engine", "eager", "--dtype", "fp32"]
    shown = medusa(*words, "--json")
    assert shown.exit_code == 0 and json.loads(shown.stdout)["model"] == model


def test_the_longest_context_is_timed(model: str) -> None:
    assert steps(model, "509", "--engine", "eager", "--json").exit_code == 0


def test_bench_gpu_runs_from_end_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run on the CPU; captured steps run as they are."""
    monkeypatch.setitem(random_model.SHAPES, "small", (256, 32, 64, 2, 4, 2, 256))
    monkeypatch.setattr(gpu_steps, "ROUNDS", 1)
    monkeypatch.setattr(gpu_steps, "ANSWER", 24)
    monkeypatch.setattr(gpu_steps, "copy_bandwidth", lambda device: 1e10)
    gpu_steps.run(["random:small"], "cpu", tmp_path, 400.0, graphs=True)
    document = json.loads((tmp_path / "steps.json").read_text())
    (result,) = document["results"]
    assert set(result["engines"]) == {"eager", "fast", "graph"} and len(document["aims"]) == 2
    for engine in ("fast", "graph"):
        synthetic = result["engines"][engine]["synthetic"]
        assert [draft["nodes"] for draft in synthetic] == [1, *[16] * 3, *[64] * 3]
        assert synthetic[-1]["tokens_per_step"] > 2
    lines = capsys.readouterr().out.splitlines()
    assert {line.count("|") for line in lines if line.startswith("|")} == {18} and not document["skipped"]


@pytest.mark.parametrize("seconds", [0.0, 70.0])
def test_bench_gpu_keeps_its_budget_and_names_what_it_skips(
    seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(random_model.SHAPES, "small", (256, 32, 64, 2, 4, 2, 256))
    monkeypatch.setattr(gpu_steps, "copy_bandwidth", lambda device: 1e10)
    # A clock that runs a second at each look.
    monkeypatch.setattr(gpu_steps.time, "perf_counter", itertools.count().__next__)
    gpu_steps.run(["random:small"], "cpu", tmp_path, seconds, graphs=True)
    document, text = json.loads((tmp_path / "steps.json").read_text()), capsys.readouterr().out
    assert document["skipped"] and all(section in text for section in document["skipped"])
    assert not any(document["results"][0]["engines"].values())
