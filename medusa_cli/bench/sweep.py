"""Sweeps: one bench a value of an axis. A killed sweep goes on, and a point measured before is not measured again."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoTokenizer

from medusa_cli import __version__
from medusa_cli.api import static_tree
from medusa_cli.assets import model_dir
from medusa_cli.bench.methods import split_names
from medusa_cli.bench.questions import Question
from medusa_cli.bench.run import Bench, environment
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import lora
from medusa_cli.model.identity import weights_of
from medusa_cli.runs.accuracies import UNKNOWN, Heads, read_calibration, stamp_of
from medusa_cli.runs.io import read_json, read_object, write_json
from medusa_cli.runs.run import provenance
from medusa_cli.tree.io import save_tree
from medusa_cli.tree.search import largest, search


class Axis(NamedTuple):
    """A varied setting: its unit, its usual values, the least allowed one, and the flags that it replaces."""

    unit: str
    values: tuple[float, ...]
    least: float = 1
    whole: bool = True
    replaces: frozenset[str] = frozenset()


AXES = {
    "nodes": Axis("nodes of the tree, root included", (2, 4, 8, 16, 32, 64), replaces=frozenset({"tree"})),
    "heads": Axis("heads drafted with", ()),
    "epsilon": Axis(
        "epsilon of typical acceptance (delta is its root)",
        (0.01, 0.05, 0.09, 0.15, 0.25),
        1e-6,
        False,
        frozenset({"sampling"}),
    ),
    "temperature": Axis("temperature", (0, 0.3, 0.7, 1.0), 0, False, frozenset({"sampling", "temperature"})),
    "batch": Axis("questions side by side", (1, 2, 4, 8), replaces=frozenset({"batch_size"})),
    "context": Axis("tokens of the prompt", (128, 512, 1024)),
}
# On these axes the trees are the question: n-gram drafts are added on request only.
TREE_AXES = {"nodes", "heads"}
METHODS = ("hf", "hf-lookup", "ar", "medusa")
DEFAULT_NODES = 16  # of a sweep over heads, for a run without a tree
TEMPLATE_TOKENS = 64
log = logging.getLogger(__name__)


class Point(NamedTuple):
    """One bench of a sweep: a value of the axis in a series."""

    series: str
    x: float
    bench: Bench


def parse_values(name: str, text: str | None) -> list[float]:
    """Returns the rising values of a list such as 2,4,8, or the axis's usual ones; raises UsageError for a bad one."""
    if name not in AXES:
        raise UsageError(f"@sweep {name!r} is unknown", f"use one of {', '.join(AXES)}")
    axis, values = AXES[name], set[float]()
    for word in text.split(",") if text is not None else ():
        try:
            value = float(word)
        except ValueError:
            value = float("nan")
        if not axis.least <= value < float("inf") or (axis.whole and value != int(value)):
            kind = "a whole number" if axis.whole else "a number"
            raise UsageError(f"@values {text!r}: {word.strip()!r} is not valid", f"use {kind} >= {axis.least:g}")
        values.add(value)
    return sorted(values) if text is not None else list(axis.values)


def check_methods(text: str) -> None:
    """Raises UsageError unless the methods are medusa and some of hf, hf-lookup and ar."""
    names = split_names(text)
    if "medusa" not in names or any(name not in METHODS for name in names):
        raise UsageError(f"@methods {text} cannot be swept", f"use medusa, and {', '.join(METHODS[:-1])} beside it")


def sweep(
    base: Bench, axis: str, values: Sequence[float], folder: Path, measure: Callable[[Bench], dict[str, Any]]
) -> dict[str, Any]:
    """Measures the points that are not in the folder yet, writes sweep-AXIS.json there and returns it."""
    points, rows, known = list(_points(base, axis, values, folder / "sweep")), list[dict[str, Any]](), 0
    document: dict[str, Any] = {}
    for number, point in enumerate(points, 1):
        settings = _settings(point.bench)
        text = json.dumps(settings, sort_keys=True, ensure_ascii=False, default=str)
        path = folder / "sweep" / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"
        if path.is_file():
            known += 1
        else:
            log.info("point %d of %d: %s %g %s", number, len(points), axis, point.x, point.series)
            write_json(path, {"asked": settings, "bench": measure(point.bench)})
        result = read_object(path, "the point")["bench"]
        rows += _rows(point, result, plain=point.series == points[0].series)
        facts = {"axis": axis, "unit": AXES[axis].unit, "title": base.title, "of": len(points)}
        document = {**provenance(result["backbone"]), **facts, "points": rows}
        write_json(folder / f"sweep-{axis}.json", document)
    log.info("%d points, %d of them measured before", len(points), known)
    return document


def _points(base: Bench, axis: str, values: Sequence[float], folder: Path) -> Iterator[Point]:
    """Yields the benches of a sweep; raises UsageError for values that do not fit the drafter."""
    sampling = base.sampling
    no_tree: Mapping[str, Any] = {"static": None, "dynamic": None, "tree": None, "auto": False}
    if axis == "nodes":
        sizes, limit = [int(value) for value in values], largest(_heads(base).accuracies)
        if max(sizes) > limit:
            raise UsageError(f"@values {max(sizes)}: these heads allow {limit:,} nodes", "use no more")
        for kind in ("static", "dynamic"):
            for size in sizes:
                yield Point(kind, size, replace(base, choice=replace(base.choice, **{**no_tree, kind: size})))
    elif axis == "heads":
        accuracies, own = _heads(base).accuracies, static_tree(base.choice)
        for count in [int(value) for value in values] or range(1, len(accuracies) + 1):
            if count > len(accuracies):
                raise UsageError(f"@values {count}: the drafter has {len(accuracies)} heads", "use no more")
            nodes = max(2, own.size if own is not None else DEFAULT_NODES)
            path = folder / f"{count}-heads.tree.json"
            save_tree(path, search(accuracies[:count], min(nodes, largest(accuracies[:count]))), {})
            yield Point("", count, replace(base, choice=replace(base.choice, **{**no_tree, "tree": path})))
    elif axis == "epsilon":
        for value in values:
            loose = replace(sampling, mode="typical", temperature=sampling.temperature or 0.7)
            yield Point("", value, replace(base, sampling=replace(loose, epsilon=value, delta=value**0.5)))
    elif axis == "temperature":
        for mode in ("exact", "typical"):
            for value in values:
                if value or mode == "exact":  # at 0 both are greedy
                    drawn = replace(sampling, mode=mode, temperature=value)
                    yield Point(mode, value, replace(base, sampling=drawn))
    elif axis == "batch":
        yield from (Point("", value, replace(base, batch_size=int(value))) for value in values)
    elif axis == "context":
        for value in values:
            yield Point("", value, replace(base, questions=_long_questions(base, int(value))))


def _heads(bench: Bench) -> Heads:
    path = bench.choice.calibration
    if path is None or not path.is_file():
        raise UserError(f"the drafter {bench.choice.drafter} is not calibrated", "run `medusa calibrate` first")
    return read_calibration(path)


def _settings(bench: Bench) -> dict[str, Any]:
    """Returns everything that a point's figures depend on."""
    choice = bench.choice
    tree = read_json(choice.tree, "the tree") if choice.tree is not None else None
    if isinstance(tree, dict):  # not when it was made
        tree = [tree.get("parents"), tree.get("ranks")]
    calibrated = choice.calibration is not None and choice.calibration.is_file()
    heads = _heads(bench) if calibrated else UNKNOWN
    return {
        "version": __version__,
        "environment": environment(torch.device("cpu")),
        "model": [choice.model, weights_of(choice.model)],
        "adapter": choice.adapter and lora.digest(choice.adapter),
        "drafter": choice.drafter and stamp_of(choice.drafter),
        "trees": [tree, choice.static, choice.dynamic, choice.auto, choice.lookup],
        "calibration": [heads.accuracies, heads.temperatures],
        "methods": bench.methods,
        "questions": [asdict(question) for question in bench.questions],
        "tokens": bench.max_new_tokens,
        "sampling": vars(bench.sampling),
        "batch_size": bench.batch_size,
        "options": asdict(bench.options),
    }


def _rows(point: Point, bench: Mapping[str, Any], plain: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each method of a bench; for methods that do not draft only if `plain`."""
    keys = ("questions", "tokens_per_s", "tokens_per_s_95", "acceptance_length", "acceptance_length_95", "speedup")
    for name, figures in bench["methods"].items():
        drafts = name in bench["drafting"]
        if drafts or plain:
            series = f"{name}, {point.series}" if drafts and point.series else name
            nll = (bench.get("quality") or {}).get(name, {}).get("nll")
            values = {key: figures[key] for key in (*keys, "overhead")}
            yield {"series": series, "x": point.x, **values, "nll": nll}


def _long_questions(bench: Bench, tokens: int) -> list[Question]:
    """Returns first turns, each behind as much text of the other questions as makes some `tokens` tokens."""
    folder, trusted = model_dir(bench.choice.model), bench.options.trust_remote_code
    limit = getattr(AutoConfig.from_pretrained(folder, trust_remote_code=trusted), "max_position_embeddings", None)
    if limit is not None and tokens + bench.max_new_tokens + TEMPLATE_TOKENS > limit:
        raise UsageError(f"@values {tokens}: the model takes {limit} tokens, the answer's included", "use fewer")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    return fill(bench.questions, tokenizer, tokens)


def fill(questions: Sequence[Question], tokenizer: Any, tokens: int) -> list[Question]:
    """Puts text of the other questions before each first turn, up to `tokens` tokens; later turns are dropped."""
    filled = []
    for index, question in enumerate(questions):
        turn = question.turns[0]
        others = [other.turns[0] for other in (*questions[index + 1 :], *questions[:index])] or [turn]
        missing = tokens - len(tokenizer(turn, add_special_tokens=False)["input_ids"])
        ids: list[int] = []
        while len(ids) < missing:
            ids += tokenizer("\n\n".join(others) + "\n\n", add_special_tokens=False)["input_ids"]
        before = tokenizer.decode(ids[:missing]) + "\n\n" if missing > 0 else ""
        filled.append(Question(question.id, question.category, (before + turn,)))
    return filled
