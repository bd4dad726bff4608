"""Sweeps: one bench per value of an axis. A killed sweep can be resumed, which measures only the missing points."""

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from medusa_cli import __version__
from medusa_cli.bench.answers import Watch, unwatched
from medusa_cli.bench.bench import Bench, environment
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.fetch import sha256_of
from medusa_cli.files.io import read_object, write_json
from medusa_cli.model import lora
from medusa_cli.model.digest import weights_of
from medusa_cli.model.load import resolve_device
from medusa_cli.runs.resolve import Choice, TreeChoice, read_calibration
from medusa_cli.runs.run import provenance
from medusa_cli.tree.io import MAX_NODES
from medusa_cli.tree.search import Accuracies, largest


class Axis(NamedTuple):
    """Describes a varied setting: its unit, its default values, and the flags that it replaces."""

    unit: str
    values: tuple[float, ...]
    replaces: tuple[str, ...] = ()


AXES = {
    "nodes": Axis("nodes of the tree, root included", (2, 4, 8, 16, 32, 64), ("tree",)),
    "epsilon": Axis(
        "epsilon of typical acceptance (delta is its root)",
        (0.01, 0.05, 0.09, 0.15, 0.25),
        ("sampling",),
    ),
    "temperature": Axis("temperature", (0, 0.3, 0.7, 1.0), ("sampling", "temperature")),
}
FIGURES = (
    "tokens_per_s",
    "tokens_per_s_95",
    "acceptance_length",
    "acceptance_length_95",
    "overhead",
    "questions",
)
METHODS = {"hf", "hf-lookup", "ar", "medusa"}
Point = tuple[str, float, Bench]  # series, value of the axis, and the bench to run
log = logging.getLogger(__name__)


def parse_values(name: str, text: str | None) -> list[float]:
    """Returns the values of a list such as 2,4,8 in rising order; without a list, the axis's default values.

    Raises UsageError for an unknown axis or an invalid value.
    """
    if name not in AXES:
        raise UsageError(f"@sweep {name!r} is unknown", f"use one of {', '.join(AXES)}")
    if text is None:
        return list(AXES[name].values)
    whole = name == "nodes"
    try:
        values = sorted({float(int(word) if whole else float(word)) for word in text.split(",")})
    except ValueError:
        values = [-1.0]
    if not all(whole <= value < math.inf for value in values):
        fault = f"@values {text!r} is not valid"
        raise UsageError(fault, f"use {'whole numbers >= 1' if whole else 'numbers >= 0'}")
    return values


def check(base: Bench, axis: str, values: Sequence[float]) -> None:
    """Raises UsageError for methods that cannot be swept, and for values that are not valid."""
    if "medusa" not in base.drafts or not METHODS.issuperset(base.methods):
        text = f"@methods {','.join(base.methods)} cannot be swept"
        raise UsageError(text, "use medusa, and hf, hf-lookup or ar with it")
    if axis == "nodes":
        limit = min(largest(_accuracies(base.drafts["medusa"])), MAX_NODES)
        if max(values) > limit:
            fault = f"@values {max(values):g}: these heads allow {limit:,} nodes"
            raise UsageError(fault, "use no more")
    list(_points(base, axis, values))


def sweep(
    base: Bench, axis: str, values: Sequence[float], folder: Path, watch: Watch = unwatched
) -> dict[str, Any]:
    """Measures the points that are not in the folder yet, writes sweep-AXIS.json there and returns its content."""
    check(base, axis, values)
    points = list(_points(base, axis, values))
    document = dict[str, Any]()
    rows = list[dict[str, Any]]()
    known = 0
    for number, (series, x, bench) in enumerate(points, 1):
        path = folder / "sweep" / f"{_digest(bench)}.json"
        if path.is_file():
            known += 1
        else:
            log.info("point %d of %d: %s %g %s", number, len(points), axis, x, series)
            write_json(path, {"bench": bench.run(watch)})
        result = read_object(path, "the point")["bench"]
        for name, figures in result["methods"].items():
            drafts = name in result["drafting"]
            # Methods that do not draft have the same figures in every series.
            if drafts or series == points[0][0]:
                own = f"{name}, {series}" if drafts and series else name
                row = {"series": own, "x": x, **{key: figures[key] for key in FIGURES}}
                row["nll"] = (result["quality"] or {}).get(name, {}).get("nll")
                rows.append(row)
        facts = {"axis": axis, "unit": AXES[axis].unit, "title": base.title, "of": len(points)}
        document = {**provenance(result["backbone"]), **facts, "points": rows}
        write_json(folder / f"sweep-{axis}.json", document)
    log.info("%d points, %d of them measured before", len(points), known)
    return document


def _points(base: Bench, axis: str, values: Sequence[float]) -> Iterator[Point]:
    """Yields the points of a sweep; raises UsageError for a value that a bench refuses."""
    sampling = base.sampling
    drafted = base.drafts["medusa"]
    if axis == "nodes":
        for tree in (TreeChoice("static"), TreeChoice("dynamic")):
            for size in values:
                choice = replace(drafted, tree=replace(tree, nodes=int(size)))
                yield tree.kind, size, replace(base, drafts={"medusa": choice})
    elif axis == "epsilon":
        typical = replace(sampling, mode="typical", temperature=sampling.temperature or 0.7)
        for value in values:
            own = replace(typical, epsilon=value, delta=value**0.5)
            yield "", value, replace(base, sampling=own)
    else:
        for mode in ("exact", "typical"):
            for value in values:
                if value or mode == "exact":  # at temperature 0, all modes are greedy
                    own = replace(sampling, mode=mode, temperature=value)
                    yield mode, value, replace(base, sampling=own)


def _accuracies(choice: Choice) -> Accuracies:
    path = choice.calibration
    if path is None or not path.is_file():
        raise UserError(
            f"the drafter {choice.drafter} is not calibrated",
            f"run `medusa calibrate --run {choice.run.argument if choice.run else 'NAME'}` first",
        )
    return read_calibration(path).accuracies


def _digest(bench: Bench) -> str:
    """Returns a digest of everything on which a point's figures depend."""
    choice = bench.drafts["medusa"]
    config = choice.drafter and choice.drafter / "config.json"
    files = [path for path in (choice.tree.file, choice.calibration, config) if path]
    contents = [sha256_of(path) for path in files if path.is_file()]
    model = [weights_of(choice.source), choice.adapter and lora.digest(choice.adapter)]
    machine = environment(torch.device(resolve_device(bench.options.device)))

    def plain(value: Any) -> str:
        return str(getattr(value, "path", value))

    facts = [__version__, machine, model, contents, asdict(bench)]
    text = json.dumps(facts, sort_keys=True, default=plain)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
