"""`medusa machine` and `medusa bench --sweep`: sizes, engines and points, and going on after kill -9."""

import json
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from medusa_cli.bench import sweep as sweeping
from medusa_cli.bench.steps import ROWS, time_rows
from medusa_cli.device import copy_bandwidth
from medusa_cli.model import Backbone
from medusa_cli.model import load as model_load
from tests import forked
from tests.bench import gpu_probe
from tests.bench.gpu_lab import Lab
from tests.helpers import (
    attach,
    medusa,
    save_model,
    save_questions,
    save_run,
    tiny_backbone,
    tiny_model,
)


def machine(model: str, contexts: str, *words: str, exit_code: int = 0) -> Result:
    common = ["--model", model, "--dtype", "fp32"]
    return medusa("machine", "--context", contexts, *common, *words, exit_code=exit_code)


@pytest.mark.quick("native", "torch")
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
def test_every_size_is_timed(engine: str) -> None:
    times = time_rows(tiny_backbone(engine=engine), (1, 2, 7), context=9, rounds=2)
    assert list(times["step_ms"]) == ["1", "2", "7"]
    assert min(times["prefill_s"], *times["step_ms"].values()) > 0
    # Two layers, keys and values, two key heads, 9 + 7 positions, 8 wide, fp32; the native engine pads values to 16.
    exact = 2 * 2 * 2 * 16 * 8 * 4
    assert times["cache_bytes"] == exact * (1.5 if engine == "native" else 1)
    assert copy_bandwidth(torch.device("cpu")) > 1e8


def test_a_random_model_of_a_named_shape_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_load.SHAPES, "small", (64, 32, 64, 2, 4, 2, 128))
    document = json.loads(machine("random:small", "20", "--json").stdout)
    assert document["model"] == "random:small"
    assert document["dtype"] == "float32"
    assert "huge" in machine("random:huge", "20", exit_code=2).stderr


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_a_step_reads_every_weight_once(family: str, tied: bool) -> None:
    network = tiny_model(family)
    every = sum(weight.numel() for weight in network.parameters()) * 4
    spared = 0 if tied else network.get_input_embeddings().weight.numel() * 4
    backbone = Backbone(network)
    assert attach(backbone).weight_bytes == every - spared
    # The engines with layers of their own count the matrices that products read, and neither gains nor biases.
    vectors = sum(weight.numel() for weight in network.parameters() if weight.dim() == 1) * 4
    assert attach(backbone, "native").weight_bytes == every - spared - vectors
    assert attach(backbone, "torch").weight_bytes == every - spared - vectors


@pytest.mark.quick("native")
@pytest.mark.parametrize("engine", ["eager", "native"])
def test_the_command_prints_a_table_or_json(engine: str, model: str) -> None:
    assert engine in machine(model, "20", "--engine", engine).stdout
    document = json.loads(machine(model, "440,20", "--json", "--engine", engine).stdout)
    assert document["engine"].startswith(engine)
    assert list(document["contexts"]) == ["20", "440"]
    small, large = (document["contexts"][size] for size in ("20", "440"))
    assert list(small["step_ms"]) == [str(n) for n in ROWS]
    assert small["cache_bytes"] < large["cache_bytes"]
    assert document["ceiling_ms"] > 0
    assert document["weight_bytes"] > 0


def test_the_longest_context_is_timed(model: str) -> None:
    machine(model, "509", "--engine", "eager", "--json")


def test_gpu_probe_runs_from_end_to_end(tmp_path: Path) -> None:
    """A dry run on the CPU, where the kernels' twins take their place."""
    report = gpu_probe.run(Lab(True, "cpu", tmp_path), tmp_path, math.inf)
    ends = [line["ended"] for line in report.of("end")]
    assert ends == ["done"] * len(gpu_probe.SCHEDULE)
    assert {"probe": "exact"}.items() <= report.of("identity", probe="exact")[0].items()
    assert all(line["equal"] == 1 for line in report.of("identity", path="exact")[1:])
    assert len(report.of("decision")) > 10
    assert len(report.of("steps", path="exact", rows=8, model="1b")) == 1
    lines = (tmp_path / "probe.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == json.loads(json.dumps(report.lines))


@pytest.mark.slow
def test_gpu_probe_goes_on_behind_faults_and_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(lab: Lab, name: str) -> Iterator[dict[str, int]]:
        yield {"reached": 1}
        raise RuntimeError("out of memory")

    def hang(lab: Lab, name: str) -> Iterator[dict[str, int]]:
        while True:
            # What a library does with errors of its own.
            with suppress(Exception):
                yield from ()

    monkeypatch.setattr(gpu_probe, "SCHEDULE", [("a", "", 99), ("b", "", 0.01), ("c", "", 99)])
    monkeypatch.setattr(gpu_probe, "SECTIONS", {"a": fail, "b": hang, "c": fail})
    lab = Lab(True, "cpu", tmp_path)
    lab.smoke, lab.device = False, torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    for _ in range(2):  # the second one finds nothing left to do
        report = gpu_probe.run(lab, tmp_path, 100.0)
        assert [line["reached"] for name in "abc" for line in report.of(name)] == [1, 1]
        ends = [line["ended"] for line in report.of("end")]
        assert "out of memory" in ends[0]
        assert "time" in ends[1]
        assert len(ends) == 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    save_run(folder / "mine", save_model(folder / "model"), calibrated=True)
    return folder


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "mine", tmp_path / "mine")
    save_questions(tmp_path / "q.jsonl")
    return tmp_path


def points(place: Path) -> dict[str, int]:
    """The points on disk by name, with the time of their writing."""
    folder = place / "mine/bench/sweep"
    return {
        path.name: path.stat().st_mtime_ns for path in folder.glob("*.json") if len(path.stem) == 20
    }


def words(place: Path, *more: str) -> list[str]:
    common = [
        "bench",
        "--questions",
        str(place / "q.jsonl"),
        "--run",
        str(place / "mine"),
        "--dtype",
        "fp32",
    ]
    return [*common, "--max-new-tokens", "8", "--limit", "1", *more]


def sweep(place: Path, axis: str, *more: str) -> Result:
    return medusa(*words(place, "--sweep", axis, "--json", *more))


def series(document: dict) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for point in document["points"]:
        values.setdefault(point["series"], []).append(point["x"])
    return values


@pytest.mark.quick("nodes-2,13-expected0", "temperature-0,0.7-expected2")
@pytest.mark.parametrize(
    ("axis", "values", "expected"),
    [
        ("nodes", "2,13", {"ar": [2, 13], "medusa, static": [2, 13], "medusa, dynamic": [2, 13]}),
        ("epsilon", "0.05,0.2", {"ar": [0.05, 0.2], "medusa": [0.05, 0.2]}),
        (
            "temperature",
            "0,0.7",
            {"ar": [0, 0.7], "medusa, exact": [0, 0.7], "medusa, typical": [0.7]},
        ),
    ],
)
def test_every_axis_has_its_points(place: Path, axis: str, values: str, expected: dict) -> None:
    document = json.loads(sweep(place, axis, "--values", values).stdout)
    assert series(document) == expected
    assert all(
        point["acceptance_length"] >= 1 and point["questions"] == 1 for point in document["points"]
    )
    sampled = [point["nll"] is not None for point in document["points"] if point["x"]]
    assert all(sampled) if axis in ("epsilon", "temperature") else not any(sampled)
    before = points(place)
    again = json.loads(sweep(place, axis, "--values", values).stdout)
    assert again["points"] == document["points"]
    assert points(place) == before
    # The trees are the question of this axis: n-gram drafts are added on request only.
    benches = [
        json.loads((place / "mine/bench/sweep" / name).read_text())["bench"] for name in before
    ]
    lookups = {bench["drafting"]["medusa"]["lookup"] for bench in benches}
    assert lookups == {axis != "nodes"}
    if axis == "nodes":
        assert sorted(bench["drafting"]["medusa"]["nodes"] for bench in benches) == [2, 2, 13, 13]
        sweep(place, axis, "--lookup", "--values", "2")
        assert len(points(place)) == len(before) + 2
        # The report draws the sweep beside the run's bench.
        medusa(*words(place, "--methods", "ar,medusa", "--report"))
        (page,) = (place / "mine/bench").glob("*.html")
        assert "medusa, dynamic" in page.read_text()


def test_known_points_are_measured_again_only_after_a_change(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*more: str) -> int:
        """Returns how many points a sweep measures."""
        before = len(points(place))
        sweep(place, "epsilon", "--values", *more)
        return len(points(place)) - before

    assert measured("0.1,0.2") == 2
    assert measured("0.1,0.2,0.3") == 1
    assert measured("0.1,0.2", "--max-new-tokens", "9") == 2
    assert measured("0.2", "--no-lookup") == 1
    (place / "q.jsonl").write_text('{"turns": ["w3"]}')
    assert measured("0.2") == 1
    (place / "mine/calibration.json").write_text('{"accuracies": [[0.4, 0.2, 0.1]]}')
    assert measured("0.2") == 1
    monkeypatch.setattr(sweeping, "weights_of", lambda model: "trained further")
    assert measured("0.2") == 1
    assert measured("0.2") == 0
    # Of what would be another device, only the name differs here.
    monkeypatch.setattr(sweeping, "resolve_device", lambda device: "meta")
    monkeypatch.setattr(sweeping, "environment", lambda device: {"accelerator": device.type})
    assert measured("0.2") == 1
    assert measured("0.2") == 0
    monkeypatch.setattr(sweeping, "resolve_device", lambda device: "cpu")
    assert measured("0.2") == 1


@pytest.mark.slow
def test_a_sweep_killed_at_any_point_goes_on_and_measures_none_twice(place: Path) -> None:
    wanted = random.randint(1, 3)
    command = words(place, "--sweep", "nodes", "--values", "2,5")
    began = forked.start(command, place, die_at=None)
    forked.wait_until(lambda: len(points(place)) >= wanted, [began])
    time.sleep(random.random() / 2)
    os.kill(began.pid, signal.SIGKILL)
    forked.end([began])
    before = points(place)
    assert len(before) >= wanted
    document = json.loads(sweep(place, "nodes", "--values", "2,5").stdout)
    after = points(place)
    assert {name: after[name] for name in before} == before
    assert len(after) == document["of"]
    assert series(document)["medusa, static"] == series(document)["medusa, dynamic"] == [2, 5]
