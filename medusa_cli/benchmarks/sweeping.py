"""One bench for every value of what is swept over, each kept as it is done."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from medusa_cli import __version__
from medusa_cli.assembly import static_tree
from medusa_cli.assets import model_dir
from medusa_cli.backbone import adapter
from medusa_cli.backbone.identity import weights_of
from medusa_cli.benchmarks.bench import Bench
from medusa_cli.benchmarks.environment import environment
from medusa_cli.benchmarks.questions import Question
from medusa_cli.benchmarks.sweep import AXES, Place, Points, dense, digest, filled, rows_of
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.accuracies import UNKNOWN, read_calibration, stamp_of
from medusa_cli.runs.files import write_json
from medusa_cli.runs.reading import read_json
from medusa_cli.runs.run import provenance
from medusa_cli.tree import Tree
from medusa_cli.tree.saved import save_tree
from medusa_cli.tree.search import largest, search

# The tree of a sweep over heads, where the run has none of its own.
USUAL_NODES = 16
METHODS = ("hf", "hf-lookup", "ar", "medusa")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sweep:
    """What is measured at every point: a bench's own settings, of which a point changes one."""

    axis: str
    values: list[float]
    base: Bench
    folder: Path

    def run(self, measured: Callable[[Bench], dict[str, Any]]) -> dict[str, Any]:
        """Let `measured` run every point that is not there yet, and write the sweep into the folder; its document."""
        store, spent = Points(self.kept), list[float]()
        points, rows = list(self.points()), list[dict[str, Any]]()
        document: dict[str, Any] = {}
        for number, point in enumerate(points):
            asked = self.asked(point)
            bench = store.known(asked)
            if bench is None:
                log.info(self._progress(points, number, spent))
                began = time.monotonic()
                bench = measured(self.bench(point))
                store.keep(asked, bench)
                spent.append(time.monotonic() - began)
            rows += rows_of(point, bench, plain=point.series == points[0].series)
            made = {**provenance(bench["backbone"]), "axis": self.axis, "unit": AXES[self.axis].unit}
            document = {**made, "title": self.base.title, "of": len(points), "points": rows}
            write_json(self.folder / f"sweep-{self.axis}.json", document)
        log.info("%d points, %d of them measured before", len(points), len(points) - len(spent))
        return document

    @property
    def kept(self) -> Path:
        """Where points and the trees that they need lie."""
        return self.folder / "sweep"

    def points(self) -> Iterator[Place]:
        """The benches of the sweep, and what each of them sets; UsageError for values that do not fit the drafter."""
        match self.axis:
            case "nodes":
                yield from self._nodes()
            case "heads":
                yield from self._heads()
            case "epsilon":
                heat = self.base.rule.temperature or 0.7
                for value in self.values:
                    loose = {"mode": "typical", "temperature": heat, "epsilon": value, "delta": value**0.5}
                    yield Place("", value, {"rule": replace(self.base.rule, **loose)})
            case "temperature":
                for mode in ("exact", "typical"):
                    for value in self.values:
                        if value or mode == "exact":  # at 0 both are greedy
                            yield Place(mode, value, {"rule": replace(self.base.rule, mode=mode, temperature=value)})
            case "batch":
                yield from (Place("", value, {"batch_size": int(value)}) for value in self.values)
            case "context":
                yield from (Place("", value, {"context": int(value)}) for value in self.values)

    def _nodes(self) -> Iterator[Place]:
        """Sparse, dense and dynamic trees of the same sizes (Medusa, Figure 6)."""
        accuracies, sizes = self._accuracies(), [int(value) for value in self.values]
        if max(sizes) > largest(accuracies):
            most = largest(accuracies)
            raise UsageError(f"@values {max(sizes)}: these heads allow {most:,} nodes", "use no more")
        yield from (Place("sparse", size, {"static": size}) for size in sizes)
        for tree in dict.fromkeys(dense(accuracies, size) for size in sizes):
            yield Place("dense", tree.size, {"tree": self._saved(tree, "dense")})
        yield from (Place("dynamic", size, {"dynamic": size}) for size in sizes)

    def _heads(self) -> Iterator[Place]:
        """Trees of as many nodes as the drafter's own, over its first heads alone."""
        accuracies, own = self._accuracies(), static_tree(self.base.choice)
        size = own.size if own is not None else USUAL_NODES
        for heads in [int(value) for value in self.values] or range(1, len(accuracies) + 1):
            if heads > len(accuracies):
                raise UsageError(f"@values {heads}: the drafter has {len(accuracies)} heads", "use no more")
            tree = search(accuracies[:heads], min(max(size, 2), largest(accuracies[:heads])))
            yield Place("", heads, {"tree": self._saved(tree, f"{heads}-heads")})

    def _accuracies(self) -> list[list[float]]:
        path = self.base.choice.calibration
        if path is None or not path.is_file():
            what = f"@sweep {self.axis}: {self.base.choice.drafter} is not calibrated"
            raise UserError(what, "run `medusa calibrate` first")
        return read_calibration(path).accuracies

    def _saved(self, tree: Tree, name: str) -> Path:
        path = self.kept / f"{name}-{tree.size}.tree.json"
        save_tree(path, tree, {})
        return path

    def asked(self, point: Place) -> dict[str, Any]:
        """Everything that a point's figures depend on."""
        bench = self._at(point)
        choice = bench.choice
        tree = read_json(choice.tree, "the tree") if choice.tree is not None else None
        if isinstance(tree, dict) and "parents" in tree:  # not when it was made
            tree = [tree["parents"], tree.get("ranks")]
        source = choice.calibration
        heads = read_calibration(source) if source is not None and source.is_file() else UNKNOWN
        return {
            "version": __version__,
            "environment": environment(torch.device("cpu")),
            "model": [choice.model, weights_of(choice.model)],
            "adapter": choice.adapter and adapter.digest(choice.adapter),
            "drafter": choice.drafter and stamp_of(choice.drafter),
            "trees": [tree, choice.static, choice.dynamic, choice.auto, choice.lookup],
            "calibration": [heads.accuracies, heads.temperatures],
            "context": point.setting.get("context"),
            "methods": bench.names,
            "questions": digest(bench.questions),
            "tokens": bench.tokens,
            "sampling": vars(bench.rule),
            "batch_size": bench.batch_size,
            **bench.place,
        }

    def bench(self, point: Place) -> Bench:
        """The bench that a point is."""
        bench, context = self._at(point), point.setting.get("context")
        return bench if context is None else replace(bench, questions=self._filled(context))

    def _at(self, point: Place) -> Bench:
        """With the drafting, the rule and the batch of a point."""
        shape = {key: one for key, one in point.setting.items() if key in ("static", "dynamic", "tree")}
        more = {key: one for key, one in point.setting.items() if key in ("rule", "batch_size")}
        if shape:
            more["choice"] = replace(
                self.base.choice, **{"static": None, "dynamic": None, "tree": None, "auto": False, **shape}
            )
        return replace(self.base, **more)

    def _filled(self, context: int) -> list[Question]:
        """The questions behind so many tokens of text; UsageError where the model takes no such prompt."""
        folder, trusted = model_dir(self.base.choice.model), bool(self.base.place.get("trust_remote_code"))
        room = getattr(AutoConfig.from_pretrained(folder, trust_remote_code=trusted), "max_position_embeddings", None)
        if room is not None and context + self.base.tokens + 64 > room:  # the template adds some tokens
            raise UsageError(f"@values {context}: the model takes {room} tokens, the answer's included", "use fewer")
        return filled(self.base.questions, AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted), context)

    def _progress(self, points: Sequence[Place], number: int, spent: Sequence[float]) -> str:
        point = points[number]
        name = f"{self.axis} {point.x:g}" + (f", {point.series}" if point.series else "")
        seconds = int(sum(spent) / len(spent) * (len(points) - number)) if spent else 0
        left = f", about {seconds // 60}:{seconds % 60:02} left" if spent else ""
        return f"point {number + 1} of {len(points)}: {name}{left}"


def methods_of(names: Sequence[str]) -> list[str]:
    """The methods of a sweep; UsageError for those that it does not run."""
    if "medusa" not in names or any(name not in METHODS for name in names):
        raise UsageError(f"@methods {','.join(names)}: a sweep runs medusa, and {', '.join(METHODS[:-1])} beside it")
    return list(names)
