"""What a run holds, thing by thing with a digest of each: what crashes must not lose, double or change."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from medusa_cli.exporting.folder import CHECKSUMS
from medusa_cli.states import StateStore

HIDDEN = 32  # of the tiny model

Facts = list[tuple[str, str]]  # a name for each thing, and a digest of it


def digest(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def conversations(run: Path) -> Facts:
    """Every conversation with its states."""
    found = []
    states = StateStore(run / "states.bin", HIDDEN)
    for line in (run / "distill.jsonl").read_text().splitlines():
        one = json.loads(line)
        rows = states.read(*one["state_rows"]).contiguous().view(torch.uint8).numpy().tobytes()
        found.append((one["id"], digest([one["messages"], one["tokens"], one["spans"], digest(rows)])))
    rows = sum(json.loads(line)["state_rows"][1] for line in (run / "distill.jsonl").read_text().splitlines())
    return [*found, ("state rows", str(states.rows - rows))]


def training(run: Path) -> Facts:
    """Every step of the log, the drafter, and the adapter where there is one."""
    kept = ("loss", "accuracies", "positions", "total_positions", "lr")
    lines = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    facts = [
        (f"{one['event']} {one['step']}", digest({key: one.get(key) for key in kept}))
        for one in lines
        if one["event"] in ("stepped", "validated")
    ]
    weights = [*run.glob("drafter/*.safetensors"), *run.glob("adapter/*.safetensors")]
    return facts + [(str(path.relative_to(run)), digest(path.read_bytes())) for path in sorted(weights)]


def document(name: str, picture: bool = True) -> Callable[[Path], Facts]:
    """A JSON file, but for when it was made, and that its picture is there."""

    def facts(run: Path) -> Facts:
        data = json.loads((run / name).read_text())
        for made in (data, data.get("provenance", {})):
            made.pop("created", None)
        drawn = [(f"{name}'s picture", str((run / name).with_suffix(".png").stat().st_size > 0))] if picture else []
        return [(name, digest(data)), *drawn]

    return facts


def report(run: Path) -> Facts:
    """The last report: what each method wrote, not how fast."""
    data = json.loads(max(run.glob("bench/*.json")).read_text())
    return [
        (name, digest([one["tokens"], one.get("identical"), round(one["acceptance_rate"], 6)]))
        for name, one in data["methods"].items()
    ]


def folder(name: str) -> Callable[[Path], Facts]:
    """An exported folder: every file, which its list of checksums must name rightly."""

    def facts(run: Path) -> Facts:
        place = run / name
        sums = dict(reversed(line.split("  ", 1)) for line in (place / CHECKSUMS).read_text().splitlines())
        files = {str(one.relative_to(place)): one.read_bytes() for one in place.rglob("*") if one.is_file()}
        del files[CHECKSUMS]
        assert sums == {one: hashlib.sha256(data).hexdigest() for one, data in files.items()}, f"{place} is not whole"
        return [(one, digest(data)) for one, data in sorted(files.items())]

    return facts


def page(run: Path) -> Facts:
    """The report of the bench, as a page and as Markdown."""
    return [(name, digest((run / name).read_bytes())) for name in ("page.html", "page.md")]


def imported(run: Path) -> Facts:
    """A drafter from elsewhere, what was measured of it, and whose it is."""
    config = document("drafter/config.json", picture=False)(run)
    measured = [(name, digest((run / name).read_bytes())) for name in ("calibration.json", "tree.json")]
    weights = [(path.name, digest(path.read_bytes())) for path in run.glob("drafter/*.safetensors")]
    return [*config, *measured, *weights, *document("run.json", picture=False)(run)]


def machine(run: Path) -> Facts:
    """Which kernels were timed: the times are others in every run."""
    kept = json.loads((run / "home" / "machine.json").read_text())["kernels"]
    return [(f"{key} {kernel}", str(sorted(curve))) for key, one in kept.items() for kernel, curve in one.items()]


def half(run: Path) -> list[str]:
    """The files that are not whole, of those that a reader may meet at any moment."""
    broken = []
    for path in [
        *run.glob("*.json"),
        *run.glob("drafter/*.json"),
        *run.glob("adapter/*.json"),
        *run.glob("bench/*.json"),
        *run.glob("home/*.json"),
    ]:
        try:
            if not path.name.startswith("."):  # else it is not there yet
                json.loads(path.read_text())
        except ValueError:
            broken.append(path.name)
    return broken
