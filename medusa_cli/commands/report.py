"""`medusa report`: saved benches as one page that opens anywhere, and as Markdown."""

from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.commands.groups import Said


def report(
    *,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Runs with a bench: NAME means runs/NAME, anything with a / is a folder, a .json file is a bench "
            "itself. Several stand side by side.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", dir_okay=False, help="Where it goes. [default: beside the first bench]"),
    ] = None,
    judge: options.Judge = None,
    judge_model: options.JudgeModel = None,
    said: Said,
) -> None:
    """Write what benches measured as one HTML page, which needs nothing beside it, and as Markdown.

    Speedup by method and category with intervals over questions, where the gain comes from, acceptance by position,
    the hit rate of every node of the tree, what steps cost under their ceilings, where outputs part, heads, training
    and sweeps as far as the runs hold them, and the environment.
    """
    said.configure()
    from medusa_cli.commands.judging import check_judge, judge_bench
    from medusa_cli.commands.reporting import bench_of, gather, place_of, read_bench, write_report

    check_judge(judge, judge_model)
    target = place_of(runs, output)
    if judge is not None and judge_model is not None:
        for path in dict.fromkeys(bench_of(name) for name in runs):
            judge_bench(path, read_bench(path), judge, judge_model)
    written = write_report(gather(runs), target)
    if said.json:
        console.emit_json({"written": [str(path) for path in written]})
        return
    for path in written:
        console.result(f"report: {path}")
