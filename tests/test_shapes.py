"""Steps at the sizes of real models: every way is measured, and one that fails does not cost the others."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_cli.backbone import blank
from medusa_cli.benchmarks import shapes
from medusa_cli.cli import app

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blank.SHAPES, "small", SMALL)
    monkeypatch.setattr(shapes, "ROUNDS", 1)


def test_every_way_is_timed_and_written(tmp_path: Path) -> None:
    words = ["bench-gpu", "--shapes", "random:small", "--device", "cpu", "--output", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    (one,) = json.loads(done.stdout)
    assert set(one["ways"]) == {"eager", "fast"} and one["ceiling_ms"] > 0
    for way in one["ways"].values():
        assert way["step_ms"]["1"] > 0 and way["prefill_tokens"] == 511 and len(way["draft_ms"]) == 4
    assert json.loads((tmp_path / "steps.json").read_text())["shapes"] == [one]
    page = (tmp_path / "steps.md").read_text()
    assert "| eager |" in page and "| fast |" in page and "random:small on cpu" in page


def test_a_way_that_fails_is_named_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = shapes._time

    def sometimes(backbone, *rest):
        if backbone.engine.name == "fast":
            raise RuntimeError("no kernel image is available\nmore")
        return inner(backbone, *rest)

    monkeypatch.setattr(shapes, "_time", sometimes)
    found = shapes.time_shape("random:small", "cpu", rows=(1, 4), prefill=16, rounds=1)
    assert found["ways"]["fast"] == {"error": "no kernel image is available"}
    assert found["ways"]["eager"]["step_ms"]["4"] > 0
    assert "failed: no kernel image is available" in shapes.markdown([found])
