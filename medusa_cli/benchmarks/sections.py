"""The report's sections on what was gained and how: speedup, categories, acceptance, trees, identity, environment."""

from collections.abc import Sequence

from medusa_cli.benchmarks.charts import Estimate, Point, bars, decomposed, lines, scatter, tree_hits
from medusa_cli.benchmarks.intervals import ROUNDS, bootstrap, rate
from medusa_cli.benchmarks.pieces import (
    Cells,
    Chart,
    SavedBench,
    Section,
    Table,
    cell,
    labelled,
    names_of,
    shown,
    sizes,
)
from medusa_cli.benchmarks.tally import by_position, reached
from medusa_cli.tree.tree import Tree

INTERVAL = f"In brackets and as whiskers: 95 % bootstrap intervals over questions ({ROUNDS:,} draws)."
LISTED = 40


def headline(sources: Sequence[SavedBench]) -> Section:
    """Every method's rate, its speedup, and the figures that it comes from."""
    rows, groups = [], {}
    for source in sources:
        groups[source.name] = {name: source.speedup(name) for name in source.methods}
    for name, source, method in labelled(sources):
        one, same = source.methods[method], source.methods[method]["identical"]
        steps = one["step_ms"] is not None
        accepted = source.acceptance(method) if steps else None
        reference = method == source.document["reference"] and same is not None
        rows.append(
            [
                name,
                shown(source.throughput(method), ".1f"),
                shown(source.speedup(method)),
                shown(accepted) if accepted else "-",
                cell(accepted.value - 1 if accepted else None, ".2f"),
                cell(one["overhead"], ".2f"),
                cell(one["step_ms"], ".1f"),
                cell(one["draft_share"], ".1%"),
                "reference" if reference else "-" if same is None else f"{same}/{one['questions']}",
                f"{one['tokens']:,}",
            ]
        )
    head = ["method", "tokens/s", "speedup", "mean accepted length (with +1)", "without", "overhead"]
    head += ["step, ms", "drafting", "identical answers", "tokens"]
    bases = ", ".join(dict.fromkeys(source.baseline for source in sources))
    title = f"Speedup over {bases}, {sizes(sources)}"
    words = (
        f"Speedup is tokens/s over those of {bases} in the same run. The mean accepted length is the tokens that a "
        "verified step gives: with +1 it counts the model's own token, as EAGLE and Spec-Bench do; without, the "
        f"accepted drafts alone. Overhead is the time of such a step over that of a plain step. {INTERVAL}"
    )
    methods = list(dict.fromkeys(name for group in groups.values() for name in group))
    chart = Chart(bars(groups, f"speedup over {bases}, times", title, methods, line=1.0))
    return Section("What it gains", words, [Table(head, rows)], [chart])


def categories(sources: Sequence[SavedBench]) -> list[Section]:
    """Speedup, and what steps accept, by category; nothing where there is one category alone."""
    known = list(dict.fromkeys(c for s in sources for one in s.methods.values() for c in one["per_category"]))
    order = names_of(sources)
    competitors = [(n, s, m) for n, s, m in labelled(sources) if m != s.baseline]
    drafted = [(n, s, m) for n, s, m in competitors if m in s.drafted]
    found = []
    for what, unit, methods, figure in (
        ("Speedup", "times", competitors, SavedBench.speedup),
        ("Mean accepted length", "tokens a step, +1 included", drafted, SavedBench.acceptance),
    ):
        if len(known) < 2 or not methods:
            continue
        groups: dict[str, dict[str, Estimate]] = {}
        for category in known:
            there = [(n, s, m) for n, s, m in methods if category in s.methods[m]["per_category"]]
            count = max((len(s.answers(m, category)) for _, s, m in there), default=0)
            label = f"{category} ({count})" if count else category
            groups[label] = {n: figure(s, m, category) for n, s, m in there}
        names = [n for n, _, _ in methods]
        rows = [[label, *(shown(one[n]) if n in one else "-" for n in names)] for label, one in groups.items()]
        chart = Chart(bars(groups, f"{what.lower()}, {unit}", f"{what} by category (questions)", order, line=1.0))
        table = Table(["category (questions)", *names], rows)
        found.append(Section(f"{what} by category", INTERVAL, [table], [chart]))
    return found


def decomposition(sources: Sequence[SavedBench]) -> Section | None:
    """What the engine gains and what the drafts gain; None without a plain loop of our own to hold steps against."""
    rows, found = [], {}
    for name, source, method in labelled(sources):
        one, plain = source.methods[method], source.methods.get("ar")
        if plain is None or one["overhead"] is None:
            continue
        found[name] = (one["overhead"], one["acceptance_rate"])
        engine = plain["speedup"]
        drafts = one["acceptance_rate"] / one["overhead"]
        rest = one["speedup"] / (engine * drafts)
        cells = (engine, one["acceptance_rate"], one["overhead"], drafts, rest, one["speedup"])
        rows.append([name, *(f"{value:.2f}" for value in cells)])
    if not found:
        return None
    head = ["method", "engine: ar over baseline", "acceptance", "overhead", "acceptance / overhead"]
    table = Table([*head, "prefill and the rest", "speedup over baseline"], rows)
    words = (
        "A drafted step costs overhead times a plain step and gives as many tokens as it accepts, so drafts gain "
        "acceptance / overhead. The engine's own gain is that of our plain loop over the baseline. What is left is "
        "the prefill, which drafts do not shorten, and what lies between steps."
    )
    title = f"Acceptance against overhead, {sizes(sources)}; lines: gain over plain decoding"
    return Section(
        "Where the gain comes from", words, [table], [Chart(decomposed(found, "ar", title, names_of(sources)))]
    )


def depths(sources: Sequence[SavedBench]) -> Section:
    """Acceptance by the position of the draft; says which methods left no paths to count."""
    curves, rows, silent, counted = {}, [], [], []
    for name, source, method in labelled(sources):
        if method not in source.drafted:
            continue
        counts = source.methods[method].get("depths") or []
        if not counts:
            silent.append(name)
            continue
        steps, shares = sum(counts), by_position(counts)
        each = [one["depths"] for one in source.answers(method) if one.get("depths")]
        points = [Point(0, 1.0)]
        for place, share in enumerate(shares):
            columns = [[[*reached(one), *[0] * len(counts)][place], sum(one)] for one in each]
            points.append(Point(place + 1, share["reached"], bootstrap(columns, rate)))
            part = [f"{place + 1}", f"{share['reached']:.1%}", f"{share['after']:.1%}", f"{steps:,}"]
            rows.append([name, *part])
        curves[name] = points
        counted.append(f"{steps:,}")
    section = Section("Acceptance by position")
    if curves:
        section.words = (
            "How many steps accepted a draft at position k. Of all steps: as vLLM and SPEED-Bench count. Of those that "
            "had accepted position k - 1: EAGLE's k-alpha. Counted as verified, so drafts after an answer's end are in."
        )
        section.tables.append(Table(["method", "position", "of all steps", "of those before", "steps"], rows))
        title = f"Steps that accepted at least k drafts; {sizes(sources)}, {' / '.join(counted)} steps"
        order = names_of(sources)
        chart = lines(curves, "k, position of the draft", "share of steps", title, order=order, whole=True)
        section.charts.append(Chart(chart))
    return _silent(section, silent, "no record of what each step accepted")


def trees(sources: Sequence[SavedBench]) -> Section:
    """Every static tree with the share of steps that accepted each node; says which methods left none to draw."""
    section, silent = Section("Which nodes of the tree were accepted"), []
    for name, source, method in labelled(sources):
        if method not in source.drafted:
            continue
        shape, hits = source.shape(method), source.methods[method].get("hits") or []
        if shape is None or len(shape["parents"]) != len(hits):
            silent.append(name)
            continue
        title = f"{name}: {len(hits)} nodes, {hits[0]:,} steps; below each node the % of steps that accepted it"
        section.charts.append(Chart(tree_hits(Tree.from_json(shape), hits, title), wide=True))
    if section.charts:
        section.words = "Numbers in the nodes are ranks of the guess; a node that is hardly ever accepted costs a row."
    return _silent(section, silent, "no static tree, or no record of its nodes")


def parting(sources: Sequence[SavedBench]) -> Section | None:
    """Where answers leave the reference's, and by which margin; None where outputs were not compared."""
    compared = [(n, s, m) for n, s, m in labelled(sources) if s.methods[m]["identical"] is not None]
    if not compared:
        return None
    rows: Cells = []
    found, total = {}, 0
    for name, source, method in compared:
        parts = source.methods[method]["divergences"]
        if parts:
            found[name] = [Point(one["position"], one["margin"]) for one in parts]
        total += len(parts)
        for one in parts[: max(LISTED - len(rows), 0)]:
            margin = f"{one['margin']:.4f}"
            rows.append([name, str(one["question"]), str(one["turn"] + 1), str(one["position"]), margin])
    if not rows:
        return Section("Where outputs part", f"Nowhere: all answers are token for token the same, {sizes(sources)}.")
    words = (
        "The first token at which a method's answer differs from the reference's, and how far apart the plain model's "
        "logits of the two tokens are: near 0, rounding decided a tie. A negative margin: the plain model, asked for "
        "all tokens at once, prefers the other one. "
        f"{len(rows)} of {total} are listed."
    )
    title = f"First differences, {total} answers that part, {sizes(sources)}"
    across, up = "token of the answer", "margin between the two logits"
    chart = scatter(found, across, up, title, names_of(sources))
    head = ["method", "question", "turn", "token", "logit margin"]
    return Section("Where outputs part", words, [Table(head, rows)], [Chart(chart)])


def setting(sources: Sequence[SavedBench]) -> Section:
    """What was run, where, and with which versions."""
    columns = {}
    for source in sources:
        one = source.document
        model = one["backbone"]["id"] if isinstance(one["backbone"], dict) else str(one["backbone"])
        facts = {"measured": one["created"], "medusa": one["version"], "model": model}
        facts |= {
            key: one[key]
            for key in ("dtype", "engine", "kernel", "device", "max_new_tokens", "batch_size")
            if key in one
        }
        facts |= {f"sampling {key}": value for key, value in (one.get("sampling") or {}).items()}
        columns[source.name] = facts | (one.get("environment") or {})
    keys = list(dict.fromkeys(key for facts in columns.values() for key in facts))
    rows = [[key, *(str(facts.get(key, "-")) for facts in columns.values())] for key in keys]
    return Section("Environment and versions", "", [Table(["", *columns], rows)])


def _silent(section: Section, names: Sequence[str], what: str) -> Section:
    """Say for which methods there is nothing to draw."""
    if names:
        section.words += f" Nothing is drawn for {', '.join(names)}: {what}."
    elif not section.words:
        section.words = "No method drafted."
    section.words = section.words.strip()
    return section
