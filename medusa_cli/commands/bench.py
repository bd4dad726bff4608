"""`medusa bench`: plain and drafted decoding over the same questions, measured in one run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_cli import console, options
from medusa_cli.errors import UsageError
from medusa_cli.runs.run import RUNS, Run

MAX_NEW_TOKENS = 256
# What --steps listens to; it asks no questions and runs no drafter.
WITH_STEPS = {"steps", "context", "model", "run", "device", "dtype", "engine", "load_in_4bit", "load_in_8bit"}
WITH_STEPS |= {"trust_remote_code", "json", "quiet", "debug"}


def bench(
    asked: typer.Context,
    mt_bench: Annotated[
        bool, typer.Option("--mt-bench", help="The 80 two-turn MT-Bench questions; also what a bare bench takes.")
    ] = False,
    questions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Other questions, JSONL in FastChat's form."),
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
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="What llama.cpp reads. [default: the default model's own]"
        ),
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
    load_in_4bit: options.LoadIn4bit = None,
    load_in_8bit: options.LoadIn8bit = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure speedup, acceptance rate and overhead, and check that the output is that of plain decoding.

    Every method answers every question in turn, both turns, on the same prompts. The report goes into the
    run's bench/ directory (runs/MODEL/bench for the drafter that ships).
    """
    console.configure(quiet=quiet, json=json)
    from medusa_cli.decoding.sampling import sampling_of
    from medusa_cli.runs.resolve import choose

    place: dict[str, Any] = {"device": device, "dtype": dtype, "engine": engine}
    place |= {"load_in_4bit": load_in_4bit, "load_in_8bit": load_in_8bit, "trust_remote_code": trust_remote_code}
    given = _given(asked)
    if steps:
        if given - WITH_STEPS:
            flag = "--" + min(given - WITH_STEPS).replace("_", "-")
            raise UsageError(f"{flag} says nothing to --steps, which times passes alone", "leave one of them out")
        from medusa_cli.commands.steps import bench_steps

        bench_steps(choose(model, run, None, None, need_drafter=False).model, place, context, json)
        return
    if "context" in given:
        raise UsageError(f"--context {context} says nothing without --steps", "leave it out, or give --steps")
    if mt_bench and questions is not None:
        raise UsageError("--mt-bench and --questions exclude each other", "give one of them")
    from medusa_cli.benchmarks.methods import check_batch, check_llama, check_names, parse_methods
    from medusa_cli.benchmarks.questions import of_categories, read_questions, spread
    from medusa_cli.benchmarks.side_by_side import find_rivals
    from medusa_cli.commands.measuring import run_bench, save, show
    from medusa_cli.commands.rounding import follow_choice

    names = parse_methods(methods)
    rivals = find_rivals(names, model, run, tree)
    check_names(methods, names, rivals)
    # Where runs of their own hold the drafters, "medusa-dynamic" is over that of "medusa".
    alone = "medusa" not in rivals and any(name in ("medusa", "medusa-dynamic") for name in names)
    if drafter is not None and not alone:
        raise UsageError(f"--drafter {drafter}: none of --methods {methods} takes it", "leave one of them out")
    choice = choose(model, run, drafter, tree, need_drafter=alone)
    rule = sampling_of(sampling, temperature, top_p, top_k, random_seed)
    if batch_size > 1:
        check_batch(names)
    if "llama.cpp" in names:
        check_llama(choice.model, gguf, rule)
    elif gguf is not None:
        raise UsageError(f"--gguf {gguf} says nothing to --methods {methods}", "leave it out, or add llama.cpp")
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
        **follow_choice(choice, place),
    )
    if json:
        console.emit_json(document)
    else:
        show(document)
    # Last of all: a folder that cannot be written must not cost what was measured.
    saved = save(document, (choice.run or Run(RUNS / Path(choice.model).name)).bench_dir)
    console.result(f"report: {saved}")


def _given(asked: typer.Context) -> set[str]:
    """The names of the options that stand on the command line."""
    return {name for name in asked.params if getattr(asked.get_parameter_source(name), "name", "") == "COMMANDLINE"}
