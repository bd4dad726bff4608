"""The report's sections on what lies behind a run: step costs and ceilings, heads, training, quality, sweeps."""

from collections.abc import Sequence
from typing import Any

from medusa_cli.benchmarks.charts import Point, lines
from medusa_cli.benchmarks.pieces import Chart, SavedBench, Section, Table


def step_costs(sources: Sequence[SavedBench]) -> Section | None:
    """Milliseconds of a pass by rows, above the ceilings of memory and arithmetic; None where none were timed."""
    section = Section("What a step costs")
    for source in sources:
        rows = source.document.get("rows")
        if rows:
            section.charts.append(Chart(_passes(source.name, rows)))
            head = ["rows", "ms a pass", "over one row", "memory's ceiling, ms", "arithmetic's, ms"]
            times = {int(count): ms for count, ms in rows["step_ms"].items()}
            cells = [
                [f"{count}", f"{ms:.1f}", f"{ms / times[1]:.2f}", *(f"{c:.1f}" for c in ceilings(rows, count))]
                for count, ms in sorted(times.items())
            ]
            section.tables.append(Table(head, cells, f"{source.name}: {rows['engine']}"))
    if not section.charts:
        return None
    section.words = (
        "A pass verifies all rows at once. Memory's ceiling is reading the weights once, at the bytes a second that a "
        "copy moves; arithmetic's is two operations a weight and row, at the rate of a large product of matrices."
    )
    return section


def ceilings(rows: dict[str, Any], count: int) -> tuple[float, float]:
    """The least milliseconds of a pass over so many rows, by memory and by arithmetic."""
    memory = 1e3 * rows["weight_bytes"] / rows["copy_bytes_per_s"]
    return memory, 1e3 * 2 * rows["weights"] * count / rows["operations_per_s"]


def _passes(name: str, rows: dict[str, Any]) -> str:
    times = sorted((int(count), ms) for count, ms in rows["step_ms"].items())
    found = {rows["engine"]: [Point(count, ms) for count, ms in times]}
    least = [(count, *ceilings(rows, count)) for count, _ in times]
    top = max(ms for _, ms in times)
    limits = {
        "memory's ceiling": [Point(count, memory) for count, memory, _ in least],
        "arithmetic's ceiling": [Point(count, one) for count, _, one in least if one <= 1.5 * top],
    }
    title = f"{name}: a pass by rows, {rows['context']} tokens in the cache, median of {rows['rounds']}"
    return lines(found, "rows (nodes of the tree)", "ms a pass", title, ceilings=limits, log=True)


def heads(sources: Sequence[SavedBench]) -> Section | None:
    """How often each head's i-th guess is right, as `calibrate` measured it."""
    found, rows = {}, []
    for source in sources:
        for head, shares in enumerate(source.accuracies, 1):
            name = f"head {head}" if len(sources) == 1 else f"{source.name}: head {head}"
            total, points = 0.0, []
            for rank, share in enumerate(shares, 1):
                total += share
                points.append(Point(rank, total))
            found[name] = points
            rows.append([name, *(f"{100 * share:.1f}" for share in shares[:5]), f"{100 * total:.1f}"])
    if not found:
        return None
    width = max(len(row) for row in rows)
    rows = [[*row[:-1], *["-"] * (width - len(row)), row[-1]] for row in rows]
    columns = ["head", *(f"guess {rank}, %" for rank in range(1, width - 1)), "any of them, %"]
    chart = lines(found, "best guesses looked at", "share that holds the right token", "Accuracy by guesses, held out")
    words = "Measured by `medusa calibrate` on held-out conversations, each head given the true tokens before."
    return Section("How good the heads are", words, [Table(columns, rows)], [Chart(chart)])


def training(sources: Sequence[SavedBench]) -> Section | None:
    """The heads' held-out accuracies along their training."""
    section = Section("Training", "First guesses right on held-out conversations, by the positions trained on.")
    for source in sources:
        checks = [line for line in source.training if line["event"] == "validated"]
        if not checks:
            continue
        found = {
            f"head {k + 1}": [Point(one["total_positions"], one["accuracies"][k]) for one in checks]
            for k in range(len(checks[0]["accuracies"]))
        }
        title = f"{source.name}: held-out accuracy, {checks[-1]['positions']:,} positions"
        section.charts.append(Chart(lines(found, "positions trained on", "first guesses right", title)))
    return section if section.charts else None


def quality(sources: Sequence[SavedBench]) -> Section | None:
    """What a rule that changes the output costs: the model's own opinion of the answers, and the judge's."""
    rows, judged, sentences = [], [], []
    for source in sources:
        for method, one in (source.document.get("quality") or {}).items():
            part = [f"{one['nll']:.3f}", f"{one['perplexity']:.2f}", f"{one['agreement']:.1%}", f"{one['tokens']:,}"]
            rows.append([source.name, method, *part])
        if moved := source.document.get("rounding"):
            sentences.append(
                f"{source.name}: rounded weights move the model by {moved['kl']:.4f} nats a token; it chooses the same "
                f"for {moved['agreement']:.1%} of {moved['tokens']:,} tokens."
            )
        judged += [[source.name, *row] for row in _judged(source.document.get("judge") or {})]
    if not rows and not judged and not sentences:
        return None
    section = Section("Quality", " ".join(sentences))
    if rows:
        head = ["run", "method", "nats a token", "perplexity", "is the model's first choice", "tokens"]
        caption = "First turns' answers under the plain model, at temperature 1"
        section.tables.append(Table(head, rows, caption))
    if judged:
        head = ["run", "judged", "score, of 10", "wins", "ties", "losses", "answers"]
        section.tables.append(Table(head, judged, "Scores, and pairs in both orders: a pair counts where both agree"))
    return section


def _judged(judge: dict[str, Any]) -> list[list[str]]:
    rows = []
    for method, one in judge.get("single", {}).items():
        rows.append([method, f"{one['score']:.2f}", "-", "-", "-", str(one["answers"])])
    for method, one in judge.get("pairs", {}).items():
        counts = [str(one[key]) for key in ("wins", "ties", "losses")]
        rows.append([f"{method} against {judge['reference']}", "-", *counts, str(one["answers"])])
    return rows


def sweeps(sources: Sequence[SavedBench]) -> Section | None:
    """Rate and acceptance against what was swept, point by point."""
    section = Section("Sweeps")
    for source in sources:
        for sweep in source.sweeps:
            section.tables.append(_swept_table(source.name, sweep))
            asked = sweep["points"][0]["questions"]
            for key, up in (
                ("acceptance_rate", "tokens a step"),
                ("tokens_per_s", "tokens/s"),
                ("nll", "nats a token"),
            ):
                found: dict[str, list[Point]] = {}
                for point in sweep["points"]:
                    if point.get(key) is not None:
                        found.setdefault(point["series"], []).append(
                            Point(point["x"], point[key], point.get(f"{key}_95"))
                        )
                if found:
                    title = f"{source.name}: {up} by {sweep['axis']}, {asked} questions"
                    doubling = sweep["axis"] in ("nodes", "batch", "context")
                    section.charts.append(Chart(lines(found, sweep["unit"], up, title, log=doubling)))
    return section if section.charts else None


def _swept_table(name: str, sweep: dict[str, Any]) -> Table:
    rows = [
        [
            point["series"],
            f"{point['x']:g}",
            f"{point['tokens_per_s']:.1f}",
            f"{point['acceptance_rate']:.2f}",
            "-" if point.get("nll") is None else f"{point['nll']:.3f}",
            str(point["questions"]),
        ]
        for point in sweep["points"]
    ]
    head = ["series", sweep["unit"], "tokens/s", "mean accepted length (with +1)", "nats a token", "questions"]
    return Table(head, rows, f"{name}: {sweep['axis']}, measured {sweep['created'][:10]}")
