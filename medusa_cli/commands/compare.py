"""`medusa compare`: what several trainings came to, side by side."""

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from medusa_cli import console, options
from medusa_cli.commands.groups import Said, Where, but
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.reading import Document
from medusa_cli.runs.recipe import TrainRecipe


def compare(
    *,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Trained runs: NAME means runs/NAME, anything with a / is a folder."),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Measure every run anew on this file's conversations (JSON or JSONL), all on the same.",
        ),
    ] = None,
    max_samples: options.MaxSamples = None,
    place: Annotated[Where, but("engine", "load_in_4bit", "load_in_8bit")],
    said: Said,
) -> None:
    """Compare trainings: what each cost the model, and how good its heads are, on held-out conversations.

    KL is that of the trained model to the original in nats a token, ppl its perplexity over the original's, same how
    often both take the same greedy token; heads on a frozen model (stage 1) cost nothing, and a model trained in full
    keeps no original to be held against (-). All come from the last validation in RUN/train.jsonl, or, with --data,
    from a pass over those conversations now, which is the way to compare runs that held out different ones.
    """
    said.configure()
    if max_samples is not None and data is None:
        raise UsageError(f"--max-samples {max_samples} bounds --data, and there is none", "give --data FILE with it")
    if place.dtype == "fp16":
        raise UsageError("--dtype fp16 is no type that trainings compute in", "give bf16 or fp32")
    rows = [_row(name) for name in runs]
    if data is not None:
        if not data.is_file():
            raise UserError(f"--data {data} does not exist", "give a file of conversations, JSON or JSONL")
        bound = f"the first {max_samples:,}" if max_samples else "all; --max-samples N takes fewer"
        console.info(f"Comparing {place.of(f'{len(rows)} runs')} on the conversations of {data}, {bound}")
        _measure(rows, runs, data, max_samples, place)
    elif len({row["data"] for row in rows}) > 1:
        console.warn("these runs were not trained on the same data: their numbers are of different held-out answers")
    if said.json:
        console.emit_json(rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    # The numbers stay whole in 80 columns.
    for name in ("loss", "lambda_0"):
        table.add_column(name, no_wrap=True)
    for name in ("KL", "ppl", "same", "top-1 by head, %"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["run"],
            row["objective"],
            row["lambda_0"],
            _shown(row["kl"], ".4f"),
            _shown(row["perplexity_ratio"], ".3f"),
            _shown(row["agreement"], ".1%"),
            "/".join(f"{100 * value:.1f}" for value in row["accuracies"]),
        )
    console.result(table)


def _row(name: str) -> Document:
    """One run's last validation and what training led to it; UserError where there is none."""
    from medusa_cli.runs.made import Made, describe_drafter
    from medusa_cli.runs.recipe import load_recipe
    from medusa_cli.runs.run import Run
    from medusa_cli.training.log import NAME, read_log

    run = Run.open(name, named="RUN")
    checks = [line for line in read_log(run.path / NAME) if line["event"] == "validated"]
    if not checks or not run.recipe_path.is_file():
        raise UserError(f"{run.path} holds no training with a validation", "run `medusa train` there first")
    last, train = checks[-1], load_recipe(run.recipe_path).train
    joint = train.stage == 2
    home = Run(run.path / "tuned") if joint and train.tuning == "full" else run  # a tuned model has a run of its own
    there = (home.drafter_dir / "config.json").is_file()
    made = describe_drafter(home.drafter_dir).provenance if there else Made()
    return {
        "run": run.name,
        "stage": train.stage,
        "objective": train.objective if joint else "frozen",
        "lambda_0": _weighing(train) if joint else "",
        "steps": last["step"],
        "positions": last["total_positions"],
        **(_cost(last["parts"]) if joint else {"kl": 0.0, "perplexity_ratio": 1.0, "agreement": 1.0}),
        "accuracies": last["accuracies"],
        "measured": last["positions"],
        "data": made.data and made.data.digest,
    }


def _cost(parts: dict[str, float]) -> dict[str, float | None]:
    """What the change of the model costs, None where there is no original to hold it against."""
    ratio = math.exp(parts["nll"] - parts["nll_original"]) if "nll_original" in parts else None
    return {"kl": parts.get("kl"), "perplexity_ratio": ratio, "agreement": parts.get("agreement")}


def _measure(rows: list[Document], runs: list[str], data: Path, samples: int | None, place: Where) -> None:
    """Put what each run comes to on the file's conversations in the place of its own last validation."""
    from medusa_cli.runs.run import Run
    from medusa_cli.training.evaluation import evaluate

    with console.progress("comparing", total=len(rows), unit="runs") as bar:
        for row, name in zip(rows, runs, strict=True):
            found = evaluate(Run.open(name), data, place.network, samples)
            # Heads that ride in a frozen model come without parts: it costs what the row says already, nothing.
            row |= {"accuracies": found.accuracies, "measured": found.positions}
            row |= _cost(found.parts) if found.parts else {}
            row["data"] = str(data)
            bar.advance()


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _weighing(train: TrainRecipe) -> str:
    """How the heads' loss was weighed against the model's."""
    alone = train.schedule == "warmup" and train.heads_first == 1
    return "heads alone" if alone else f"{train.schedule} {train.lambda_0:g}"
