"""How training went: what the heads learnt by heart, and what more positions should give."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression
from typing import Any

from medusa_cli.diagnosis.case import Case
from medusa_cli.diagnosis.findings import Finding, graded
from medusa_cli.runs.recipe import load_recipe
from medusa_cli.tree import Tree
from medusa_cli.tree.search import expected_length

# Steps at the end of training whose mean is the trained accuracy, and validations that a curve needs.
LAST, LEAST = 50, 5
# The curve is fitted from this share of the training on: before it the warm-up bends it.
SETTLED = 0.1
# What twice the positions should add to the tokens of a step before more training is advised.
WORTH = 0.02


def over_fitting(case: Case) -> Finding:
    """Are the heads better on what they were trained on than on what was held out, and does that grow?"""
    name = "over-fitting"
    steps, checks = _events(case, "stepped"), _events(case, "validated")
    if not steps or not checks:
        return Finding(name, "unknown", "the training's log has no step or no validation", case.command("train"))
    trained = [fmean(one["accuracies"][head] for one in steps[-LAST:]) for head in range(len(steps[0]["accuracies"]))]
    held = checks[-1]["accuracies"]
    gap = fmean(trained) - fmean(held)
    losses = [fmean(one["head_losses"]) for one in checks]
    risen = losses[-1] / max(min(losses), 1e-9) - 1
    said = (
        f"first guesses right {_shares(trained)} % on the last {min(LAST, len(steps))} steps' own text, "
        f"{_shares(held)} % on held-out text"
    )
    if risen > 0.01:
        said += f"; the held-out loss rose by {risen:.0%} since its best"
    verdict = "bad" if gap >= 0.12 or risen >= 0.1 else graded(max(gap / 0.05, risen / 0.03), 1.0, math.inf)
    figures = {"trained": trained, "held_out": held, "gap": gap, "loss_risen": risen}
    return Finding(name, verdict, said, _more(case), figures)


@dataclass(frozen=True)
class Curve:
    """A head's error as a power of the positions trained on: exp(level) * positions ** slope."""

    level: float
    slope: float

    @classmethod
    def fit(cls, positions: Sequence[float], errors: Sequence[float]) -> "Curve":
        """The straight line of least squares through the logarithms."""
        line = linear_regression([math.log(one) for one in positions], [math.log(one) for one in errors])
        return cls(line.intercept, line.slope)

    def at(self, positions: float) -> float:
        """The error to be expected after so many positions."""
        power = self.level + self.slope * math.log(positions)
        return math.exp(max(-50.0, min(0.0, power)))


def converged(case: Case) -> Finding:
    """What should twice the positions give, by a power law through the held-out errors, and is it to be trusted?

    It is fitted head by head, and tried on what is known: from the first half of the training it foretells the end.
    """
    name = "training length"
    checks = [one for one in _events(case, "validated") if one["total_positions"] > 0]
    end = checks[-1]["total_positions"] if checks else 0
    points = [one for one in checks if one["total_positions"] >= SETTLED * end]
    if len({one["total_positions"] for one in points}) < LEAST or any(
        not 0 < share < 1 for one in points for share in one["accuracies"]
    ):
        said = f"{len(points)} validations give no curve, {LEAST} are needed"
        return Finding(name, "unknown", said, _again(case, "train.validation_every=20"))
    now, then = _foretold(points, end), _foretold(points, 2 * end)
    # Off the law at its end, what is known there counts, and the law for the way from there.
    reached = points[-1]["accuracies"]
    later = [1 - (1 - a) * (1 - b) / (1 - c) for a, b, c in zip(reached, then, now, strict=True)]
    before, after = _chain(reached), _chain(later)
    gain = after / before - 1
    half = [one for one in points if one["total_positions"] <= end / 2]
    enough = len({one["total_positions"] for one in half}) >= 3
    miss = _chain(_foretold(half, end)) - before if enough else None
    tried = "half the curve is too short to try the law on"
    if miss is not None:
        tried = f"from its first half the law foretells {before + miss:.2f} for the {before:.2f} that came"
    said = (
        f"{end:,} positions give {before:.2f} tokens a step over a chain of first guesses; twice as many should give "
        f"{after:.2f}, first guesses right {_shares(later)} % for {_shares(reached)} % ({len(points)} validations; "
        f"{tried}; a rate that falls to the end makes the last of them look better than a longer training would there)"
    )
    verdict = graded(gain, WORTH, math.inf)
    figures = {"positions": end, "accuracies": reached, "expected_accuracies": later, "tokens_a_step": before,
               "expected_tokens_a_step": after, "validations": len(points)}  # fmt: skip
    if miss is not None:
        figures["law_missed_by"] = miss
    return Finding(name, verdict, said, _longer(case, 2 * end), figures)


def _foretold(points: Sequence[dict[str, Any]], positions: float) -> list[float]:
    """Each head's accuracy after so many positions, by the law through some validations."""
    at = [one["total_positions"] for one in points]
    heads = range(len(points[0]["accuracies"]))
    return [1 - Curve.fit(at, [1 - one["accuracies"][head] for one in points]).at(positions) for head in heads]


def _chain(accuracies: Sequence[float]) -> float:
    """Tokens a step over a chain of first guesses."""
    return expected_length(Tree.chain(len(accuracies)), [[one] for one in accuracies])


def _events(case: Case, event: str) -> list[dict[str, Any]]:
    return [line for line in case.log if line["event"] == event]


def _longer(case: Case, positions: int) -> str:
    """The command that trains for so many positions."""
    path = case.run.recipe_path
    recipe = case.read(lambda: load_recipe(path if path.is_file() else None), case.command("train"))
    return _again(case, f"train.max_tokens={positions}", f"train.epochs={2 * recipe.train.epochs}")


def _again(case: Case, *settings: str) -> str:
    """The command that trains by the same recipe with other settings."""
    path = case.run.recipe_path
    return case.command("train", *([str(path)] if path.is_file() else []), *settings)


def _more(case: Case) -> str:
    """The command that makes twice the conversations."""
    count = sum(1 for _ in case.run.data_path.open("rb")) if case.run.data_path.is_file() else 0
    return case.distill(max_samples=2 * count) if count else case.distill()


def _shares(values: Sequence[float]) -> str:
    return "/".join(f"{100 * one:.1f}" for one in values)
