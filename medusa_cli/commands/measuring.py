"""What a bench loads, measures and leaves: the document, the report, and the tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_cli import console
from medusa_cli.commands.loading import load
from medusa_cli.runs.files import write_atomic, write_json
from medusa_cli.runs.heads import STAMP, stamp_of
from medusa_cli.runs.made import describe_drafter
from medusa_cli.runs.resolve import Choice
from medusa_cli.runs.run import provenance

if TYPE_CHECKING:
    from medusa_cli.backbone import Backbone
    from medusa_cli.benchmarks import Question
    from medusa_cli.decoding.pace import Pace
    from medusa_cli.decoding.sampling import Sampling
    from medusa_cli.drafters import Drafter
    from medusa_cli.tree import Growth, Tree


def run_bench(
    choice: Choice,
    rivals: dict[str, Choice],
    names: list[str],
    chosen: "list[Question]",
    tokens: int,
    rule: "Sampling",
    title: str,
    gguf: Path | None = None,
    batch_size: int = 1,
    **place: Any,
) -> dict[str, Any]:
    """Load, measure and summarise; the document that --json prints."""
    from medusa_cli.assets import gguf_path
    from medusa_cli.benchmarks import build_methods, drift, measure, summarise
    from medusa_cli.engines.kernels import BITS

    made = load(choice, **place)
    backbone, heads, shape = made.backbone, made.drafter, made.shape
    plain = plain_model(choice, place, backbone) if any(name.startswith("hf") for name in names) else None
    drafted, drafting = _drafted(names, choice, heads, shape, rivals, backbone)
    file = gguf or gguf_path(choice.model) if "llama.cpp" in names else None
    ways = build_methods(names, backbone, plain, drafted, rule, file, batch_size)
    turns = sum(len(question.turns) for question in chosen) * len(names)
    results = []
    with console.progress("decoding", total=turns * tokens, unit="tokens") as bar:
        watched: dict[str, Any] = {"compare": rule.greedy, "watch": lambda name, new: bar.advance(len(new))}
        for number, result in enumerate(
            measure(backbone, ways, chosen, tokens, batch_size=batch_size, **watched),
            1,
        ):
            results.append(result)
            # Answers end early: what they left of their allowance counts as done.
            spent = sum(answer.tokens for answer in result.answers.values())
            bar.advance(len(result.question.turns) * len(names) * tokens - spent)
            bar.describe(f"question {number}/{len(chosen)}")
    kind = str(backbone.dtype).removeprefix("torch.")
    facts = [
        f"{choice.model}, {kind} on {backbone.device}, {backbone.engine.title}, {len(chosen)} questions, "
        f"up to {tokens} new tokens a turn, {rule.mode if not rule.greedy else 'greedy'} decoding.",
        *(f"{name}: {_words(one, drafted[name][1])}." for name, one in drafting.items()),
    ]
    moved = drift(backbone, plain, results) if "hf" in names and backbone.engine.kernel.name in BITS else None
    if moved is not None:
        facts.append(
            f"Rounded to {BITS[backbone.engine.kernel.name]} bits, the model moves by {moved['kl']:.4f} nats a token "
            f"and chooses the same for {moved['agreement']:.1%} of {moved['tokens']:,} tokens; hf is not rounded."
        )
    if batch_size > 1:
        facts.append(
            f"{batch_size} questions side by side; a batch's seconds are shared among its answers by their tokens."
        )
    return {
        "title": title,
        "facts": facts,
        **provenance(backbone.identity),
        "drafting": drafting,
        "max_new_tokens": tokens,
        "batch_size": batch_size,
        "dtype": kind,
        "engine": backbone.engine.name,
        "kernel": backbone.engine.kernel.name,
        "device": str(backbone.device),
        "sampling": vars(rule),
        "rounding": moved,
        **summarise(results, compared=rule.greedy),
    }


def _drafted(
    names: list[str], choice: Choice, heads: Any, shape: Any, rivals: dict[str, Choice], backbone: "Backbone"
) -> "tuple[dict[str, tuple[Drafter, Tree | Growth | Pace]], dict[str, Any]]":
    """Each drafting method's drafter and what it drafts over, and what the document says of both."""
    from medusa_cli.assembly import growth_of
    from medusa_cli.benchmarks.side_by_side import load_rivals

    chosen = dict(rivals)
    drafted = load_rivals(rivals, backbone)
    for name, both in drafted.items():
        console.info(f"{name}: {_words(_drafting(rivals[name], *both), both[1])}")
    if heads is not None and shape is not None:
        chosen["medusa"], drafted["medusa"] = choice, (heads, shape)
    if "medusa-dynamic" in names and "medusa-dynamic" not in drafted:
        one, (drafter, tree) = chosen["medusa"], drafted["medusa"]  # the same drafter, whichever that is
        grown = tree if one.dynamic is not None else growth_of(one, tree, drafter)
        chosen["medusa-dynamic"], drafted["medusa-dynamic"] = one, (drafter, grown)
    drafted = {name: drafted[name] for name in names if name in drafted}
    return drafted, {name: _drafting(chosen[name], *both) for name, both in drafted.items()}


def _drafting(choice: Choice, drafter: "Drafter", shape: "Tree | Growth | Pace") -> dict[str, Any]:
    """What drafts and when it was made, and over which trees; tree: the file it is from, None where it was searched."""
    from medusa_cli.decoding.pace import Pace
    from medusa_cli.tree import Growth

    assert choice.drafter is not None
    made = describe_drafter(choice.drafter).provenance
    return {
        "drafter": str(choice.drafter),
        "kind": drafter.name,
        "created": made.created,
        STAMP: stamp_of(choice.drafter),
        "tree": str(choice.tree) if choice.tree else None,
        "dynamic": isinstance(shape, Growth),
        "auto": isinstance(shape, Pace),
        "nodes": shape.size,
    }


def _words(one: dict[str, Any], shape: "Tree | Growth | Pace") -> str:
    from medusa_cli.assembly import describe

    day = f" of {one['created'][:10]}" if one["created"] else ""
    return f"{one['kind']} drafter {one['drafter']}{day}, {describe(shape)}"


def plain_model(choice: Choice, place: dict[str, Any], backbone: "Backbone") -> Any:
    """The transformers model that `hf` runs, unmodified but for the run's adapter, in the same type and place."""
    from medusa_cli.backbone import adapter
    from medusa_cli.backbone.load import DTYPES, load_network

    kind = next(name for name, dtype in DTYPES.items() if dtype == backbone.dtype)
    given = {key: value for key, value in place.items() if key not in ("engine", "dtype")}
    network = load_network(choice.model, dtype=kind, **given)[0].eval()
    if choice.adapter is not None:
        quantised = bool(place.get("load_in_4bit") or place.get("load_in_8bit"))
        network = adapter.merge(network, choice.adapter, beside=quantised)
    return network


def save(document: dict[str, Any], folder: Path) -> Path:
    """Write the report as JSON and Markdown; return the Markdown's path."""
    from medusa_cli.benchmarks.report import markdown

    stem = document["created"].replace(":", "").replace("+0000", "")
    write_json(folder / f"{stem}.json", document)
    write_atomic(folder / f"{stem}.md", markdown(document))
    return folder / f"{stem}.md"


def show(document: dict[str, Any]) -> None:
    """The closing table, the categories, and where outputs part."""
    from rich.table import Table

    from medusa_cli.benchmarks.report import by_category, figures

    rows = figures(document)
    facts = " ".join(document["facts"])
    # 80 columns hold the table where padding is small and the names of methods alone give way, whole.
    table = Table(title=document["title"], caption=facts, collapse_padding=True, pad_edge=False)
    for column in rows[0]:
        widest = max(map(len, column.split()))
        side: Any = "left" if column == "method" else "right"
        table.add_column(column, justify=side, min_width=widest, overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    console.result(table)
    for title, grid in by_category(document) if len(document["methods"]) > 1 else ():
        table = Table(title=title)
        table.add_column(grid[0][0])
        for name in grid[0][1:]:
            table.add_column(name, justify="right")
        for row in grid[1:]:
            table.add_row(*row)
        console.result(table)
    for name, one in document["methods"].items():
        for part in one["divergences"][:5]:
            console.result(
                f"{name}: question {part['question']}, turn {part['turn'] + 1} differs at token {part['position']}, "
                f"logit margin {part['margin']:.4f}"
            )
        if len(one["divergences"]) > 5:
            console.result(f"{name}: {len(one['divergences']) - 5} more in the report")
