"""`medusa bench --steps`: every size and engine timed, the ceiling said, bad flags refused."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from medusa_cli.backbone import Backbone
from medusa_cli.benchmarks.rows import ROWS, copy_bandwidth, time_rows
from medusa_cli.cli import app
from tests.runs import save_model
from tests.tiny import tiny_backbone, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("steps") / "model")


def steps(model: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--steps", "--model", model, "--dtype", "fp32", *words])


def test_every_size_of_every_engine_is_timed() -> None:
    done: list[int] = []
    engines = {"eager": tiny_backbone(), "fast": tiny_backbone(engine="fast")}
    found = time_rows(engines, (1, 2, 7), context=9, rounds=2, on_progress=done.append)
    assert list(found) == ["eager", "fast"] and all(list(one) == [1, 2, 7] for one in found.values())
    assert all(seconds > 0 for one in found.values() for seconds in one.values())
    assert len(done) == 4 * 3 * 2
    assert copy_bandwidth(torch.device("cpu")) > 1e8


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_a_step_reads_every_weight_once(family: str, tied: bool) -> None:
    network = tiny_model(family)
    every = sum(one.numel() for one in network.parameters()) * 4
    spared = 0 if tied else network.get_input_embeddings().weight.numel() * 4
    assert Backbone(network).weight_bytes == every - spared


def test_the_command_prints_the_ceiling_and_a_table_or_json(model: str) -> None:
    shown = steps(model, "--context", "20")
    assert shown.exit_code == 0, shown.stderr
    assert "at the least" in shown.stderr and "eager" in shown.stdout and "fast" in shown.stdout
    document = json.loads(steps(model, "--context", "20", "--json", "--engine", "fast").stdout)
    assert list(document["engines"]) == ["fast"] and list(document["engines"]["fast"]) == [str(n) for n in ROWS]
    assert document["ceiling_ms"] > 0 and document["weight_bytes"] > 0


def test_a_context_beyond_the_models_is_refused(model: str, tmp_path: Path) -> None:
    done = steps(model, "--context", "5000")
    assert done.exit_code == 2 and "--context 5000 is longer than the model's 512" in done.stderr
