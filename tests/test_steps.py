"""`medusa bench --steps`: every size and engine timed, the ceiling said, bad flags refused."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from medusa_cli.backbone import Backbone, blank
from medusa_cli.backbone.memory import peak_memory, reset_peak
from medusa_cli.benchmarks.rows import ROWS, copy_bandwidth, time_rows
from medusa_cli.cli import app
from medusa_cli.engines import attach
from medusa_cli.engines.kernels import Packed
from tests.runs import save_model, save_run
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
    assert list(found) == ["eager", "fast"] and all(list(one.seconds) == [1, 2, 7] for one in found.values())
    assert all(seconds > 0 for one in found.values() for seconds in (one.prefill_s, *one.seconds.values()))
    # Two layers, keys and values, two key heads, 9 + 7 positions, 8 wide, fp32.
    assert [one.cache_bytes for one in found.values()] == 2 * [2 * 2 * 2 * 16 * 8 * 4]
    assert len(done) == 4 * 3 * 2
    assert copy_bandwidth(torch.device("cpu")) > 1e8


def test_the_peak_is_what_was_held_since_the_last_reset() -> None:
    place = torch.device("cpu")
    reset_peak(place)
    before = peak_memory(place)
    held = torch.ones(50_000_000)  # 200 MB
    peak = peak_memory(place)
    del held
    assert before > 1e7 and peak > before + 1e8
    assert peak_memory(place) == pytest.approx(peak, rel=0.01)  # the kernel counts in batches
    if Path("/proc/self/clear_refs").exists():
        reset_peak(place)
        assert peak_memory(place) < peak - 1e8


def test_a_random_model_of_a_named_shape_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    small = {**shape, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    monkeypatch.setitem(blank.SHAPES, "small", small)
    document = json.loads(steps("random:small", "--context", "20", "--json").stdout)
    assert document["model"] == "random:small" and document["dtype"] == "float32"
    refused = steps("random:huge")
    assert refused.exit_code == 2 and "no shape of the name 'huge'" in refused.stderr and "llama-2-7b" in refused.stderr


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_a_step_reads_every_weight_once(family: str, tied: bool) -> None:
    network = tiny_model(family)
    every = sum(one.numel() for one in network.parameters()) * 4
    spared = 0 if tied else network.get_input_embeddings().weight.numel() * 4
    backbone = Backbone(network)
    assert attach(backbone).weight_bytes == every - spared
    # The fast engine counts the matrices that its products read, and neither gains nor biases.
    vectors = sum(one.numel() for one in network.parameters() if one.dim() == 1) * 4
    assert attach(backbone, "fast", Packed(torch.float32)).weight_bytes == every - spared - vectors


def test_the_command_prints_the_ceiling_and_a_table_or_json(model: str) -> None:
    shown = steps(model, "--context", "20")
    assert shown.exit_code == 0, shown.stderr
    assert "at the least" in shown.stderr and "eager" in shown.stdout and "fast" in shown.stdout
    assert "20 tokens in the cache" in " ".join(shown.stdout.split()) and "peak memory" in shown.stdout
    document = json.loads(steps(model, "--context", "40,20", "--json", "--engine", "fast").stdout)
    assert list(document["contexts"]) == ["20", "40"] and list(document["contexts"]["40"]) == ["fast"]
    small, large = (document["contexts"][size]["fast"] for size in ("20", "40"))
    assert list(small["step_ms"]) == [str(n) for n in ROWS] and small["cache_bytes"] < large["cache_bytes"]
    assert document["ceiling_ms"] > 0 and document["weight_bytes"] > 0
    assert list(document["peak_bytes"]) == ["20", "40"]


def test_a_run_names_the_model_and_what_passes_know_nothing_of_is_refused(model: str, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", model, tree=None)
    words = ["bench", "--steps", "--run", str(run.path), "--engine", "eager", "--context", "9", "--dtype", "fp32"]
    shown = CliRunner().invoke(app, [*words, "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout)["model"] == model
    for more in (["--limit", "2"], ["--methods", "ar"], ["--batch-size", "1"], ["--mt-bench"]):
        refused = CliRunner().invoke(app, [*words, *more])
        assert refused.exit_code == 2 and f"{more[0]} says nothing to --steps" in refused.stderr


@pytest.mark.parametrize(
    ("context", "said"),
    [
        ("5000", "--context 5000 and a step are longer than the model's 512; use 509 or less"),
        ("20,510", "--context 510 and a step are longer"),
        ("0", "'0' is no number of tokens"),
        ("20,", "'' is no number of tokens"),
        ("many", "'many' is no number of tokens"),
    ],
)
def test_contexts_that_cannot_be_are_refused(model: str, context: str, said: str) -> None:
    done = steps(model, "--context", context, "--engine", "eager")
    assert done.exit_code == 2 and said in done.stderr


def test_the_longest_context_it_allows_fits(model: str) -> None:
    assert steps(model, "--context", "509", "--engine", "eager", "--json").exit_code == 0
