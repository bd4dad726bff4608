"""`make bench-gpu`: measures on a GPU what its open questions hang on, the most telling first; a JSON line for each.

Sections have limits of their own, and whatever one has reached is kept. A section that breaks the device, or does not
return, ends its process; the next process goes on behind it. With --smoke, all of them run on a CPU at tiny shapes, by
the kernels' plain twins, and their times mean nothing. Nothing changes the GPU's settings. The section `tiles` needs
the native library.
"""

import argparse
import faulthandler
import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from medusa_cli.device import synchronize
from tests.bench import gpu_sections
from tests.bench.gpu_lab import Lab
from tests.bench.gpu_sections import COLUMNS, PATHS, Facts

# Seconds in all; a section that does not return in its time gets so many more.
SECONDS = 530.0
GRACE = 15.0
# The sections in order: a name, the model, and the limit in seconds.
SCHEDULE = (
    ("unit", "", 10),
    ("tiles", "", 30),
    ("loss", "", 15),
    ("trees", "", 10),
    ("identity", "1b", 90),
    ("steps", "1b", 45),
    ("products", "1b", 25),
    ("profile", "1b", 20),
    ("steps", "7b", 50),
    ("products", "7b", 25),
    ("profile", "7b", 20),
    ("training", "0.5b", 60),
    ("distillation", "0.5b", 45),
    ("long_texts", "1b-long", 40),
    ("steps", "1b-int4", 45),
)
SECTIONS: dict[str, Callable[[Lab, str], Facts]] = {
    name: getattr(gpu_sections, name) for name, *_ in SCHEDULE
}
# The aims: a plain step in readings of the weights, and one of 64 nodes in plain steps.
AIMS = {"1b": (1.60, 1.20), "7b": (1.30, 1.10)}
LONG_AIM = 1.15
# Milliseconds that EAGLE's drafting adds, the part of a bf16 step that one in 4 bits takes, and positions and tokens
# a second.
EAGLE_AIM, INT4_AIM = 0.8, 0.6
TRAINING_AIM, DISTILLATION_AIM = 100_000, 25_000
# The exact path is the default if it costs no more than this.
EXACT_COST = 1.05
# The tests that need a GPU, and their limit in seconds.
GPU_TESTS = ("tests/test_engine.py", "tests/test_cuda_attention.py")
TESTS = 45.0


class Spent(BaseException):
    """Says that a section's time is over; no part of the program catches it."""


class Report:
    """Writes the lines of all sections to a file after each one, and prints them; goes on behind those in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def line(self, section: str, **facts: Any) -> None:
        self.lines.append({"section": section, **facts})
        self._path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        print(json.dumps(self.lines[-1]), flush=True)

    def of(self, section: str, **wanted: Any) -> list[dict[str, Any]]:
        """Returns the lines of a section that hold these values."""
        lines = [line for line in self.lines if line["section"] == section]
        return [line for line in lines if all(line.get(key) == wanted[key] for key in wanted)]


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises Spent in the work within after so many seconds, and ends the process if it does not return even then."""
    if math.isinf(seconds):
        yield
        return

    def end(*_: Any) -> None:
        raise Spent

    signal.signal(signal.SIGALRM, end)
    # Again every second, as the end of a graph's capture may hide the first one.
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds), 1.0)
    faulthandler.dump_traceback_later(max(0.0, seconds) + GRACE, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def decisions(report: Report, wide: int) -> Iterator[dict[str, Any]]:
    """Says what the lines mean for docs and defaults; wide: the most rows."""
    drafted = [line for line in report.of("identity", path="exact") if "equal" in line]
    if drafted:
        yield {"exact answers are plain ones": all(line["equal"] == 1 for line in drafted)}
    control = [line for line in report.of("identity", path="today") if "equal" in line]
    if control:
        yield {"today's path parts, as it must": any(line["equal"] < 1 for line in control)}
    ours = report.of("products", way="ours")
    if ours:
        exact = all(line["same_by_rows"] and line["same_by_place"] for line in ours)
        yield {"our matmul gives a row the same bits everywhere": exact}
    quantized = report.of("tiles")
    if quantized:
        same = all(line["native_bits"] for line in quantized)
        yield {"matmuls of quantized weights have the native engine's bits": same}
    us = {line["way"]: line["us"] for line in report.of("trees") if "way" in line}
    if "kernels" in us:
        yield {"trees by kernels over plain torch": us["kernels"] / us["plain"]}
    for name, (plain_aim, wide_aim) in AIMS.items():
        us = {
            way: sum(line["us"] for line in report.of("products", model=name, way=way, rows=wide))
            for way in ("ours", "torch")
        }
        if all(us.values()):
            yield {f"{name}: our matmuls over torch's, {wide} rows": us["ours"] / us["torch"]}
        steps = report.of("steps", model=name)
        of = {(line["path"], line["rows"]): line for line in steps if "rows" in line}
        for path in PATHS:
            if {(path, 1), (path, wide)} <= of.keys():
                readings = of[path, 1]["readings"]
                yield held(f"{name} {path}: a plain step in readings", readings, plain_aim)
                ratio = of[path, wide]["ms"] / of[path, 1]["ms"]
                yield held(f"{name} {path}: {wide} rows in plain steps", ratio, wide_aim)
            for line in report.of("steps", model=name, path=path, drafter="eagle"):
                yield held(f"{name} {path}: ms that EAGLE adds", line["added_ms"], EAGLE_AIM)
        if {("exact", wide), ("today", wide), ("exact", 1)} <= of.keys():
            cost = max(of["exact", n]["ms"] / of["today", n]["ms"] for n in (1, wide))
            yield held(f"{name}: exact steps over today's", cost, EXACT_COST)
    for few in report.of("steps", model="1b-int4", path="today", rows=1):
        for whole in report.of("steps", model="1b", path="today", rows=1):
            yield held("1b: 4 bits over bf16", few["ms"] / whole["ms"], INT4_AIM)
    for path in PATHS:
        columns = {line["columns"]: line["ms"][1] for line in report.of("long_texts", path=path)}
        if {COLUMNS[0], COLUMNS[1]} <= columns.keys():
            ratio = columns[COLUMNS[1]] / columns[COLUMNS[0]]
            yield held(f"{path}: {COLUMNS[1]:,} columns over {COLUMNS[0]}", ratio, LONG_AIM)
    for name, rate, aim in (
        ("training", "positions_per_s", TRAINING_AIM),
        ("distillation", "tokens_per_s", DISTILLATION_AIM),
    ):
        if rates := [line[rate] for line in report.of(name)]:
            best = max(rates)
            yield {f"{name}: {rate}": best, "aim": aim, "holds": best >= aim}


def held(name: str, value: float, aim: float) -> dict[str, Any]:
    return {name: value, "aim": aim, "holds": value <= aim}


def run(lab: Lab, output: Path, seconds: float, only: Sequence[str] = ()) -> Report:
    """Runs the sections that have not begun yet within so many seconds, and returns all lines.

    Raises an error if a section has broken the device, after which only another process can go on.
    """
    output.mkdir(parents=True, exist_ok=True)
    report = Report(output / "probe.jsonl")
    end = time.perf_counter() + seconds
    if not report.lines:
        name = "cpu" if lab.smoke else torch.cuda.get_device_name(lab.device)
        triton = importlib.util.find_spec("triton") is not None
        report.line("machine", device=name, torch=torch.__version__, triton=triton)
    for section, model, limit in SCHEDULE:
        left = end - time.perf_counter()
        if (only and section not in only) or report.of("begin", of=section, model=model):
            continue
        if left <= 0:
            report.line("end", of=section, model=model, ended="no time was left")
            continue
        report.line("begin", of=section, model=model)
        started = time.perf_counter()
        ended = "done"
        try:
            with limited(math.inf if lab.smoke else min(limit, left)):
                for facts in SECTIONS[section](lab, model):
                    report.line(section, model=model, **facts)
        except Spent:
            ended = "its time is spent"
        # An error ends a section, not the run.
        except Exception as reason:
            ended = f"{type(reason).__name__}: {reason}"[:2000]
        report.line("end", of=section, model=model, ended=ended, s=time.perf_counter() - started)
        if ended != "done":
            # They raise an error if the section has broken the device.
            lab.free()
            synchronize(lab.device)
    for decision in decisions(report, lab.rows[-1]):
        report.line("decision", **decision)
    return report


def supervise(asked: argparse.Namespace) -> None:
    """Runs the sections in a process, and what is left in another one as long as each begins some."""
    end = time.perf_counter() + asked.seconds
    path = asked.output / "probe.jsonl"
    path.unlink(missing_ok=True)
    begun = 0
    while (left := end - time.perf_counter()) > 0:
        words = ["--here", "--seconds", str(left), "--output", str(asked.output)]
        words += ["--device", asked.device, *(["--only", *asked.only] if asked.only else [])]
        command = [sys.executable, "-m", "tests.bench.gpu_probe", *words]
        ended = subprocess.run(command, check=False).returncode
        before, begun = begun, len(Report(path).of("begin"))
        if ended == 0 or begun == before:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--output", type=Path, default=Path("build/probe-gpu"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=[*SECTIONS, "tests"], default=[])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--here", action="store_true", help="in this process, behind earlier lines")
    asked = parser.parse_args()
    if asked.smoke or asked.here:
        run(Lab(asked.smoke, asked.device, asked.output), asked.output, asked.seconds, asked.only)
        return
    supervise(asked)
    if not asked.only or "tests" in asked.only:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *GPU_TESTS]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=False, timeout=TESTS)


if __name__ == "__main__":
    main()
