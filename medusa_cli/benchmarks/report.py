"""From measurements to figures: speedup, acceptance rate, overhead, identity, by method and by category."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from medusa_cli.benchmarks.escaped import escaped, row_of
from medusa_cli.benchmarks.measure import Answers, Result, reference_of
from medusa_cli.benchmarks.tally import Tally, by_position


def baseline_of(names: Sequence[str]) -> str:
    """The method speedups are over: hf, else our plain loop, else the first."""
    return next((name for name in ("hf", "ar") if name in names), names[0])


def summarise(results: Sequence[Result], compared: bool = True) -> dict[str, Any]:
    """One entry a method under "methods"; see the README for what each figure means. `compared` False: no identity."""
    names = list(results[0].answers)
    baseline, reference = baseline_of(names), reference_of(names)
    plain_step = _stats(results, "ar").step_s if "ar" in names else None
    methods = {}
    for name in names:
        answers = [result.answers[name] for result in results]
        stats = _stats(results, name)
        stepped = stats.steps > 0
        rates = [answer.tokens / answer.seconds for answer in answers]
        ratios = [_rate([result.answers[name]]) / _rate([result.answers[baseline]]) for result in results]
        same = sum(
            answer.turns == result.answers[reference].turns for answer, result in zip(answers, results, strict=True)
        )
        methods[name] = {
            "tokens_per_s": _rate(answers),
            "speedup": _rate(answers) / _rate([result.answers[baseline] for result in results]),
            "speedup_quartiles": _quartiles(ratios),
            "acceptance_rate": stats.acceptance_rate if stepped else 1.0,
            "overhead": stats.step_s / plain_step if stepped and plain_step else None,
            "step_ms": 1e3 * stats.step_s if stepped else None,
            "draft_share": stats.draft_s / (stats.draft_s + stats.verify_s) if stepped else None,
            "identical": same if compared else None,
            "questions": len(results),
            "tokens": sum(answer.tokens for answer in answers),
            "seconds": sum(answer.seconds for answer in answers),
            "tokens_per_s_quartiles": _quartiles(rates),
            "depths": stats.by_depth(),
            "by_position": by_position(stats.by_depth()),
            "hits": stats.of_tree(stats.usual_size),
            "answers": [_answer(result, name) for result in results],
            "per_category": _categories(results, name, baseline),
            "divergences": [
                {"question": result.question.id, **asdict(found)}
                for result in results
                if compared and (found := result.answers[name].divergence) is not None
            ],
        }
    return {"baseline": baseline, "reference": reference, "methods": methods}


def _answer(result: Result, name: str) -> dict[str, Any]:
    """What one question adds to a method's sums."""
    answer, stats = result.answers[name], result.answers[name].stats
    found: dict[str, Any] = {"question": result.question.id, "category": result.question.category}
    found |= {"tokens": answer.tokens, "seconds": answer.seconds}
    if stats is not None:
        kept = ("steps", "drafted", "accepted", "draft_s", "verify_s", "prefill_s")
        found |= {key: getattr(stats, key) for key in kept} | {"depths": stats.by_depth()}
    return found


def _rate(answers: Sequence[Answers]) -> float:
    """Tokens a second over several answers."""
    return sum(answer.tokens for answer in answers) / max(sum(answer.seconds for answer in answers), 1e-9)


def _stats(results: Sequence[Result], name: str) -> Tally:
    total = Tally()
    for result in results:
        if (stats := result.answers[name].stats) is not None:
            total += stats
    return total


def _quartiles(values: Sequence[float]) -> list[float]:
    """The 25th, 50th and 75th percentile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else list(values) * 3


def _categories(results: Sequence[Result], name: str, baseline: str) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for category in dict.fromkeys(result.question.category for result in results):
        part = [result for result in results if result.question.category == category]
        rate = _rate([result.answers[name] for result in part])
        stats = _stats(part, name)
        found[category] = {
            "tokens_per_s": rate,
            "speedup": rate / _rate([result.answers[baseline] for result in part]),
            "acceptance_rate": stats.acceptance_rate if stats.steps else 1.0,
        }
    return found


def markdown(document: dict[str, Any]) -> str:
    """The report as a page of Markdown."""
    rows = figures(document, wide=True)
    lines = [f"# {escaped(document['title'])}", "", *map(escaped, document["facts"]), ""]
    lines += [row_of(rows[0]), "|" + "---|" * len(rows[0])]
    lines += map(row_of, rows[1:])
    for title, (names, *grid) in by_category(document):
        lines += ["", title, "", row_of(names), "|---|" + "---|" * len(names[1:])]
        lines += map(row_of, grid)
    return "\n".join(lines) + "\n"


def by_category(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Speedups and acceptance rates as titled tables of text cells, the heading first; none for one category."""
    methods = document["methods"]
    drafted = [name for name, one in methods.items() if one["acceptance_rate"] > 1]
    found = []
    for title, key, names in (
        (f"Speedup over {document['baseline']} by category", "speedup", list(methods)),
        ("Acceptance rate by category", "acceptance_rate", drafted),
    ):
        categories = list(next(iter(methods.values()))["per_category"])
        if len(categories) > 1 and names:
            cells = [[f"{methods[name]['per_category'][one][key]:.2f}" for name in names] for one in categories]
            found.append((title, [["category", *names], *([a, *b] for a, b in zip(categories, cells, strict=True))]))
    return found


def figures(document: dict[str, Any], wide: bool = False) -> list[list[str]]:
    """The closing table as text cells, the heading first; `wide` has a step's time and its share of drafting too."""
    rows = [
        [
            "method",
            "tokens/s",
            f"speedup over {document['baseline']}",
            "25-75 %",
            "acceptance rate",
            "overhead",
            "identical",
            *(("step, ms", "drafting") if wide else ()),
        ]
    ]
    for name, one in document["methods"].items():
        low, _, high = one["speedup_quartiles"]
        same = "-" if one["identical"] is None else f"{one['identical']}/{one['questions']}"
        rows.append(
            [
                name,
                f"{one['tokens_per_s']:.1f}",
                f"{one['speedup']:.2f}",
                f"{low:.2f}-{high:.2f}",
                f"{one['acceptance_rate']:.2f}",
                _cell(one["overhead"], ".2f"),
                "reference" if name == document["reference"] and one["identical"] is not None else same,
                *((_cell(one["step_ms"], ".1f"), _cell(one["draft_share"], ".1%")) if wide else ()),
            ]
        )
    return rows


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
