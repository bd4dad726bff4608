"""`medusa bench`: plain and drafted decoding over the same questions, measured in one run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_cli import console, options
from medusa_cli.run import RUNS, Run

MAX_NEW_TOKENS = 256


def bench(
    mt_bench: Annotated[
        bool, typer.Option("--mt-bench", help="The 80 two-turn MT-Bench questions; also what a bare bench takes.")
    ] = False,
    questions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Other questions, JSONL in FastChat's form.")
    ] = None,
    category: Annotated[
        str | None, typer.Option(metavar="LIST", help="Questions of these categories alone, such as math,coding.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="At most N questions, spread over the categories. [default: all]")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Of hf (transformers' generate), hf-lookup (its prompt lookup), ar (our plain loop), medusa (the "
            "drafter, over --tree), medusa-dynamic (over dynamic trees), llama.cpp (if llama-cpp-python is "
            "installed), and drafters side by side: hydra, amphista and so on, of the runs by that name inside the "
            "run, or the run's own; with commas between.",
        ),
    ] = "hf,ar,medusa",
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What llama.cpp reads. [default: the default model's own]")
    ] = None,
    steps: Annotated[
        bool, typer.Option("--steps", help="Time forward passes by rows and engine instead of answering questions.")
    ] = False,
    context: Annotated[
        str, typer.Option(metavar="N[,N]", help="With --steps: tokens in the cache, several sizes with commas between.")
    ] = "384",
    max_new_tokens: options.MaxNewTokens = None,
    batch_size: options.BatchSize = 1,
    run: options.RunOrShipped = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    tree: options.Tree = None,
    sampling: options.SamplingMode = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    random_seed: options.RandomSeed = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    engine: options.Engine = "auto",
    load_in_4bit: options.LoadIn4bit = False,
    load_in_8bit: options.LoadIn8bit = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure speedup, acceptance rate and overhead, and check that the output is that of plain decoding.

    Every method answers every question in turn, both turns, on the same prompts. The report goes into the
    run's bench/ directory (runs/MODEL/bench for the drafter that ships).
    """
    from medusa_cli.errors import UsageError

    console.configure(quiet=quiet, json=json)
    if steps:
        from medusa_cli.commands.steps import bench_steps

        place = {"device": device, "dtype": dtype, "engine": engine}
        bench_steps(model, {**place, "load_in_4bit": load_in_4bit, "load_in_8bit": load_in_8bit}, context, json)
        return
    if mt_bench and questions is not None:
        raise UsageError("--mt-bench and --questions exclude each other", "give one of them")
    from medusa_cli.benchmarks.methods import check_methods, parse_methods
    from medusa_cli.benchmarks.questions import of_categories, read_questions, spread
    from medusa_cli.commands.loading import choose, sampling_of
    from medusa_cli.commands.rivals import find_rivals

    names = parse_methods(methods)
    rivals = find_rivals(names, model, run, tree)
    check_methods(methods, names, rivals)
    alone = any(name.startswith("medusa") for name in names if name not in rivals)
    choice = choose(model, run, drafter, tree, need_drafter=alone)
    rule = sampling_of(sampling, temperature, top_p, top_k, random_seed)
    source = questions
    if source is None:
        from medusa_cli.assets import mt_bench_path

        source = mt_bench_path()
    found, skipped = read_questions(source)
    chosen = spread(of_categories(found, category), limit)
    if skipped:
        console.warn(f"{source}: {skipped} lines are no questions and were skipped")
    title = "MT-Bench" if questions is None else questions.name
    tokens = max_new_tokens or MAX_NEW_TOKENS
    console.info(
        f"{len(chosen)} of {len(found)} questions of {title}, up to {tokens} new tokens a turn, {', '.join(names)}; "
        "--limit N takes fewer, --max-new-tokens N makes them shorter"
    )
    document = run_bench(
        choice,
        rivals,
        names,
        chosen,
        tokens,
        rule,
        title,
        gguf,
        batch_size,
        device=device,
        dtype=dtype,
        engine=engine,
        load_in_4bit=load_in_4bit,
        load_in_8bit=load_in_8bit,
    )
    folder = (choice.run or Run(RUNS / Path(choice.model).name)).bench_dir
    saved = save(document, folder)
    if json:
        console.emit_json(document)
        return
    show(document)
    console.result(f"report: {saved}")


def run_bench(
    choice: Any,
    rivals: dict[str, Any],
    names: list[str],
    chosen: list[Any],
    tokens: int,
    rule: Any,
    title: str,
    gguf: Path | None = None,
    batch_size: int = 1,
    **place: Any,
) -> dict[str, Any]:
    """Load, measure and summarise; the document that --json prints."""
    from medusa_cli.assets import gguf_path
    from medusa_cli.backbone.rounded import BITS
    from medusa_cli.benchmarks import build_methods, drift, measure, summarise
    from medusa_cli.commands.loading import describe, growth_of, load
    from medusa_cli.commands.rivals import load_rivals
    from medusa_cli.run import provenance

    backbone, heads, shape = load(choice, **place)
    plain = plain_model(choice, place) if any(name.startswith("hf") for name in names) else None
    drafted = load_rivals(rivals, backbone)
    if heads is not None and shape is not None:
        drafted = {"medusa": (heads, shape), "medusa-dynamic": (heads, growth_of(choice, shape, heads)), **drafted}
    file = gguf or gguf_path(choice.model) if "llama.cpp" in names else None
    ways = build_methods(names, backbone, plain, drafted, rule, file, batch_size)
    turns = sum(len(question.turns) for question in chosen) * len(names)
    results = []
    with console.progress("decoding", total=turns * tokens, unit="tokens") as bar:
        done = 0
        watched: dict[str, Any] = {"compare": rule.greedy, "watch": lambda name, new: bar.advance(len(new))}
        for number, result in enumerate(
            measure(backbone, ways, chosen, tokens, batch_size=batch_size, **watched),
            1,
        ):
            results.append(result)
            # Answers end early: what they left of their allowance counts as done.
            spent = sum(answer.tokens for answer in result.answers.values())
            done += len(result.question.turns) * len(names) * tokens
            bar.advance(len(result.question.turns) * len(names) * tokens - spent)
            bar.describe(f"question {number}/{len(chosen)}")
    size = shape.size if shape is not None else None
    facts = [
        f"{choice.model}, {str(backbone.dtype).removeprefix('torch.')} on {backbone.device}, {backbone.engine} engine, "
        f"{len(chosen)} questions, up to {tokens} new tokens a turn, "
        f"{rule.mode if not rule.greedy else 'greedy'} decoding" + (f", {describe(shape)}" if shape else "") + "."
    ]
    moved = drift(backbone, plain, results) if "hf" in names and backbone.engine in BITS else None
    if moved is not None:
        facts.append(
            f"Rounded to {BITS[backbone.engine]} bits, the model moves by {moved['kl']:.4f} nats a token and chooses "
            f"the same for {moved['agreement']:.1%} of {moved['tokens']:,} tokens; hf is not rounded."
        )
    if batch_size > 1:
        facts.append(
            f"{batch_size} questions side by side; a batch's seconds are shared among its answers by their tokens."
        )
    return {
        "title": title,
        "facts": facts,
        **provenance(backbone.identity, drafter=str(choice.drafter), tree=str(choice.tree)),
        "tree_nodes": size,
        "max_new_tokens": tokens,
        "batch_size": batch_size,
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "engine": backbone.engine,
        "device": str(backbone.device),
        "sampling": vars(rule),
        "rounding": moved,
        **summarise(results, compared=rule.greedy),
    }


def plain_model(choice: Any, place: dict[str, Any]) -> Any:
    """The transformers model that `hf` runs, unmodified but for the run's adapter, in the same type and place."""
    from medusa_cli.backbone import adapter
    from medusa_cli.backbone.load import load_network

    network = load_network(choice.model, **{key: value for key, value in place.items() if key != "engine"})[0].eval()
    if choice.adapter is not None:
        quantised = bool(place.get("load_in_4bit") or place.get("load_in_8bit"))
        network = adapter.merge(network, choice.adapter, beside=quantised)
    return network


def save(document: dict[str, Any], folder: Path) -> Path:
    """Write the report as JSON and Markdown; return the Markdown's path."""
    from medusa_cli.benchmarks.report import markdown
    from medusa_cli.run import write_atomic, write_json

    stem = document["created"].replace(":", "").replace("+0000", "")
    write_json(folder / f"{stem}.json", document)
    write_atomic(folder / f"{stem}.md", markdown(document))
    return folder / f"{stem}.md"


def show(document: dict[str, Any]) -> None:
    """The closing table, the categories, and where outputs part."""
    from rich.table import Table

    from medusa_cli.benchmarks.report import by_category, figures

    rows = figures(document)
    table = Table(title=document["title"], caption=" ".join(document["facts"]))
    for column in rows[0]:
        widest = max(map(len, column.split()))  # 80 columns hold the table if no word of a heading is cut
        table.add_column(column, justify="left" if column == "method" else "right", min_width=widest)
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
