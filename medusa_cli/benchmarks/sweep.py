"""Sweeps: what is varied, over which values, and the points measured so far, each kept by what it measured."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from medusa_cli.benchmarks.pieces import SavedBench
from medusa_cli.benchmarks.questions import Question
from medusa_cli.errors import UsageError
from medusa_cli.runs.files import write_json
from medusa_cli.runs.reading import read_object
from medusa_cli.tree import Tree
from medusa_cli.tree.search import Accuracies, expected_length


@dataclass(frozen=True)
class Axis:
    """What a sweep varies: its unit, the values it takes where none are given, whether they are whole, the least."""

    unit: str
    values: tuple[float, ...]
    whole: bool = True
    least: float = 1


AXES = {
    "nodes": Axis("nodes of the tree, root included", (2, 4, 8, 16, 32, 64)),
    "epsilon": Axis("epsilon of typical acceptance (delta is its root)", (0.01, 0.05, 0.09, 0.15, 0.25), False, 1e-6),
    "temperature": Axis("temperature", (0, 0.3, 0.7, 1.0), False, 0),
    "heads": Axis("heads drafted with", ()),
    "batch": Axis("questions side by side", (1, 2, 4, 8)),
    "context": Axis("tokens of the prompt", (128, 512, 1024)),
}


# The settings that say what a sweep of the axis says itself.
OWN = {
    "nodes": {"tree"},
    "heads": set(),
    "epsilon": {"sampling"},
    "temperature": {"sampling", "temperature"},
    "batch": {"batch_size"},
    "context": set[str](),
}

# The axes that say which trees are drafted over: what those accept alone is the question, unless lookups are asked for.
TREES = {"nodes", "heads"}


def parse_values(name: str, text: str | None) -> list[float]:
    """An axis's values in a list such as 2,4,8, rising, its usual ones for None; UsageError where one cannot be."""
    if name not in AXES:
        raise UsageError(f"@sweep {name!r} is unknown", f"use one of {', '.join(AXES)}")
    axis, found = AXES[name], set[float]()
    for word in text.split(",") if text is not None else ():
        try:
            value = float(word)
        except ValueError:
            value = float("nan")
        if not axis.least <= value < float("inf") or (axis.whole and value != int(value)):
            kind = "a whole number" if axis.whole else "a number"
            raise UsageError(f"@values {text!r}: {word.strip()!r} cannot be", f"use {kind} of {axis.least:g} or more")
        found.add(value)
    return sorted(found) if text is not None else list(axis.values)


@dataclass(frozen=True)
class Place:
    """One bench of a sweep: the series it belongs to, its value, and what is asked of the bench there."""

    series: str
    x: float
    setting: dict[str, Any] = field(default_factory=dict)


class Points:
    """The benches of sweeps on disk, each under a digest of everything that it measured.

    A point is written whole when its bench is done, so a sweep that was killed goes on where it was, and one that asks
    for what an earlier one measured takes it from there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, asked: dict[str, Any]) -> Path:
        text = json.dumps(asked, sort_keys=True, ensure_ascii=False, default=str)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"

    def known(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """The bench of such a point, None where it is still to be measured."""
        path = self.path(asked)
        return read_object(path, "the point")["bench"] if path.is_file() else None

    def keep(self, asked: dict[str, Any], bench: dict[str, Any]) -> None:
        write_json(self.path(asked), {"asked": asked, "bench": bench})


def rows_of(place: Place, bench: dict[str, Any], plain: bool) -> Iterator[dict[str, Any]]:
    """A point of the chart for each method of a bench; `plain`: for those that do not draft as well."""
    source = SavedBench("", bench)
    for name, one in source.methods.items():
        drafts = name in source.drafted
        if not drafts and not plain:
            continue
        rate, accepted = source.throughput(name), source.acceptance(name) if one["step_ms"] is not None else None
        quality = (bench.get("quality") or {}).get(name, {})
        yield {
            "series": f"{name}, {place.series}" if drafts and place.series else name,
            "x": place.x,
            "questions": one["questions"],
            "tokens_per_s": rate.value,
            "tokens_per_s_95": rate.interval,
            "acceptance_rate": accepted.value if accepted else 1.0,
            "acceptance_rate_95": accepted.interval if accepted else None,
            "speedup": one["speedup"],
            "overhead": one["overhead"],
            "nll": quality.get("nll"),
        }


def dense(accuracies: Accuracies, nodes: int) -> Tree:
    """The full tree of at most so many nodes, as wide everywhere on a level, that is expected to accept most.

    What a sparse tree is held against in Medusa's section 3.3.3.
    """
    best = Tree.root_only()

    def extend(widths: list[int]) -> None:
        nonlocal best
        for width in range(1, len(accuracies[len(widths)]) + 1 if len(widths) < len(accuracies) else 1):
            wider = [*widths, width]
            if full_size(wider) > nodes:
                break
            tree = full(wider)
            if expected_length(tree, accuracies) > expected_length(best, accuracies):
                best = tree
            extend(wider)

    extend([])
    return best


def full_size(widths: Sequence[int]) -> int:
    """Nodes of the full tree with so many children at each level, root included."""
    total = level = 1
    for width in widths:
        level *= width
        total += level
    return total


def full(widths: Sequence[int]) -> Tree:
    """The tree in which every node of a level has as many children as that level's width."""
    paths: list[list[int]] = [[]]
    every: list[list[int]] = []
    for width in widths:
        paths = [[*path, rank] for path in paths for rank in range(width)]
        every += paths
    return Tree.from_choices(every)


def filled(questions: Sequence[Question], tokenizer: Any, tokens: int) -> list[Question]:
    """The first turns alone, each behind as much of the other questions as makes about `tokens` tokens of it."""
    found = []
    for place, question in enumerate(questions):
        own = question.turns[0]
        room = tokens - len(tokenizer(own, add_special_tokens=False)["input_ids"])
        others = [other.turns[0] for other in (*questions[place + 1 :], *questions[:place])] or [own]
        text, ids = "\n\n".join(others) + "\n\n", list[int]()
        while room > 0 and len(ids) < room:
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        before = tokenizer.decode(ids[:room]) + "\n\n" if room > 0 else ""
        found.append(Question(question.id, question.category, (before + own,)))
    return found


def digest(questions: Sequence[Question]) -> str:
    """What tells these questions from any others."""
    text = json.dumps([asdict(question) for question in questions], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:20]
