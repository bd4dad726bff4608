"""The report's section on models trained with their heads: how far each moved, and what it accepts for it."""

from collections.abc import Container, Sequence

import numpy as np

from medusa_cli.benchmarks.charts import Estimate, Point, scatter
from medusa_cli.benchmarks.intervals import bootstrap, ratio_of_rates
from medusa_cli.benchmarks.pieces import Chart, SavedBench, Section, Table, shown


def trade_off(sources: Sequence[SavedBench]) -> Section | None:
    """KL to the original model against tokens a step, one point a run; None unless some run moved its model.

    Heads on a frozen model stand at 0, and the first of them is what the others are held against, question by question.
    """
    changed = {_weights(source) for source in sources if _moved(source)} - {None}
    moves = [(source, _moved(source, changed)) for source in sources if source.drafted]
    found = [(source, moved) for source, moved in moves if moved is not None]
    if len(found) < 2 or not any(moved for _, moved in found):
        return None
    base = next((source for source, moved in found if not moved), None)
    rows, points = [], {}
    for source, moved in found:
        accepted, gain = source.acceptance(source.drafted[0]), _gain(source, base)
        rows.append([source.name, f"{moved:.4f}", shown(accepted), "-" if gain is None else shown(gain)])
        height = accepted if base is None else Estimate(1.0) if source is base else gain
        points[source.name] = [] if height is None else [Point(moved, *height)]
    against = f" over {base.name}" if base is not None else ""
    head = ["run", "KL to the original, nats a token", "mean accepted length (with +1)", f"times as many{against}"]
    words = (
        "What a training of heads and model together gains, against how far it moved the model: KL on held-out "
        "conversations, from each training's last validation."
    )
    names = [source.name for source, _ in found]
    asked = "/".join(str(count) for count in sorted({source.questions for source, _ in found}))
    title = f"Acceptance against the model's change, {asked} questions"
    up, line = ("tokens a step", None) if base is None else (f"tokens a step, times those of {base.name}", 1.0)
    chart = scatter(points, "KL to the original, nats a token", up, title, names, line)
    return Section("What the model's change buys", words, [Table(head, rows)], [Chart(chart)])


def _moved(source: SavedBench, changed: Container[str | None] = ()) -> float | None:
    """Nats a token from the original at the last validation: 0 for a frozen model, None where nothing tells.

    Heads without a log of their training, as those that ship, stand on the original where no adapter is on weights that
    others `changed`.
    """
    checks = [line for line in source.training if line["event"] == "validated"]
    if not checks:
        backbone = source.document.get("backbone") or {}
        return 0.0 if backbone.get("adapter") is None and _weights(source) in changed else None
    parts = checks[-1].get("parts") or {}
    return parts.get("kl", None if parts else 0.0)


def _weights(source: SavedBench) -> str | None:
    """The stamp of the model's weights below any adapter."""
    found: str | None = (source.document.get("backbone") or {}).get("weights")
    return found


def _gain(source: SavedBench, base: SavedBench | None) -> Estimate | None:
    """How many times the tokens a step of another run's, over the questions that both answered; None if there are none.

    The interval is that of pairs: the same questions are drawn for both.
    """
    if base is None or source is base:
        return None
    theirs = {one["question"]: one for one in base.answers(base.drafted[0]) if one.get("steps")}
    ours = [one for one in source.answers(source.drafted[0]) if one.get("steps") and one["question"] in theirs]
    pairs = [(one, theirs[one["question"]]) for one in ours]
    if not pairs:
        return None
    sums = [[a["accepted"] + a["steps"], a["steps"], b["accepted"] + b["steps"], b["steps"]] for a, b in pairs]
    return Estimate(float(ratio_of_rates(np.sum(sums, axis=0))), bootstrap(sums, ratio_of_rates))
