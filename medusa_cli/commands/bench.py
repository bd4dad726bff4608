"""`medusa bench`: plain and drafted decoding over the same questions, measured in one run."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.commands.asking import Questions
from medusa_cli.commands.groups import Drafting, Rules, Said, Where
from medusa_cli.commands.loading import follow_choice, load
from medusa_cli.errors import UsageError
from medusa_cli.runs.run import RUNS, Run, called

MAX_NEW_TOKENS = 256
# What --steps listens to; it asks no questions and runs no drafter.
WITH_STEPS = {"steps", "context", "model", "run", "device", "dtype", "engine", "load_in_4bit", "load_in_8bit"}
WITH_STEPS |= {"trust_remote_code", "json", "quiet", "debug"}


def bench(
    asked: typer.Context,
    *,
    which: Questions,
    methods: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Of hf (transformers' generate), hf-lookup (its prompt lookup), hf-assisted (its assisted generation, "
            "with --draft-model), ar (our plain loop), medusa (the drafter, over --tree, with lookups by --lookup), "
            "medusa-alone (without), medusa-dynamic (over dynamic trees), lookup (lookups alone), llama.cpp (if "
            "llama-cpp-python is installed), and drafters side by side: hydra, amphista and so on, of the runs by that "
            "name inside the run, or the run's own; with commas between.",
        ),
    ] = "hf,ar,medusa",
    draft_model: Annotated[
        str | None,
        typer.Option(metavar="NAME|FOLDER|ID", help="The smaller model of the same vocabulary for hf-assisted."),
    ] = None,
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
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Leave an HTML page with charts as well, and time passes by rows for it (`medusa report`)."
        ),
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS",
            help="One bench a value of nodes, epsilon, temperature, heads, batch or context; goes on where it was "
            "killed. Of --methods it takes ar,medusa where none are given.",
        ),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="With --sweep: its values, such as 4,16,64. [default: usual ones]"),
    ] = None,
    judge: options.Judge = None,
    judge_model: options.JudgeModel = None,
    batch_size: options.BatchSize = 1,
    drafting: Drafting,
    rules: Rules,
    place: Where,
    said: Said,
) -> None:
    """Measure speedup, acceptance rate and overhead, and check that the output is that of plain decoding.

    Every method answers every question in turn, both turns, on the same prompts, transformers' own methods before
    the others, so that no model is held twice. The report goes into the run's bench/ directory (runs/MODEL/bench
    for the drafter that ships).
    """
    said.configure()
    given = _given(asked)
    if steps:
        if given - WITH_STEPS:
            flag = "--" + min(given - WITH_STEPS).replace("_", "-")
            raise UsageError(f"{flag} says nothing to --steps, which times passes alone", "leave one of them out")
        from medusa_cli.commands.steps import bench_steps

        bench_steps(drafting.choose(need_drafter=False).model, place, context, said.json)
        return
    for word, value, needed, there in (("context", context, "--steps", False), ("values", values, "--sweep", sweep)):
        if word in given and not there:
            raise UsageError(f"--{word} {value} says nothing without {needed}", f"leave it out, or give {needed}")
    from medusa_cli.benchmarks.bench import Bench
    from medusa_cli.benchmarks.methods import check_methods, parse_methods
    from medusa_cli.benchmarks.side_by_side import find_competitors
    from medusa_cli.commands.beside import Beside
    from medusa_cli.commands.judging import check_judge
    from medusa_cli.commands.measuring import bar, leave, show_sweep

    if sweep is not None:
        from medusa_cli.benchmarks.sweep import OWN, TREES, parse_values
        from medusa_cli.benchmarks.sweeping import Sweep, methods_of

        swept = parse_values(sweep, values)
        for name in sorted(OWN[sweep] & given):
            raise UsageError(f"--{name.replace('_', '-')} is what --sweep {sweep} says itself", "leave it out")
        if sweep in TREES:
            drafting = replace(drafting, lookup=bool(drafting.lookup))
        methods = ",".join(methods_of(parse_methods(methods))) if "methods" in given else "ar,medusa"
    check_judge(judge, judge_model)
    names = parse_methods(methods)
    competitors = find_competitors(names, drafting.model, drafting.run, drafting.tree, drafting.lookup)
    # Where runs of their own hold the drafters, each takes --lookup, and "medusa-dynamic" is over that of "medusa".
    alone = "medusa" not in competitors and any(name.startswith("medusa") for name in names)
    if drafting.drafter is not None and not alone:
        raise UsageError(f"--drafter {drafting.drafter}: none of --methods {methods} takes it", "leave one of them out")
    choice = (drafting if alone else replace(drafting, lookup=False)).choose(need_drafter=alone)
    check_methods(names, competitors, choice.model, rules.sampled, gguf, draft_model, batch_size)
    questions, count = which.chosen()
    folder = (choice.run or Run(RUNS / called(choice.model))).bench_dir
    where = follow_choice(choice, place)
    what = Bench(
        choice,
        names,
        questions,
        rules.max_new_tokens or MAX_NEW_TOKENS,
        rules.sampled,
        which.title,
        where.loading,
        batch_size,
        competitors,
        gguf,
        draft_model,
    )
    console.info(
        f"{len(questions)} of {count} questions of {which.title}, up to {what.tokens} new tokens a turn, "
        f"{', '.join(names)}; --limit N takes fewer, --max-new-tokens N makes them shorter"
    )
    loaded = partial(load, place=where)
    if sweep is not None:
        points = Sweep(sweep, swept, what, folder)
        document = points.run(lambda one: one.run(loaded, bar, Beside(one.rule)))
        if said.json:
            console.emit_json(document)
        else:
            show_sweep(document)
            console.result(f"sweep: {folder / f'sweep-{sweep}.json'}; `medusa report` draws it beside the run's bench")
        return
    leave(what, loaded, folder, report, judge, judge_model, said.json)


def _given(asked: typer.Context) -> set[str]:
    """The names of the options that stand on the command line."""
    return {name for name in asked.params if getattr(asked.get_parameter_source(name), "name", "") == "COMMANDLINE"}
