"""`medusa bench --sweep`: one bench a value, kept as it is done, and the curves over them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_cli import __version__, console
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.files import write_json
from medusa_cli.runs.heads import read_calibration, stamp_of
from medusa_cli.runs.reading import read_json
from medusa_cli.runs.resolve import Choice
from medusa_cli.runs.run import provenance

if TYPE_CHECKING:
    from medusa_cli.benchmarks import Question
    from medusa_cli.benchmarks.sweep import Place
    from medusa_cli.decoding import Sampling

# The tree of a sweep over heads, where the run has none of its own.
USUAL_NODES = 16
METHODS = ("hf", "hf-lookup", "ar", "medusa")
# The flags that say what a sweep of the axis says itself.
OWN = {
    "nodes": {"tree"},
    "heads": set(),
    "epsilon": {"sampling"},
    "temperature": {"sampling", "temperature"},
    "batch": {"batch_size"},
    "context": set(),
}


@dataclass(frozen=True)
class Sweep:
    """What is measured at every point: the bench's own settings, of which a point changes one."""

    axis: str
    values: list[float]
    choice: Choice
    names: list[str]
    questions: "Sequence[Question]"
    tokens: int
    rule: "Sampling"
    title: str
    batch_size: int
    folder: Path
    place: dict[str, Any]

    def run(self) -> dict[str, Any]:
        """Measure every point that is not there yet, and write the sweep into the folder; its document."""
        from medusa_cli.benchmarks.sweep import AXES, Points, rows_of

        store, spent = Points(self.kept), list[float]()
        points, rows = list(self.points()), list[dict[str, Any]]()
        document: dict[str, Any] = {}
        for number, point in enumerate(points):
            asked = self.asked(point)
            bench = store.known(asked)
            if bench is None:
                console.info(self._progress(points, number, spent))
                began = time.monotonic()
                bench = self.bench(point)
                store.keep(asked, bench)
                spent.append(time.monotonic() - began)
            rows += rows_of(point, bench, plain=point.series == points[0].series)
            made = {**provenance(bench["backbone"]), "axis": self.axis, "unit": AXES[self.axis].unit}
            document = {**made, "title": self.title, "of": len(points), "points": rows}
            write_json(self.folder / f"sweep-{self.axis}.json", document)
        console.info(f"{len(points)} points, {len(points) - len(spent)} of them measured before")
        return document

    @property
    def kept(self) -> Path:
        """Where points and the trees that they need lie."""
        return self.folder / "sweep"

    def points(self) -> "Iterator[Place]":
        """The benches of the sweep, and what each of them sets; UsageError for values that do not fit the drafter."""
        from medusa_cli.benchmarks.sweep import Place

        match self.axis:
            case "nodes":
                yield from self._nodes()
            case "heads":
                yield from self._heads()
            case "epsilon":
                heat = self.rule.temperature or 0.7
                for value in self.values:
                    loose = {"mode": "typical", "temperature": heat, "epsilon": value, "delta": value**0.5}
                    yield Place("", value, {"rule": replace(self.rule, **loose)})
            case "temperature":
                for mode in ("exact", "typical"):
                    for value in self.values:
                        if value or mode == "exact":  # at 0 both are greedy
                            yield Place(mode, value, {"rule": replace(self.rule, mode=mode, temperature=value)})
            case "batch":
                yield from (Place("", value, {"batch_size": int(value)}) for value in self.values)
            case "context":
                yield from (Place("", value, {"context": int(value)}) for value in self.values)

    def _nodes(self) -> "Iterator[Place]":
        """Sparse, dense and dynamic trees of the same sizes (Medusa, Figure 6)."""
        from medusa_cli.benchmarks.sweep import Place, dense
        from medusa_cli.tree.search import largest

        accuracies, sizes = self._accuracies(), [int(value) for value in self.values]
        if max(sizes) > largest(accuracies):
            most = largest(accuracies)
            raise UsageError(f"--values {max(sizes)}: these heads allow {most:,} nodes", "use no more")
        yield from (Place("sparse", size, {"static": size}) for size in sizes)
        for tree in dict.fromkeys(dense(accuracies, size) for size in sizes):
            yield Place("dense", tree.size, {"tree": self._saved(tree, "dense")})
        yield from (Place("dynamic", size, {"dynamic": size}) for size in sizes)

    def _heads(self) -> "Iterator[Place]":
        """Trees of as many nodes as the drafter's own, over its first heads alone."""
        from medusa_cli.assembly import static_tree
        from medusa_cli.benchmarks.sweep import Place
        from medusa_cli.tree.search import largest, search

        accuracies, own = self._accuracies(), static_tree(self.choice)
        size = own.size if own is not None else USUAL_NODES
        for heads in [int(value) for value in self.values] or range(1, len(accuracies) + 1):
            if heads > len(accuracies):
                raise UsageError(f"--values {heads}: the drafter has {len(accuracies)} heads", "use no more")
            tree = search(accuracies[:heads], min(max(size, 2), largest(accuracies[:heads])))
            yield Place("", heads, {"tree": self._saved(tree, f"{heads}-heads")})

    def _accuracies(self) -> list[list[float]]:
        path = self.choice.calibration
        if path is None or not path.is_file():
            what = f"--sweep {self.axis}: {self.choice.drafter} is not calibrated"
            raise UserError(what, "run `medusa calibrate` first")
        return read_calibration(path).accuracies

    def _saved(self, tree: Any, name: str) -> Path:
        from medusa_cli.tree.files import save_tree

        path = self.kept / f"{name}-{tree.size}.tree.json"
        save_tree(path, tree, {})
        return path

    def _at(self, point: "Place") -> "tuple[Choice, Sampling, int]":
        """The drafting, the rule and the batch of a point."""
        setting = point.setting
        shape: dict[str, Any] = {key: setting[key] for key in ("static", "dynamic", "tree") if key in setting}
        choice = replace(self.choice, **{"static": None, "dynamic": None, "tree": None, "auto": False, **shape})
        used = choice if shape else self.choice
        return used, setting.get("rule", self.rule), setting.get("batch_size", self.batch_size)

    def asked(self, point: "Place") -> dict[str, Any]:
        """Everything that a point's figures depend on."""
        import torch

        from medusa_cli.backbone import adapter
        from medusa_cli.benchmarks.environment import environment
        from medusa_cli.benchmarks.sweep import digest

        choice, rule, together = self._at(point)
        tree = read_json(choice.tree, "the tree") if choice.tree is not None else None
        if isinstance(tree, dict) and "parents" in tree:  # not when it was made
            tree = [tree["parents"], tree.get("ranks")]
        return {
            "version": __version__,
            "environment": environment(torch.device("cpu")),
            "model": choice.model,
            "adapter": choice.adapter and adapter.digest(choice.adapter),
            "drafter": choice.drafter and stamp_of(choice.drafter),
            "trees": [tree, choice.static, choice.dynamic, choice.auto],
            "context": point.setting.get("context"),
            "methods": self.names,
            "questions": digest(self.questions),
            "tokens": self.tokens,
            "sampling": vars(rule),
            "batch_size": together,
            **self.place,
        }

    def bench(self, point: "Place") -> dict[str, Any]:
        """The document of the bench that a point is."""
        from medusa_cli.commands.beside import Beside
        from medusa_cli.commands.measuring import run_bench

        choice, rule, together = self._at(point)
        asked = list(self.questions)
        if (context := point.setting.get("context")) is not None:
            asked = self._filled(asked, context)
        more: Any = {"more": Beside(rule)}
        more |= {"batch_size": together, **self.place}
        return run_bench(choice, {}, self.names, asked, self.tokens, rule, self.title, **more)

    def _filled(self, questions: "list[Question]", context: int) -> "list[Question]":
        """The questions behind so many tokens of text; UsageError where the model takes no such prompt."""
        from transformers import AutoConfig, AutoTokenizer

        from medusa_cli.assets import model_dir
        from medusa_cli.benchmarks.sweep import filled

        folder, trusted = model_dir(self.choice.model), bool(self.place.get("trust_remote_code"))
        room = getattr(AutoConfig.from_pretrained(folder, trust_remote_code=trusted), "max_position_embeddings", None)
        if room is not None and context + self.tokens + 64 > room:  # the template adds some tokens
            raise UsageError(f"--values {context}: the model takes {room} tokens, the answer's included", "use fewer")
        return filled(questions, AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted), context)

    def _progress(self, points: "Sequence[Place]", number: int, spent: Sequence[float]) -> str:
        point = points[number]
        name = f"{self.axis} {point.x:g}" + (f", {point.series}" if point.series else "")
        seconds = int(sum(spent) / len(spent) * (len(points) - number)) if spent else 0
        left = f", about {seconds // 60}:{seconds % 60:02} left" if spent else ""
        return f"point {number + 1} of {len(points)}: {name}{left}"


def methods_of(names: Sequence[str]) -> list[str]:
    """The methods of a sweep; UsageError for those that it does not run."""
    if "medusa" not in names or any(name not in METHODS for name in names):
        raise UsageError(f"--methods {','.join(names)}: a sweep runs medusa, and {', '.join(METHODS[:-1])} beside it")
    return list(names)


def show_sweep(document: dict[str, Any]) -> None:
    """The points as a table, series by series."""
    from rich.table import Table

    table = Table(title=f"{document['title']}: sweep over {document['axis']}")
    for name in ("series", document["axis"], "tokens/s", "acceptance rate", "overhead", "nats a token"):
        table.add_column(name, justify="left" if name == "series" else "right")
    for row in sorted(document["points"], key=lambda row: (row["series"], row["x"])):
        cells = (f"{row['x']:g}", f"{row['tokens_per_s']:.1f}", f"{row['acceptance_rate']:.2f}")
        more = ("-" if row[key] is None else f"{row[key]:.3f}" for key in ("overhead", "nll"))
        table.add_row(row["series"], *cells, *more)
    console.result(table)
