"""A bench: methods over questions, loaded, measured and summarised into one document."""

import copy
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from medusa_cli.assembly import Assembled, describe, growth_of, looked_up, with_lookup
from medusa_cli.assets import gguf_path
from medusa_cli.backbone import Backbone
from medusa_cli.backbone.network import resolve_device
from medusa_cli.benchmarks.baseline import Baseline, is_plain, let_go, measure_baseline
from medusa_cli.benchmarks.drift import drift
from medusa_cli.benchmarks.measure import Result, measure
from medusa_cli.benchmarks.methods import Method, build_methods
from medusa_cli.benchmarks.questions import Question
from medusa_cli.benchmarks.report import markdown, summarise
from medusa_cli.benchmarks.side_by_side import load_competitors
from medusa_cli.decoding import Lookup, Pace, Sampling
from medusa_cli.drafters import Drafter
from medusa_cli.engines.kernels import BITS
from medusa_cli.engines.load import BackboneOptions
from medusa_cli.runs.accuracies import STAMP, stamp_of
from medusa_cli.runs.files import write_atomic, write_json
from medusa_cli.runs.made import describe_drafter
from medusa_cli.runs.resolve import Choice
from medusa_cli.runs.run import provenance
from medusa_cli.tree import Growth, Tree

log = logging.getLogger(__name__)
Shape = Tree | Growth | Pace | Lookup


class Watcher(Protocol):
    """Who sees a bench's methods at work."""

    def tokens(self, name: str, new: list[int]) -> None:
        """A method gave new tokens; none: its answer ended."""

    def answered(self, result: Result) -> None:
        """All of the methods have answered a question."""


# Given the bench, the backbone and the methods that are to run on it, a watcher for as long as they do.
Watch = Callable[["Bench", Backbone, Sequence[str]], AbstractContextManager[Watcher]]
More = Callable[[Backbone, Sequence[Result]], dict[str, Any]]


@dataclass(frozen=True)
class Bench:
    """What is measured: methods by name, up to `tokens` new tokens a turn, by a rule, of a model in a place.

    place: what `assemble` takes beside the choice. competitors: the drafters of methods that are named for them; gguf:
    what llama.cpp reads; draft_model: what drafts for hf-assisted.
    """

    choice: Choice
    names: list[str]
    questions: list[Question]
    tokens: int
    rule: Sampling
    title: str
    place: BackboneOptions
    batch_size: int = 1
    competitors: Mapping[str, Choice] = field(default_factory=dict)
    gguf: Path | None = None
    draft_model: str | None = None

    def run(self, load: Callable[[Choice], Assembled], watch: Watch, more: More = lambda *_: {}) -> dict[str, Any]:
        """The document of the bench, with what `more` finds in the results; the model is loaded once at a time."""
        others = [name for name in self.names if is_plain(name)]
        if others and "lookup" in self.names:
            self._check_lookups(load)
        base = self._baseline(others, watch) if others else None
        made = load(self.choice)
        backbone = made.backbone
        drafted, said = self._drafted(made)
        ours = [name for name in self.names if name not in others]
        file = self.gguf or gguf_path(self.choice.model) if "llama.cpp" in ours else None
        alone = {"lookup": (None, looked_up(backbone))} if "lookup" in ours else {}
        ways = build_methods(ours, backbone, {**drafted, **alone}, self.rule, file, self.batch_size)
        found = self._measured(backbone, ways, watch, base.results if base else ())
        results = [Result(one.question, {name: one.answers[name] for name in self.names}) for one in found]
        moved = drift(backbone, base.remembered) if base and base.remembered else None
        return {
            "title": self.title,
            "facts": self._facts(backbone, {name: words_of(*one) for name, one in said.items()}, base, moved),
            **provenance(backbone.identity),
            "drafting": {name: one for name, (one, _) in said.items()},
            "max_new_tokens": self.tokens,
            "batch_size": self.batch_size,
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "engine": backbone.engine.name,
            "kernel": backbone.engine.kernel.name,
            "device": str(backbone.device),
            "sampling": vars(self.rule),
            "rounding": moved,
            **summarise(results, compared=self.rule.greedy),
            **more(backbone, results),
        }

    def _check_lookups(self, load: Callable[[Choice], Assembled]) -> None:
        """UsageError where nothing can be looked up: before minutes go into a baseline."""
        # Elsewhere no steps are captured; here only a loaded model tells.
        if torch.device(resolve_device(self.place["device"])).type == "cuda":
            looked_up(load(self.choice).backbone)
            let_go()

    def _baseline(self, names: Sequence[str], watch: Watch) -> Baseline:
        def measured(backbone: Backbone, ways: Mapping[str, Method]) -> list[Result]:
            return self._measured(backbone, ways, watch, (), compare=False)

        return measure_baseline(names, self.choice, self.place, self.rule, measured, self.draft_model)

    def _measured(
        self,
        backbone: Backbone,
        ways: Mapping[str, Method],
        watch: Watch,
        known: Sequence[Result],
        compare: bool = True,
    ) -> list[Result]:
        results = list[Result]()
        with watch(self, backbone, list(ways)) as watcher:
            for result in measure(
                backbone,
                ways,
                self.questions,
                self.tokens,
                batch_size=self.batch_size,
                compare=compare and self.rule.greedy,
                watch=watcher.tokens,
                known=known,
            ):
                results.append(result)
                watcher.answered(result)
        return results

    def _facts(
        self,
        backbone: Backbone,
        drafting: Mapping[str, str],
        base: Baseline | None,
        moved: Mapping[str, float] | None,
    ) -> list[str]:
        """What to know of the figures."""
        kind = str(backbone.dtype).removeprefix("torch.")
        facts = [
            f"{self.choice.model}, {kind} on {backbone.device}, {backbone.engine.title}, {len(self.questions)} "
            f"questions, up to {self.tokens} new tokens a turn, "
            f"{self.rule.mode if not self.rule.greedy else 'greedy'} decoding.",
            *(f"{name}: {words}." for name, words in drafting.items()),
        ]
        if base is not None and base.dtype != backbone.dtype:
            facts.append(f"hf ran in {str(base.dtype).removeprefix('torch.')}.")
        if self.draft_model:
            facts.append(f"hf-assisted: transformers' assisted generation, {self.draft_model} drafts.")
        if moved is not None:
            facts.append(
                f"Rounded to {BITS[backbone.engine.kernel.name]} bits, the model moves by {moved['kl']:.4f} nats a "
                f"token and chooses the same for {moved['agreement']:.1%} of {moved['tokens']:,} tokens; hf is not "
                "rounded."
            )
        if self.batch_size > 1:
            facts.append(
                f"{self.batch_size} questions side by side; a batch's seconds are shared among its answers by their "
                "tokens."
            )
        return facts

    def _drafted(self, made: Assembled) -> tuple[dict[str, tuple[Drafter, Shape]], dict[str, tuple[Any, Shape]]]:
        """Each drafting method's drafter and what it drafts over, and what the document says of both."""
        chosen, drafted = dict(self.competitors), load_competitors(self.competitors, made.backbone)
        for name, both in drafted.items():
            log.info("%s: %s", name, words_of(drafting(chosen[name], *both), both[1]))
        if made.drafter is not None and made.shape is not None:
            chosen["medusa"], drafted["medusa"] = self.choice, (made.drafter, made.shape)
        if "medusa-dynamic" in self.names and "medusa-dynamic" not in drafted:
            one, (drafter, tree) = chosen["medusa"], drafted["medusa"]  # the same drafter, whichever that is
            grown = (
                tree
                if one.dynamic is not None
                else with_lookup(one, growth_of(one, tree, drafter), made.backbone, drafter)
            )
            chosen["medusa-dynamic"], drafted["medusa-dynamic"] = one, (drafter, grown)
        if "medusa-alone" in self.names:
            one, (drafter, shape) = chosen["medusa"], drafted["medusa"]
            chosen["medusa-alone"], drafted["medusa-alone"] = one, (drafter, without_lookup(shape))
        drafted = {name: drafted[name] for name in self.names if name in drafted}
        return drafted, {name: (drafting(chosen[name], *both), both[1]) for name, both in drafted.items()}


def drafting(choice: Choice, drafter: Drafter, shape: Shape) -> dict[str, Any]:
    """What drafts and when it was made, and over which trees; tree: the file it is from, None where it was searched."""
    assert choice.drafter is not None
    over = shape.over if isinstance(shape, Lookup) else shape
    return {
        "drafter": str(choice.drafter),
        "kind": drafter.name,
        "created": describe_drafter(choice.drafter).provenance.created,
        STAMP: stamp_of(choice.drafter),
        "tree": str(choice.tree) if choice.tree else None,
        "dynamic": isinstance(over, Growth),
        "auto": isinstance(over, Pace),
        "lookup": over is not shape,
        "nodes": shape.size,
        "shape": shape.to_json() if isinstance(shape, Tree) else None,
    }


def without_lookup(shape: Shape) -> Shape:
    """A shape for the drafter alone, which learns nothing of what is decoded over another one."""
    over = shape.over if isinstance(shape, Lookup) else shape
    return copy.deepcopy(over) if isinstance(over, Pace) else over


def words_of(one: Mapping[str, Any], shape: Shape) -> str:
    """A drafter and its trees in a line."""
    day = f" of {one['created'][:10]}" if one["created"] else ""
    return f"{one['kind']} drafter {one['drafter']}{day}, {describe(shape)}"


def save(document: dict[str, Any], folder: Path) -> Path:
    """Write a bench as JSON and Markdown, under a name of its own; the Markdown's path."""
    made = document["created"].replace(":", "").replace("+0000", "")
    names = itertools.chain([made], (f"{made}_{number}" for number in itertools.count(2)))
    folder.mkdir(parents=True, exist_ok=True)
    stem = next(name for name in names if _free(folder, name))  # two may end in one second
    write_json(folder / f"{stem}.json", document)
    write_atomic(folder / f"{stem}.md", markdown(document))
    return folder / f"{stem}.md"


def _free(folder: Path, name: str) -> bool:
    """Take a name for a bench, in one move, so that no other process can; False where it is another's already."""
    if (folder / f"{name}.json").exists():
        return False
    try:
        (folder / f"{name}.md").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
