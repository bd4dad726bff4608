"""`medusa train`: trains a drafter, and in stage 2 the model with it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli import console, options
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files import extras, mtp_layer
from medusa_cli.files.model_files import check_model_files
from medusa_cli.files.model_source import ModelSource
from medusa_cli.options import LoadFlags, OutputFlags, flag, refuse
from medusa_cli.progress import span
from medusa_cli.runs.run import DEFAULT_RUN, RUNS

if TYPE_CHECKING:
    from medusa_cli.runs.recipe import Recipe
    from medusa_cli.runs.run import Run
    from medusa_cli.train.training import Trained

LOGGERS = ("tensorboard", "wandb", "trackio")  # as in medusa_cli.train.loggers, which imports torch
_RECIPE = (
    "The file or name (medusa1, hydra, eagle) of a recipe, and settings such as train.lr=1e-3."
)
_DATA = "Conversations (JSON or JSONL) to train on. [default: the run's distill.jsonl]"
_STAGE = "1: the heads on the frozen model; 2: heads and model together. [default: 1]"
_SCHEDULE = (
    "Stage 2: schedule of lambda_0, the weight of the heads' loss: constant, warmup or sine."
)
_FROM = (
    "Start from the heads of another run, or from those that ship for a model, if they fit (in stage 2 "
    "with their adapter). Without a recipe, the heads keep their shape and loss. A run without conversations "
    "uses those of the other run. mtp: start from the MTP layer in the model's own checkpoint."
)
_LOGGER = "Also log the training to tensorboard, wandb or trackio."
_DRY_RUN = "Report the data, memory and time that training will take, measured on two steps; write nothing."
Words = Annotated[
    list[str] | None, typer.Argument(metavar="[RECIPE.yaml] [KEY=VALUE ...]", help=_RECIPE)
]


def train(
    *,
    recipe: Words = None,
    run: options.Run = DEFAULT_RUN,
    model: options.Model = None,
    data: Annotated[Path | None, flag("--data FILE", _DATA)] = None,
    start: Annotated[str | None, flag("--from RUN|MODEL", _FROM)] = None,
    stage: Annotated[int | None, flag("--stage N", _STAGE)] = None,
    schedule: Annotated[str | None, flag("--schedule NAME", _SCHEDULE)] = None,
    tuning: Annotated[
        str | None,
        flag("--tuning METHOD", "Stage 2: lora, qlora (4-bit model) or full (all weights)."),
    ] = None,
    resume: Annotated[bool, flag("--resume", "Resume from the run's checkpoint.")] = False,
    logger: Annotated[str | None, flag("--logger NAME", _LOGGER)] = None,
    dry_run: Annotated[bool, flag("--dry-run", _DRY_RUN)] = False,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Train a drafter on the model's own answers; the model stays frozen, unless --stage 2 trains it, too.

    Writes RUN/drafter (in stage 2 also RUN/adapter), the log train.jsonl, the curves train.png and checkpoints. The
    drafter has the weights of the validation with the highest simulated acceptance. Without options, it takes about ten
    minutes on two cores. Ctrl-C or SIGTERM leaves a checkpoint for --resume.
    """
    first = os.environ.get("RANK", "0") == "0"
    printing.configure(first=first)  # only the first process prints
    _check_flags(logger, dry_run, resume)
    from medusa_cli.data.conversation import check_conversations
    from medusa_cli.runs.recipe_files import recipe_of
    from medusa_cli.runs.run import Run

    words = recipe or []
    own = start == mtp_layer.NAME and not (RUNS / mtp_layer.NAME).is_dir()
    origin = _origin(start) if start is not None and not own else None
    has_data = data is not None or origin is not None or Run.inside(run)
    target = Run.planned(run) if has_data else Run.open(run)
    flags: dict[str, Any] = {
        "model": model,
        "train.stage": stage,
        "train.schedule": schedule,
        "train.tuning": tuning,
        "drafter.name": mtp_layer.NAME if own else None,
    }
    # A resumed run computes in the number type of its recipe; --dtype then sets only the model's
    # number type.
    if loading.dtype in ("bf16", "fp32") and not (resume and all("=" in word for word in words)):
        flags["train.dtype"] = loading.dtype
    plan = recipe_of(target, words, flags, resume, origin)
    if plan.train.stage == 1:
        joint = {"--schedule": schedule, "--tuning": tuning}
        refuse(joint, "has no effect with train.stage=1", "leave it out, or give --stage 2")
    giver = origin if origin and not target.data_path.is_file() else target
    source = data or giver.data_path
    check_conversations(source)
    check_model_files(ModelSource.of(plan.model))
    bound = f" or {plan.train.max_tokens:,} tokens" if plan.train.max_tokens else ""
    if dry_run:
        _estimate(target, plan, loading, origin, source, printing.json)
        return
    console.info(
        f"Training {plan.drafter.num_heads} {plan.drafter.name} heads for {loading.of(plan.model)} on {source}: "
        f"{plan.train.epochs} epochs{bound}; train.epochs=4 train.max_tokens=null or a recipe trains longer"
    )

    from medusa_cli.train import train as run_training

    with console.bars() as show, stopping() as signals:
        trained = run_training(
            target,
            plan,
            options=loading,
            data=source,
            start=origin,
            resume=resume,
            logger=logger,
            should_stop=lambda: bool(signals),
            show=show,
        )
    if trained is None:  # the first process prints for all processes
        return
    if trained.stopped:
        console.warn("stopped; the same command with --resume continues")
        # Another process of torchrun may have received the signal.
        raise typer.Exit(128 + (signals[0] if signals else signal.SIGTERM))
    _report(trained, target, printing.json)


def _check_flags(logger: str | None, dry_run: bool, resume: bool) -> None:
    """Raises UsageError for an unknown logger and for flags that exclude each other, UserError for missing packages."""
    extras.need_extra("train", "`medusa train`")
    if logger is not None:
        if logger not in LOGGERS:
            raise UsageError(f"--logger {logger!r} is unknown", f"use one of {', '.join(LOGGERS)}")
        extras.need_extra(logger, f"--logger {logger}")
    if dry_run and (resume or os.environ.get("WORLD_SIZE", "1") != "1"):
        other = "--resume" if resume else "torchrun"
        raise UsageError(f"--dry-run and {other} exclude each other", "leave one of them out")


def _origin(start: str) -> "Run":
    """Returns the run from whose heads or conversations a training starts; raises UserError if it has neither."""
    from medusa_cli.runs.run import Run

    origin = Run.with_heads(start)
    if not (origin.drafter_dir.is_dir() or origin.data_path.is_file()):
        fault = f"--from {start}: it holds neither heads nor conversations"
        raise UserError(fault, "give a run that was trained")
    return origin


def _report(trained: "Trained", target: "Run", json: bool) -> None:
    """Prints what a training reached, and what to do next."""
    from medusa_cli.train.log import shares

    owner = trained.run
    figures = trained.figures
    if json:
        console.emit_json({**figures, "run": str(owner.path), "drafter": str(owner.drafter_dir)})
        return
    text = "{heads} heads, {steps:,} steps at {tokens_per_s:,.0f} tokens/s".format(**figures)
    if figures["validation"] is not None:
        accuracies = shares(figures["validation"]["accuracies"])
        text += f", of step {figures['best_step']:,}: held-out top-1 by head {accuracies}"
        text += f", about {figures['expected_acceptance']:.2f} tokens per step over a top-1 chain"
        before = figures["expected_acceptance_at_start"]
        text += f" ({before:.2f} at the start)" if before else ""
    checkpoint = target.path / "checkpoint.pt"
    if checkpoint.is_file():
        console.info(
            f"{checkpoint} ({checkpoint.stat().st_size / 1e6:,.0f} MB) served --resume, and may be deleted"
        )
    console.result(
        f"{owner.drafter_dir}: {text}. Curves: {target.path / 'train.png'}. "
        f"Next: medusa calibrate --run {owner.argument}"
    )


def help_sections() -> dict[str, list[tuple[str, str]]]:
    """Returns the keys of a recipe with their defaults and meanings, for --help."""
    from medusa_cli.runs.recipe import meanings

    rows = [(f"{key}={default}", meaning) for key, (default, meaning) in meanings().items()]
    return {"Recipe keys, with their defaults": rows}


def _estimate(
    target: "Run",
    plan: "Recipe",
    loading: LoadFlags,
    origin: "Run | None",
    source: Path,
    json: bool,
) -> None:
    """Prints the data, memory and time that a training will take."""
    from medusa_cli.train import estimate

    facts = estimate(target, plan, options=loading, data=source, start=origin)
    if json:
        console.emit_json(facts)
        return
    seconds = facts["seconds"]
    console.result(
        f"data: {facts['answer_tokens']:,} answer tokens in {facts['conversations']:,} conversations of {source} "
        f"({facts['held_out']:,} more held out); {facts['positions']:,} positions in {facts['steps']:,} steps"
    )
    console.result(
        f"memory: {facts['memory_bytes'] / 1e9:.1f} GB, {facts['parameters']:,} weights to train; "
        f"{facts['disk_bytes'] / 1e9:.1f} GB of disk for the states of {facts['tokens_to_run']:,} tokens"
    )
    parts = ", ".join(f"{name} {span(value)}" for name, value in seconds.items())
    console.result(
        f"time: about {span(sum(seconds.values()))} ({parts}), by the speed of two steps here"
    )


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Yields a list that receives the first Ctrl-C or SIGTERM; a second one ends the program at once."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def ask(number: int, frame: object) -> None:
        received.append(number)
        restore()
        console.info("stopping after this step; the same signal again ends at once")

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, ask)
    try:
        yield received
    finally:
        restore()
