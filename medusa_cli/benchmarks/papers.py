"""What the papers claim, in ratios that can be measured at any size, and how far a model of one's own bears it out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from medusa_cli.benchmarks.escaped import escaped, row_of

# The documents of the steps of `medusa reproduce`, by name.
Evidence = Mapping[str, Any]
# Of an effect (a ratio's distance from 1, as a logarithm) so much counts as reproduced, and so much as in part.
WHOLE, PART = 0.8, 0.2


@dataclass(frozen=True)
class Claim:
    """One headline of a paper: what is set against what, the paper's ratio, and the same ratio out of the evidence.

    paper None: the paper shows it in a figure without numbers, and only the direction can be held against it.
    """

    source: str
    says: str
    paper: float | None
    ours: Callable[[Evidence], float]

    def verdict(self, found: float) -> str:
        """Whether a measured ratio reproduces the claim: "reproduced", "in part" or "not"."""
        effect = math.log(found)
        if self.paper is None:
            return "reproduced" if effect >= math.log(1.05) else "in part" if effect > 0 else "not"
        share = effect / math.log(self.paper)
        return "reproduced" if share >= WHOLE else "in part" if share >= PART else "not"


def held(evidence: Evidence) -> list[dict[str, Any]]:
    """Every claim beside what was measured; claims whose evidence is not there are left out."""
    found = []
    for claim in CLAIMS:
        try:
            ours = claim.ours(evidence)
        except KeyError:
            continue
        row = {"source": claim.source, "says": claim.says, "paper": claim.paper, "ours": ours}
        found.append({**row, "verdict": claim.verdict(ours)})
    return found


def _of(step: str, method: str, figure: str) -> Callable[[Evidence], float]:
    return lambda evidence: float(evidence[step]["methods"][method][figure])


def _over(step: str, method: str, other: str, figure: str = "acceptance_rate") -> Callable[[Evidence], float]:
    """One method's figure over another's, of one bench."""
    return lambda evidence: _of(step, method, figure)(evidence) / _of(step, other, figure)(evidence)


def _category(name: str) -> Callable[[Evidence], float]:
    """How much more is accepted in a category than over all questions."""

    def ratio(evidence: Evidence) -> float:
        one = evidence["64 nodes"]["methods"]["medusa"]
        return float(one["per_category"][name]["acceptance_rate"] / one["acceptance_rate"])

    return ratio


def _points(evidence: Evidence, sweep: str, series: str) -> list[dict[str, Any]]:
    """The points of a series of a sweep, by its axis; KeyError for none."""
    found = [row for row in evidence[sweep]["points"] if row["series"] == series]
    if not found:
        raise KeyError(series)
    return sorted(found, key=lambda row: float(row["x"]))


def _sparse_over_dense(evidence: Evidence) -> float:
    """The sparse tree of 64 nodes over the largest dense one that was measured, of no more nodes."""
    sparse = next(row for row in _points(evidence, "nodes", "medusa, sparse") if row["x"] == 64)
    return float(sparse["acceptance_rate"] / _points(evidence, "nodes", "medusa, dense")[-1]["acceptance_rate"])


def _slower_by_nodes(evidence: Evidence) -> float:
    """The best speed of any sparse tree over that of the largest."""
    rates = [row["tokens_per_s"] for row in _points(evidence, "nodes", "medusa, sparse")]
    return float(max(rates) / rates[-1])


def _epsilon(evidence: Evidence) -> float:
    """What the loosest threshold accepts over what the strictest does."""
    points = _points(evidence, "epsilon", "medusa")
    return float(points[0]["acceptance_rate"] / points[-1]["acceptance_rate"])


def _joint(other: str, figure: str) -> Callable[[Evidence], float]:
    """A figure of the compared trainings: one's over Medusa-2's."""

    def ratio(evidence: Evidence) -> float:
        rows = {row["run"].rsplit("/", 1)[-1]: row for row in evidence["quality"]}
        return float(rows[other][figure] / rows["medusa2"][figure])

    return ratio


def _layers(figure: str, best: Callable[[list[dict[str, Any]]], float]) -> Callable[[Evidence], float]:
    return lambda evidence: best(evidence["layers"]["figures"][figure])


def _accuracy(trial: dict[str, Any]) -> float:
    return float(trial["accuracies"][-1])


def _middle_over_last(trials: list[dict[str, Any]]) -> float:
    return max(_accuracy(trial) for trial in trials[:-1]) / _accuracy(trials[-1])


def _seen_over_masked(trials: list[dict[str, Any]]) -> float:
    return _accuracy(trials[0]) / _accuracy(trials[1])


# Ratios of the papers are those of their smallest models (Vicuna-7B), which are nearest.
CLAIMS = (
    Claim("Medusa, Figure 4a", "Medusa-1 is faster than transformers", 2.18, _of("auto", "medusa", "speedup")),
    Claim(
        "Medusa, Figure 4a",
        "of which drafts alone, over our own plain loop (there the loop is transformers')",
        2.18,
        _over("auto", "medusa", "ar", "tokens_per_s"),
    ),
    Claim("Medusa, Table 1", "Medusa-2 accepts several tokens a step", 3.47, _of("joint", "medusa", "acceptance_rate")),
    Claim(
        "Medusa, Table 2",
        "training both gains over heads alone (there in speed, here in tokens a step)",
        2.83 / 2.18,
        lambda evidence: (
            _of("joint", "medusa", "acceptance_rate")(evidence) / _of("64 nodes", "medusa", "acceptance_rate")(evidence)
        ),
    ),
    Claim(
        "Medusa, Table 2",
        "training both directly harms the model (there in grades, here in perplexity)",
        None,
        _joint("direct", "perplexity_ratio"),
    ),
    Claim("Medusa, Figure 4b", "extraction gains most", 3.62 / 2.83, _category("extraction")),
    Claim("Medusa, Figure 4b", "coding gains more than the mean", 3.29 / 2.83, _category("coding")),
    Claim(
        "Medusa, Figure 6a",
        "64 sparse nodes accept more than a dense tree of no more nodes (in the paper, of more nodes)",
        None,
        _sparse_over_dense,
    ),
    Claim("Medusa, Figure 6b", "the largest trees are slower than smaller ones", None, _slower_by_nodes),
    Claim("Medusa, Figure 7", "looser thresholds accept more", None, _epsilon),
    Claim("Amphista, Table 1", "Amphista over Medusa, greedy", 2.44 / 1.87, _over("64 nodes", "amphista", "medusa")),
    Claim("Amphista, Table 1", "Hydra++ over Medusa, greedy", 2.37 / 1.87, _over("64 nodes", "hydra++", "medusa")),
    Claim(
        "Amphista, Table 2", "Amphista over Medusa at temperature 0.7", 2.37 / 1.86, _over("warm", "amphista", "medusa")
    ),
    Claim("Amphista, Table 7", "Amphista over Medusa, 22 nodes", 2.29 / 1.71, _over("22 nodes", "amphista", "medusa")),
    Claim(
        "Amphista, Table 7",
        "Amphista, 64 nodes over 22",
        2.44 / 2.29,
        lambda evidence: (
            _of("64 nodes", "amphista", "acceptance_rate")(evidence)
            / _of("22 nodes", "amphista", "acceptance_rate")(evidence)
        ),
    ),
    Claim("FIRP, Table 3", "FIRP over Medusa, 16 nodes", 2.762 / 2.334, _over("16 nodes", "firp", "medusa")),
    Claim("FIRP, Table 3", "FIRP over Medusa, 64 nodes", 3.148 / 2.647, _over("64 nodes", "firp", "medusa")),
    Claim("FIRP, Figure 5", "the first head enters best before the last layers", None, _layers("5", _middle_over_last)),
    Claim("FIRP, Figure 6", "so does the second", None, _layers("6", _middle_over_last)),
    Claim("FIRP, Figure 7", "the second head needs to see the first", None, _layers("7", _seen_over_masked)),
)


def markdown(rows: list[dict[str, Any]], facts: list[str]) -> str:
    """The claims as a page of Markdown."""
    count = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("reproduced", "in part", "not")}
    lines = ["# The papers' headlines, measured again", "", *map(escaped, facts), ""]
    lines += [
        "Each is a ratio, the paper's of Vicuna-7B beside ours. *Reproduced* has at least 80 % of the paper's effect,",
        "*in part* at least 20 %; where the paper gives no number, a gain of 5 % or more counts as reproduced, and any",
        "other as in part.",
        "",
        ", ".join(f"{number} {verdict}" for verdict, number in count.items()) + f", of {len(rows)}.",
        "",
        "| where | what it says | paper | here | |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        paper = "-" if row["paper"] is None else f"{row['paper']:.2f}"
        lines.append(row_of([row["source"], row["says"], paper, f"{row['ours']:.2f}", row["verdict"]]))
    return "\n".join(lines) + "\n"
