"""`medusa compare`: shows several trainings side by side."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.io import Document
from medusa_cli.options import LoadFlags, OutputFlags, flag, refuse
from medusa_cli.runs.run import Run

DATA = "Measure all runs again, on the conversations in this file (JSON or JSONL)."
# The accepted values of load options: other values would have no effect, as each run is measured as it
# was trained.
MEASURED_WITH = {
    "quantize": (None,),
    "engine": ("auto", "eager"),
    "activations": ("auto",),
    "kv": ("fp32",),
    "exact": (False,),
}


def compare(
    *,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Trained runs: NAME (runs/NAME), or a folder."),
    ],
    data: Annotated[Path | None, flag("--data FILE", DATA, dir_okay=False)] = None,
    max_samples: options.MaxSamples = None,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Compare on held-out conversations how much trainings changed the model, and how good their heads are.

    KL: divergence from the original model, in nats per token. ppl: perplexity divided by that of the original model.
    same: how often both models choose the same greedy token. Stage 1 does not change the model. After --tuning full,
    there is no original to compare with (-). The figures are those of the best validation in RUN/train.jsonl. If the
    runs held out different conversations, give --data to measure all runs on one file.
    """
    printing.configure()
    _check_flags(data, max_samples, loading)
    targets = [Run.open(name, named="RUN") for name in runs]
    rows = [best_validation(run) for run in targets]
    if data is not None:
        from medusa_cli.train import evaluate

        console.info(f"Comparing {loading.of(f'{len(rows)} runs')} on the conversations of {data}")
        with console.progress("comparing", total=len(rows), unit="runs") as advance:
            for row, run in zip(rows, targets, strict=True):
                result = evaluate(run, data, loading, max_samples)
                # With a frozen model, the result has no parts.
                cost = model_cost(result.parts) if result.parts else {}
                row |= {
                    "accuracies": result.accuracies,
                    "measured": result.positions,
                    "data": str(data),
                    **cost,
                }
                advance(1)
    elif len({row["data"] for row in rows}) > 1:
        text = "these runs were not trained on the same data: their held-out conversations differ"
        console.warn(text)
    if printing.json:
        console.emit_json(rows)
    else:
        _show(rows)


def _check_flags(data: Path | None, max_samples: int | None, loading: LoadFlags) -> None:
    """Raises UserError for a file that is missing, and for flags without effect."""
    if data is None:
        given = {"--max-samples": max_samples}
        refuse(given, "has no effect without --data", "give --data FILE with it")
    elif not data.exists():
        raise UserError(f"--data {data} does not exist", "give a file of conversations")
    if loading.dtype == "fp16":
        raise UsageError("--dtype fp16 is not a number type of trainings", "give bf16 or fp32")
    for name, usual in MEASURED_WITH.items():
        value = getattr(loading, name)
        if value not in usual:
            fault = f"--{name} {value} has no effect: each run's model is loaded as it was trained, on the engine eager"
            raise UsageError(fault, "leave it out")


def _show(rows: list[Document]) -> None:
    """Prints the table of trainings."""
    cells = []
    for row in rows:
        forms = {"kl": ".4f", "perplexity_ratio": ".3f", "agreement": ".1%"}
        costs = ("-" if row[key] is None else format(row[key], form) for key, form in forms.items())
        shares = ("-" if share is None else f"{100 * share:.1f}" for share in row["accuracies"])
        cells.append((row["run"], row["objective"], row["lambda_0"], *costs, "/".join(shares)))
    left = ("run", "loss", "lambda_0")
    head = (*left, "KL", "ppl", "same", "top-1 by head, %")
    console.result(console.grid("", head, cells, left=left))


def best_validation(run: Run) -> Document:
    """Returns the figures of a run's best validation and of its training; raises UserError without a validation."""
    from medusa_cli.runs.recipe_files import load_recipe
    from medusa_cli.runs.run import describe_drafter
    from medusa_cli.train.log import NAME, best_of, read_log

    checks = [line for line in read_log(run.path / NAME) if line["event"] == "validated"]
    best = best_of(checks)
    if best is None or not run.recipe_path.is_file():
        fault = f"{run.path} holds no training with a validation"
        raise UserError(fault, f"run `medusa train --run {run.argument}` first")
    train = load_recipe(run.recipe_path).train
    joint = train.stage == 2
    # With full tuning, the drafter is in the tuned model's own run.
    home = Run(run.path / "tuned") if joint and train.tuning == "full" else run
    data = describe_drafter(home.drafter_dir).provenance.data if home.has_drafter else None
    heads_alone = train.schedule == "warmup" and train.heads_first == 1
    weight = "heads only" if heads_alone else f"{train.schedule} {train.lambda_0:g}"
    cost: Document = {"kl": 0.0, "perplexity_ratio": 1.0, "agreement": 1.0}
    if joint:
        cost = model_cost(best["parts"])
    return {
        "run": run.name,
        "stage": train.stage,
        "objective": train.objective if joint else "frozen",
        "lambda_0": weight if joint else "",
        "steps": best["step"],
        "positions": best["total_positions"],
        **cost,
        "accuracies": best["accuracies"],
        "measured": best["positions"],
        "data": data and data.digest,
    }


def model_cost(parts: Mapping[str, float]) -> dict[str, float | None]:
    """Returns how much training changed the model; a figure is None if there is no original model to compare with."""
    ratio = math.exp(parts["nll"] - parts["nll_original"]) if "nll_original" in parts else None
    return {"kl": parts.get("kl"), "perplexity_ratio": ratio, "agreement": parts.get("agreement")}
