"""What a report is made of: sections of words, tables and charts, from one or more saved benches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_cli.benchmarks.charts import Estimate
from medusa_cli.benchmarks.intervals import bootstrap, rate, ratio_of_rates

Cells = list[list[str]]


@dataclass(frozen=True)
class SavedBench:
    """A saved bench, and what its run holds beside it; `name` tells it from the others of the report."""

    name: str
    document: dict[str, Any]
    accuracies: Sequence[Sequence[float]] = ()
    training: Sequence[dict[str, Any]] = ()
    sweeps: Sequence[dict[str, Any]] = ()

    @property
    def methods(self) -> dict[str, Any]:
        found: dict[str, Any] = self.document["methods"]
        return found

    @property
    def baseline(self) -> str:
        return str(self.document["baseline"])

    @property
    def questions(self) -> int:
        """How many questions every method answered."""
        return int(next(iter(self.methods.values()))["questions"])

    def answers(self, method: str, category: str | None = None) -> list[dict[str, Any]]:
        """What each question (of a category) adds to a method's sums; none in documents of earlier versions."""
        answers = self.methods[method].get("answers", [])
        return [one for one in answers if category is None or one["category"] == category]

    def speedup(self, method: str, category: str | None = None) -> Estimate:
        """The speedup over the baseline, with its interval over questions."""
        one = self.methods[method]
        value = one["speedup"] if category is None else one["per_category"][category]["speedup"]
        pairs = zip(self.answers(method, category), self.answers(self.baseline, category), strict=True)
        columns = [[a["tokens"], a["seconds"], b["tokens"], b["seconds"]] for a, b in pairs]
        return Estimate(value, bootstrap(columns, ratio_of_rates) if method != self.baseline else None)

    def acceptance(self, method: str, category: str | None = None) -> Estimate:
        """Tokens a verified step gives, the model's own included, with its interval over questions."""
        one = self.methods[method]
        value = one["acceptance_rate"] if category is None else one["per_category"][category]["acceptance_rate"]
        stepped = [one for one in self.answers(method, category) if one.get("steps")]
        return Estimate(value, bootstrap([[a["accepted"] + a["steps"], a["steps"]] for a in stepped], rate))

    def throughput(self, method: str) -> Estimate:
        """Tokens a second, prefill included, with its interval over questions."""
        columns = [[a["tokens"], a["seconds"]] for a in self.answers(method)]
        return Estimate(self.methods[method]["tokens_per_s"], bootstrap(columns, rate))

    @property
    def drafted(self) -> list[str]:
        """The methods whose steps draft."""
        return [name for name, one in self.methods.items() if one["acceptance_rate"] > 1 or name in self._drafting]

    @property
    def _drafting(self) -> dict[str, Any]:
        return self.document.get("drafting") or {}

    def shape(self, method: str) -> dict[str, Any] | None:
        """The static tree that a method drafted over, as JSON; None for dynamic trees and where it was not kept."""
        return (self._drafting.get(method) or {}).get("shape")


@dataclass(frozen=True)
class Table:
    """Cells of text under a heading; its caption says what they count."""

    head: list[str]
    rows: Cells
    caption: str = ""


@dataclass(frozen=True)
class Chart:
    """A drawing as inline SVG; `wide` charts get a row of their own."""

    svg: str
    wide: bool = False


@dataclass
class Section:
    """A heading, words, and what shows it."""

    title: str
    words: str = ""
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)


def labelled(sources: Sequence[SavedBench]) -> Iterator[tuple[str, SavedBench, str]]:
    """Every method of every source with the name that it goes by in the report."""
    for source in sources:
        for method in source.methods:
            yield (method if len(sources) == 1 else f"{source.name}: {method}"), source, method


def names_of(sources: Sequence[SavedBench]) -> list[str]:
    """Those names in order: a method has the same colour in every chart."""
    return [name for name, _, _ in labelled(sources)]


def shown(bar: Estimate, form: str = ".2f") -> str:
    """A value and its interval as text."""
    if bar.interval is None:
        return format(bar.value, form)
    return f"{bar.value:{form}} ({bar.interval[0]:{form}} to {bar.interval[1]:{form}})"


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def sizes(sources: Sequence[SavedBench]) -> str:
    """The sample as words for a chart's title."""
    counts = sorted({source.questions for source in sources})
    return f"{' / '.join(map(str, counts))} question{'s' if counts != [1] else ''}"
