"""Timings are measured once and kept; a damaged, foreign or read-only file costs a measurement."""

import json
import logging
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_cli.decode import step_times
from medusa_cli.engine import attach, autotune, load_backbone
from medusa_cli.engine.autotune import (
    KernelTimings,
    cost,
    fastest,
    kernel_timings,
    machine_key,
    read_timings,
    time_step,
    timings_file,
)
from medusa_cli.engine.kernels import Kernel
from medusa_cli.engine.load import choose_kernel
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import quantization_of
from medusa_cli.tree.search import StepTimes
from tests.helpers import forward, medusa, medusa_json, save_network, tiny_backbone, tiny_model

CONFIG = tiny_model().config
KEY = f"kernels|{machine_key(CONFIG)}"
CURVE = {1: 0.01, 4: 0.012, 64: 0.1}
SPEED = ("fp16-weights", "bf16", "fp32", "plain")  # the first is the fastest
KERNELS = [Kernel("fp32"), Kernel("fp16-weights")]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets a cache folder of the test's own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("MEDUSA_HOME", str(folder))
    return folder


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the measurement; returns the kernels that it measures, in order."""
    names_timed: list[str] = []

    def time_kernels(names: Any, config: Any) -> tuple[dict[str, dict[int, float]], list[str]]:
        names_timed.extend(names)
        return {name: {rows: (1 + SPEED.index(name)) * s for rows, s in CURVE.items()} for name in names}, []

    monkeypatch.setattr(autotune, "time_kernels", time_kernels)
    return names_timed


def test_kernels_are_timed_once_and_kept(timed: list[str]) -> None:
    assert fastest(KERNELS, CONFIG).name == "fp16-weights" and timed == ["fp32", "fp16-weights"]
    assert fastest(KERNELS, CONFIG).name == "fp16-weights" and len(timed) == 2
    # With another kernel all that are asked for take turns.
    assert set(kernel_timings(["fp32", "plain"], CONFIG).seconds) > {"fp32", "plain"} and timed[2:] == ["fp32", "plain"]
    kept = read_timings(KEY, KernelTimings)
    assert kept.seconds["fp32"] == {rows: 3 * seconds for rows, seconds in CURVE.items()} and len(kept.seconds) == 3
    assert not list(timings_file().parent.glob(".*"))  # no partial file is left
    kernel_timings(["fp32"], CONFIG, again=True)
    assert timed[4:] == ["fp32"]


@pytest.mark.parametrize("busy", [True, False])
def test_timings_of_a_busy_machine_are_used_and_measured_again_an_hour_later(
    busy: bool, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    monkeypatch.setattr(autotune.time, "time", lambda: now[0])
    monkeypatch.setattr(autotune.time, "thread_time", lambda: 0.0 if busy else 2 * time.perf_counter())
    for _ in range(6):
        assert fastest(KERNELS, CONFIG).name == "fp16-weights"
        now[0] += 1500
    assert len(timed) == 2 * (2 if busy else 1)


def time_steps_as(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], disturbance: Callable[[], float] = lambda: 1.0
) -> None:
    """Makes a step of each kernel take so many seconds, times the disturbance of the moment."""

    def time_step(engine: Any, cache: Any, rows: int) -> tuple[float, float]:
        return seconds[engine.kernel.name] * (1 + 0.1 * rows) * disturbance(), 1e-6

    monkeypatch.setattr(autotune, "time_step", time_step)


def test_disturbed_laps_do_not_change_the_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = set()
    for seed in range(10):
        monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / str(seed)))
        chance = random.Random(seed)  # a third of the laps meets another program
        disturbance = partial(lambda chance: chance.choice((1, 1, 1 + chance.random())), chance)
        time_steps_as(monkeypatch, {"fp32": 0.011, "fp16-weights": 0.010}, disturbance)
        chosen.add(fastest(KERNELS, CONFIG).name)
    assert chosen == {"fp16-weights"}


@pytest.mark.parametrize(("gain", "choice"), [(0.97, "fp32"), (0.8, "fp16-weights")])
def test_a_choice_is_changed_for_a_clear_gain_alone(gain: float, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    time_steps_as(monkeypatch, {"fp32": 0.010, "fp16-weights": 0.0101})
    assert fastest(KERNELS, CONFIG).name == "fp32"
    time_steps_as(monkeypatch, {"fp32": 0.010, "fp16-weights": gain * 0.010})
    kernel_timings(["fp32", "fp16-weights"], CONFIG, again=True)
    assert fastest(KERNELS, CONFIG).name == choice


def test_a_turn_of_another_program_between_layers_changes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Backbone(tiny_model(layers=6).float())
    engine = attach(backbone, "fast", Kernel("plain", torch.float32))
    cache, best = engine.new_cache(), autotune.best_time
    forward(backbone, torch.arange(5), cache)
    turns = iter(range(1000))

    def disturbed(*lap: Any) -> float:
        return best(*lap) + (next(turns) % 6 > 0)  # another program takes a second of five laps of six

    monkeypatch.setattr(autotune, "best_time", disturbed)
    assert time_step(engine, cache, 4)[0] < 1


def test_each_shape_processor_and_thread_count_has_its_own_timings(
    timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_timings(["fp32"], CONFIG)
    kernel_timings(["fp32"], tiny_model(hidden=64).config)
    limited = autotune.limited()
    changes = (
        (autotune, "processor", lambda: "another"),
        (autotune, "limited", lambda: not limited),
        (torch, "get_num_threads", lambda: 77),
    )
    for count, (owner, name, value) in enumerate(changes, 3):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(owner, name, value)
            kernel_timings(["fp32"], CONFIG)
        assert len(timed) == count, name
    kernel_timings(["fp32"], CONFIG)  # the first ones are still there
    assert len(timed) == 5 and len(json.loads(timings_file().read_text())) == 5


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"KEY": 3}', '{"KEY": {"seconds": {"fp32": 3}}}',
    '{"KEY": {"seconds": {"fp32": {"1": "fast"}}}}', '{"KEY": {"seconds": {"fp32": {"1": -1}}}}',
    '{"KEY": {"seconds": {"fp32": {"1": NaN}}}}', '{"KEY": {"seconds": {"fp32": {"one": 1}}}}',
    '{"KEY": {"seconds": {"fp32": {"0": 1}}}}', '{"KEY": {"seconds": {"fp32": {"1000000": 1}}}}',
    '{"KEY": {"seconds": {"fp32": [1, 2]}}}', '{"KEY": {"choices": 3}}', "\x00\x01", "\udcff",
])  # fmt: skip
def test_damaged_file_is_replaced_by_new_timings(text: str, timed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    timings_file().parent.mkdir(parents=True)
    text = text.replace("KEY", json.dumps(KEY)[1:-1])
    timings_file().write_bytes(text.encode("utf-8", "surrogateescape"))
    with caplog.at_level(logging.WARNING):
        timings = kernel_timings(["fp32"], CONFIG)
    assert timed == ["fp32"] and cost(timings.seconds["fp32"], 1) == pytest.approx(0.03)
    messages = [record.message for record in caplog.records]
    assert messages and all(str(timings_file()) in message and "\n" not in message for message in messages)
    caplog.clear()
    assert kernel_timings(["fp32"], CONFIG) == timings and timed == ["fp32"] and not caplog.records


@pytest.mark.parametrize("folder", ["a file", pytest.param("read-only", marks=pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write anywhere"))])  # fmt: skip
def test_unwritable_folder_costs_the_timings_alone(
    folder: str, timed: list[str], home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if folder == "a file":
        home.write_text("")
    else:
        home.mkdir(mode=0o500)
    with caplog.at_level(logging.WARNING):
        assert fastest(KERNELS, CONFIG).name == "fp16-weights"
    assert "timings.json" in caplog.text and not timings_file().exists()


def test_kernels_that_cannot_be_had_are_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(autotune, "time_kernels", lambda names, config: ({"fp16-weights": {}, "fp32": dict(CURVE)}, []))
    assert fastest(KERNELS[::-1], CONFIG).name == "fp32"
    monkeypatch.setattr(autotune, "time_kernels", lambda names, config: ({name: {} for name in names}, []))
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "other"))
    assert fastest(KERNELS[::-1], CONFIG).name == "fp16-weights"  # the first is the choice without timings


def test_kernels_whose_rows_depend_on_each_other_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {rows: 9 * s for rows, s in CURVE.items()}
    curves, variant = {"fp16-weights": dict(CURVE), "fp32": slow}, ["fp16-weights"]
    monkeypatch.setattr(autotune, "time_kernels", lambda names, config: (curves, variant))
    assert fastest(KERNELS, CONFIG).name == "fp32" and fastest(KERNELS, CONFIG).name == "fp32"
    variant.append("fp32")  # where no kernel is row-invariant, the fastest one is taken
    kernel_timings(["fp32", "fp16-weights"], CONFIG, again=True)
    assert fastest(KERNELS, CONFIG).name == "fp16-weights"


def test_name_of_a_gpu_holds_its_memory_and_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = SimpleNamespace(name="GPU", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(autotune, "DRIVER", tmp_path / "version")
    names = {autotune.device_name(torch.device("cuda"))}
    for driver in ("NVRM version: 550.54", "NVRM version: 560.35"):
        (tmp_path / "version").write_text(f"{driver}\nGCC version: 12\n")
        names.add(autotune.device_name(torch.device("cuda")))
    facts.total_memory //= 2
    names.add(autotune.device_name(torch.device("cuda")))
    assert (
        len(names) == 4 and all("GPU" in name for name in names) and autotune.device_name(torch.device("cpu")) == "cpu"
    )


def test_cost_is_that_of_the_best_tree_or_of_the_rows_asked_for() -> None:
    single, several = {1: 0.010, 4: 0.030, 64: 0.400}, {1: 0.015, 4: 0.016, 64: 0.060}
    assert cost(several, None) == pytest.approx(0.016 / 1.65) and cost(several, None) < cost(single, None)
    assert cost(single, 1) < cost(several, 1) and cost(several, 60) == pytest.approx(0.060 / 64)


def test_machine_tells_what_drafts_give_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = {"fp32": {1: 0.010, 4: 0.011, 64: 0.4}, "int4": {1: 0.005, 4: 0.020, 64: 0.4}}
    monkeypatch.setattr(
        autotune, "time_kernels", lambda names, config: ({name: curves.get(name, {}) for name in names}, [])
    )
    drafts = medusa_json("machine", "--model", "random:0.36b")["drafts"]
    assert drafts["fp32"] == {"nodes": 4, "speedup": pytest.approx(1.65 * 0.010 / 0.011)}
    assert drafts["int4"] == {"nodes": 1, "speedup": pytest.approx(1.0)} and len(drafts) == 2


def test_auto_runs_the_model_on_a_timed_kernel(home: Path, tmp_path: Path) -> None:
    backbone = load_backbone(save_network(tiny_model().to(torch.bfloat16), tmp_path / "model"))
    [kept] = json.loads((home / "timings.json").read_text()).values()
    timings, chosen = kept["seconds"], backbone.engine.kernel.name
    assert backbone.engine.name == "fast" and chosen in timings and [*kept["choices"].values()] == [chosen]
    assert all(seconds > 0 for curve in timings.values() for seconds in curve.values())
    assert backbone.engine.kernel.exact and "plain" not in timings


def test_dtype_and_engine_limit_the_kernels(timed: list[str], tmp_path: Path) -> None:
    model = save_network(tiny_model().to(torch.bfloat16), tmp_path / "model")
    assert choose_kernel(model, "cpu", "bf16", "auto", None).rows == torch.bfloat16 and not timed
    assert choose_kernel(model, "cpu", "fp32", "auto", None).rows == torch.float32
    assert set(timed) <= {"fp32", "fp16-weights"}
    assert choose_kernel(model, "cpu", "bf16", "int8", None).name == "int8"
    with pytest.raises(UsageError, match="quantize int8"):
        choose_kernel(model, "cpu", "fp32", "int8", None)
    whole = save_network(tiny_model(), tmp_path / "whole")
    assert choose_kernel(whole, "cpu", "auto", "auto", None).name in ("fp32", "plain")  # 16 bits cannot hold it
    half = save_network(tiny_model().to(torch.float16), tmp_path / "half")
    assert choose_kernel(half, "cpu", "auto", "auto", None).rows == torch.float32
    assert choose_kernel(half, "cpu", "fp16", "auto", None).name == "plain"


def test_step_times_of_quantized_weights_are_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str | None] = []
    backbone = tiny_backbone()

    def measure(*args: Any, **options: Any) -> StepTimes:
        measured.append(quantization_of(backbone.model))
        return StepTimes({1: 1.0 + len(measured)}, {1: 0.1})

    monkeypatch.setattr(step_times, "measure_step_times", measure)
    first = step_times.step_times_for(backbone, None, None)
    backbone.model.config.quantization_config = SimpleNamespace(load_in_4bit=True)
    second = step_times.step_times_for(backbone, None, None)
    assert step_times.step_times_for(backbone, None, None) == second != first
    assert measured == [None, "bnb.nf4"]


def test_step_times_of_a_busy_machine_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_times, "measure_step_times", lambda *args, **options: StepTimes({1: 1.0}, {1: 0.1}))
    for busy, warned in ((None, 0), (time.time(), 1)):
        monkeypatch.setattr(step_times, "watched", lambda measure, busy=busy: (measure(), busy))
        caplog.clear()
        step_times.step_times_for(tiny_backbone(), None, None, again=True)
        assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == warned


def test_machine_warns_of_times_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "time_kernels", lambda names, config: (dict.fromkeys(names, CURVE), []))
    for busy in (None, time.time()):
        monkeypatch.setattr(autotune, "watched", lambda measure, busy=busy: (measure(), busy))
        shown = medusa("machine", "--model", "random:0.36b", "--measure")
        assert ("warning" in shown.stderr) == (busy is not None)
