"""What is measured of a machine is measured once and kept; a damaged, foreign or read-only file costs a measurement."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.engine import autotune as machine
from medusa_cli.engine import load_backbone
from medusa_cli.engine.autotune import KernelTimings, fastest, machine_file, machine_key, measured
from medusa_cli.engine.kernels import Fp16Kernel, PackedKernel, PlainKernel
from medusa_cli.engine.load import choose_kernel
from medusa_cli.errors import UsageError
from tests.helpers import save_network, tiny_model

CONFIG = tiny_model().config
CURVE = {"1": 0.01, "4": 0.012, "64": 0.1}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("MEDUSA_HOME", str(folder))
    return folder


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are timed, in order; the first named here is the fastest."""
    asked: list[str] = []

    def times(names: Any, config: Any) -> dict[str, dict[str, float]]:
        asked.extend(names)
        speed = ("fp16-weights", "bf16", "fp32", "plain")
        return {name: {rows: (1 + speed.index(name)) * s for rows, s in CURVE.items()} for name in names}

    monkeypatch.setattr(machine, "_times", times)
    return asked


def test_steps_are_timed_once_for_a_shape_and_then_read(timed: list[str]) -> None:
    kernels = [PackedKernel(torch.float32), Fp16Kernel()]
    assert fastest(kernels, CONFIG).name == "fp16-weights" and timed == ["fp32", "fp16-weights"]
    assert fastest(kernels, CONFIG).name == "fp16-weights" and len(timed) == 2
    # A kernel more: it alone is timed, and all are kept.
    assert set(measured(["fp32", "plain"], CONFIG).seconds) == {"fp32", "plain"} and timed[2:] == ["plain"]
    kept = json.loads(machine_file().read_text())["kernels"][machine_key(CONFIG)]
    assert kept["fp32"] == {rows: 3 * seconds for rows, seconds in CURVE.items()} and len(kept) == 3
    assert not list(machine_file().parent.glob(".*"))  # nothing half written is left
    measured(["fp32"], CONFIG, again=True)
    assert timed[3:] == ["fp32"]


def test_times_of_a_busy_machine_hold_for_one_process(
    timed: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = machine._times

    def disturbed(names: Any, config: Any) -> dict[str, dict[str, float]]:
        time.sleep(1.2 * machine.SHORT)  # what another program computes
        return times(names, config)

    monkeypatch.setattr(machine, "_times", disturbed)
    monkeypatch.setattr(machine, "_disturbed", {})
    found = measured(["fp32"], CONFIG)
    assert measured(["fp32"], CONFIG) == found and len(timed) == 1
    assert not machine_file().exists() and "times it anew" in caplog.text
    monkeypatch.setattr(machine, "_disturbed", {})  # another process
    measured(["fp32"], CONFIG)
    assert len(timed) == 2 and not machine_file().exists()
    measured(["fp32"], CONFIG, again=True)  # asked for
    assert len(timed) == 3 and machine_file().exists() and "once more" in caplog.text


def test_models_of_another_shape_machines_and_threads_have_times_of_their_own(
    timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(["fp32"], CONFIG)
    measured(["fp32"], tiny_model(hidden=64).config)
    assert len(timed) == 2
    other = not machine.limited()
    for name, value in (("processor", lambda: "another"), ("limited", lambda: other)):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(machine, name, value)
            before = len(timed)
            measured(["fp32"], CONFIG)
            assert len(timed) == before + 1, name
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch, "get_num_threads", lambda: 77)
        measured(["fp32"], CONFIG)
    assert len(timed) == 5
    measured(["fp32"], CONFIG)  # and the first ones are still there
    assert len(timed) == 5 and len(json.loads(machine_file().read_text())["kernels"]) == 5


DAMAGED = [
    "",
    "{",
    "[]",
    "null",
    '{"kernels": 3}',
    '{"kernels": {"KEY": 3}}',
    '{"kernels": {"KEY": {"fp32": 3}}}',
    '{"kernels": {"KEY": {"fp32": {"1": "fast"}}}}',
    '{"kernels": {"KEY": {"fp32": {"1": -1}}}}',
    '{"kernels": {"KEY": {"fp32": {"1": NaN}}}}',
    '{"kernels": {"KEY": {"fp32": {"1": Infinity}}}}',
    '{"kernels": {"KEY": {"fp32": {"one": 1}}}}',
    '{"kernels": {"KEY": {"fp32": {"0": 1}}}}',
    '{"kernels": {"KEY": {"fp32": [1, 2]}}}',
    "\x00\x01\x02",
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_said_once_measured_anew_and_mended(
    text: str, timed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    machine_file().parent.mkdir(parents=True)
    machine_file().write_text(text.replace("KEY", machine_key(CONFIG).replace("\\", "\\\\").replace('"', '\\"')))
    with caplog.at_level(logging.WARNING):
        found = measured(["fp32"], CONFIG)
    assert timed == ["fp32"] and found.cost("fp32", 1) == pytest.approx(0.03)
    said = [record.message for record in caplog.records if "machine.json" in record.message]
    assert said and all("\n" not in line for line in said)
    caplog.clear()
    assert measured(["fp32"], CONFIG).seconds == found.seconds and timed == ["fp32"]
    assert not caplog.records


def test_what_is_not_text_is_measured_anew_too(timed: list[str]) -> None:
    machine_file().parent.mkdir(parents=True)
    machine_file().write_bytes(b"\xff\xfe\x80")
    measured(["fp32"], CONFIG)
    measured(["fp32"], CONFIG)
    assert timed == ["fp32"]


def test_another_machines_times_are_left_and_not_read(timed: list[str]) -> None:
    theirs = {"Other CPU|AVX2|8|2.9|32x64x4x2x2x64": {"fp32": {"1": 1e-9}}}
    machine_file().parent.mkdir(parents=True)
    machine_file().write_text(json.dumps({"kernels": theirs, "more": 1}))
    assert measured(["fp32"], CONFIG).cost("fp32", 1) == pytest.approx(0.03) and timed == ["fp32"]
    kept = json.loads(machine_file().read_text())["kernels"]
    assert kept.items() >= theirs.items() and machine_key(CONFIG) in kept


def test_a_file_that_cannot_be_written_is_done_without(
    timed: list[str], home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert fastest([Fp16Kernel(), PackedKernel(torch.float32)], CONFIG).name == "fp16-weights"
    assert "cannot be kept" in caplog.text and home.read_text() == "a file where the folder should be"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_done_without(timed: list[str], home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.mkdir()
    home.chmod(0o500)
    with caplog.at_level(logging.WARNING):
        assert fastest([Fp16Kernel(), PackedKernel(torch.float32)], CONFIG).name == "fp16-weights"
    home.chmod(0o700)
    assert "cannot be kept" in caplog.text and not list(home.iterdir())


def test_a_kernel_that_cannot_be_had_is_never_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_times", lambda names, config: {"fp16-weights": {}, "fp32": dict(CURVE)})
    assert fastest([Fp16Kernel(), PackedKernel(torch.float32)], CONFIG).name == "fp32"
    monkeypatch.setattr(machine, "_times", lambda names, config: {name: {} for name in names})
    monkeypatch.setenv("MEDUSA_HOME", str(machine_file().parent / "other"))
    assert (
        fastest([Fp16Kernel(), PackedKernel(torch.float32)], CONFIG).name == "fp16-weights"
    )  # the one to take unmeasured


def test_the_cost_is_of_the_tree_that_pays_best_or_of_so_many_rows() -> None:
    """One kernel is made for single rows, the other for many."""
    found = KernelTimings({"single": {1: 0.010, 4: 0.030, 64: 0.400}, "many": {1: 0.015, 4: 0.016, 64: 0.060}})
    best = min(found.seconds, key=lambda name: found.cost(name, None))
    assert best == "many" and found.cost("many", None) == pytest.approx(0.016 / 1.65)
    assert found.cost("single", 1) < found.cost("many", 1) and found.cost("many", 60) == pytest.approx(0.060 / 64)


def test_a_machine_is_really_timed_and_its_choice_runs_the_model(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "UNDISTURBED", 0.0)  # whatever else runs beside the tests
    model = tiny_model().to(torch.bfloat16)
    backbone = load_backbone(save_network(model, tmp_path / "model"))
    kept = json.loads((home / "machine.json").read_text())["kernels"]
    [times] = kept.values()
    assert backbone.engine.name == "fast" and backbone.engine.kernel.name in times
    assert all(seconds > 0 for curve in times.values() for seconds in curve.values())
    assert backbone.engine.kernel.exact and "plain" not in times


def test_types_that_are_asked_for_are_not_measured_against_others(timed: list[str], tmp_path: Path) -> None:
    model = save_network(tiny_model().to(torch.bfloat16), tmp_path / "model")
    assert choose_kernel(model, "cpu", "bf16", "auto", None).rows == torch.bfloat16 and not timed
    assert choose_kernel(model, "cpu", "fp32", "auto", None).rows == torch.float32
    assert set(timed) <= {"fp32", "fp16-weights"}
    assert choose_kernel(model, "cpu", "bf16", "int8", None).name == "int8"
    with pytest.raises(UsageError, match="quantize int8 needs bf16 on a CPU, not float32"):
        choose_kernel(model, "cpu", "fp32", "int8", None)
    whole = save_network(tiny_model(), tmp_path / "whole")
    # No 16-bit weights hold a checkpoint of 32 bits: there is nothing to choose from.
    assert choose_kernel(whole, "cpu", "auto", "auto", None).name in ("fp32", "plain")
    half = save_network(tiny_model().to(torch.float16), tmp_path / "half")
    assert choose_kernel(half, "cpu", "auto", "auto", None).rows == torch.float32
    assert isinstance(choose_kernel(half, "cpu", "fp16", "auto", None), PlainKernel)
