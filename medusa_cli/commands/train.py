"""`medusa train`: a drafter from the run's distilled conversations."""

import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_cli import console, extras, options
from medusa_cli.errors import INTERRUPTED
from medusa_cli.runs.run import DEFAULT_RUN

# Positions trained a second on two cores with the default model, from cached states and beside whole passes (a guess);
# for the estimate only.
RATE, WHOLE_RATE = 1500, 250


def train(
    asked: typer.Context,
    recipe: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE.yaml] [KEY=VALUE ...]",
            help="A recipe file, and settings such as drafter=hydra or train.lr=1e-3.",
        ),
    ] = None,
    run: options.Run = DEFAULT_RUN,
    model: options.Model = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Conversations (JSON or JSONL) to train on. [default: the run's distill.jsonl]"),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Another run whose data, and whose heads where they fit (in stage 2 with their adapter), this starts "
            "from; for its data alone give --data. A run inside it (runs/RUN/NAME) is calibrated on the same held-out "
            "conversations.",
        ),
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(help="1: the heads on the frozen model; 2: heads and model together. [default: 1]"),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Stage 2: how lambda_0, the heads' weight, runs: constant, warmup or sine."),
    ] = None,
    tuning: Annotated[
        str | None, typer.Option("--tuning", metavar="WAY", help="Stage 2: lora, qlora (4-bit model) or full.")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Stage 2: the same as --tuning lora.")] = False,
    qlora: Annotated[bool, typer.Option("--qlora", help="Stage 2: the same as --tuning qlora.")] = False,
    shard: Annotated[
        bool | None,
        typer.Option(
            "--shard/--no-shard",
            help="Under torchrun: split the frozen model's layers over the processes. [default: --no-shard]",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Heads to train, the same as drafter.num_heads=N.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's checkpoint.")] = False,
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
    """Train a drafter on the model's own answers, the model itself frozen, or with --stage 2 both together.

    Writes RUN/drafter (and RUN/adapter), the log train.jsonl, the curves train.png, checkpoints, and where tensorboard
    is installed its scalars in RUN/tensorboard. Typed bare it takes about ten minutes on two cores; Ctrl-C leaves a
    checkpoint for --resume.
    """
    from medusa_cli.errors import UsageError
    from medusa_cli.runs.files import write_atomic
    from medusa_cli.runs.lock import sole_writer
    from medusa_cli.runs.run import Run

    rank = int(os.environ.get("RANK", "0"))
    console.configure(quiet=quiet or rank > 0, json=json or rank > 0)  # one process of several speaks
    extras.need("train", "`medusa train`")
    ways = [way for way, given in (("lora", lora), ("qlora", qlora), (tuning, tuning is not None)) if given]
    if len(ways) > 1:
        raise UsageError("--lora, --qlora and --tuning exclude each other", "give one of them")
    start = Run.open(origin, named="@from") if origin is not None else None
    target = Run.open(run, create=data is not None or start is not None or Run.inside(run))
    given = {"drafter.num_heads": heads, "train.seed": random_seed, "model": model, "train.stage": stage}
    given |= {"train.schedule": schedule, "train.tuning": ways[0] if ways else None, "train.shard": shard}
    if dtype in ("bf16", "fp32"):
        given["train.dtype"] = dtype
    if rank == 0:  # it alone writes
        asked.with_resource(sole_writer(target.path, "medusa train", console.warn))
    plan = _recipe(target, recipe or [], given, resume, start or target)
    target.keep_template(plan.chat_template)
    sources = {"--from": origin, "--data": data}
    if data is None and start is not None:
        data = start.data_path
    source = data or target.data_path
    from medusa_cli.training.build import check_drafter, drafter_class, runs_model

    check_drafter(plan)
    bound, kind = plan.train.max_tokens, drafter_class(plan.drafter.name)
    whole = plan.train.stage == 2 or runs_model(kind, plan.train)
    minutes = 1 + (bound or 0) // (60 * (WHOLE_RATE if whole else RATE))
    length = f" or {bound:,} tokens, at most {minutes} min on two cores" if bound else ""
    whose = options.called(plan.model, {"trust_remote_code": trust_remote_code})
    console.info(
        f"Training {plan.drafter.num_heads} {plan.drafter.name} heads for {whose} on {source}: "
        f"{plan.train.epochs} epochs{length}; train.epochs=4 train.max_tokens=null or a recipe trains longer"
    )

    from medusa_cli.commands.outcome import finish
    from medusa_cli.commands.stages import frozen, joint
    from medusa_cli.training import Trainer, World
    from medusa_cli.training.allocator import keep_freed_memory
    from medusa_cli.training.setup import check_shard

    keep_freed_memory()
    world = World.join(device)
    rounded = {"load_in_4bit": bool(load_in_4bit), "load_in_8bit": bool(load_in_8bit)}
    place = {"device": world.device(device), "dtype": dtype, "trust_remote_code": trust_remote_code, **rounded}
    check_shard(plan.train, place, world)
    backbone, dataset, drafter, coverage = (
        frozen(target, plan, data, {**place, "engine": engine}, world, resume, start)
        if plan.train.stage == 1
        else joint(target, plan, data, place, world, resume, start)
    )
    with _stopping() as should_stop:
        trainer = Trainer(backbone, drafter, dataset, plan, target, resume=resume, should_stop=should_stop, world=world)
        if world.first:
            write_atomic(target.recipe_path, plan.to_yaml())
        items = "conversations" if whole else "answers"
        console.info(
            f"{dataset.report}; {len(dataset.train):,} {items} to train on, {len(dataset.held_out):,} held "
            f"out; {trainer.positions:,} tokens in {trainer.steps:,} steps"
            + (f"; the draft vocabulary covers {coverage:.2%} of the answers" if coverage < 1 else "")
        )
        _name_idle(plan.train, world)
        summary = _run(trainer, target) if world.first else _follow(trainer)
    world.wait()
    world.leave()
    if not world.first:
        return
    if summary["stopped"]:
        words = ["medusa", "train", "--resume", "--run", run]
        words += [str(word) for flag, one in sources.items() if one for word in (flag, one)]
        again = shlex.join(words + [f"--{key.replace('_', '-')}" for key, given in rounded.items() if given])
        console.warn(f"stopped at step {trainer.step} of {trainer.steps}; go on with: {again}")
        raise typer.Exit(INTERRUPTED)
    finish(trainer, target, source, coverage, summary, json, run)


def _recipe(target: Any, words: list[str], given: dict[str, Any], resume: bool, origin: Any) -> Any:
    """The recipe in force: the file (a resumed run's own if none is named), KEY=VALUE words, then flags.

    Where none of them names a model or a chat template, it is that of the run `origin`.
    """
    from medusa_cli.errors import UsageError
    from medusa_cli.runs.recipe import load_recipe

    files = [word for word in words if "=" not in word or word.endswith((".yaml", ".yml"))]
    if len(files) > 1:
        raise UsageError(f"{files[1]!r} is a second recipe", "give one recipe file and KEY=VALUE settings")
    path = Path(files[0]) if files else target.recipe_path if resume and target.recipe_path.is_file() else None
    settings = [word for word in words if word not in files]
    flags = [f"{key}={value}" for key, value in given.items() if value is not None]
    named_model = path is not None or any(one.startswith("model=") for one in settings + flags)
    if not named_model and origin.model is not None:
        settings.insert(0, f"model={origin.model}")
    plan = load_recipe(path, settings + flags)
    return replace(plan, chat_template=target.template_with(plan.chat_template or origin.chat_template))


def _name_idle(train: Any, world: Any) -> None:
    """Say how many processes find no micro-batch in a step, and which settings give them some."""
    idle = world.size - train.accumulation
    if idle > 0 and world.first:
        console.warn(
            f"{idle} of {world.size} processes have nothing to do: a step has train.accumulation={train.accumulation} "
            f"micro-batches; train.accumulation={train.accumulation * world.size} with "
            f"train.batch_tokens={max(2, train.batch_tokens // world.size)} gives all a part of the same steps"
        )


@contextmanager
def _stopping() -> Iterator[Any]:
    """Turn the first Ctrl-C into a request to stop between batches; a second one interrupts at once."""
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _follow(trainer: Any) -> dict[str, Any]:
    """Run the training as one of several processes that neither write nor speak."""
    for _ in trainer.events():
        pass
    return {}


def _run(trainer: Any, target: Any) -> dict[str, Any]:
    """Run the training, logging and showing every event; return what the last ones said."""
    from medusa_cli.commands.live import cells
    from medusa_cli.commands.outcome import cost, shares, validations
    from medusa_cli.training import Saved, Stepped, Stopped, Validated
    from medusa_cli.training.log import NAME, TrainLog, read_log
    from medusa_cli.training.picture import draw_curves
    from medusa_cli.training.tracker import Board

    log = TrainLog(target.path / NAME, resumed_at=trainer.step if trainer.step else None)
    board = Board(target.path / "tensorboard", resumed_at=trainer.step if trainer.step else None)
    summary: dict[str, Any] = {"stopped": False, "positions": 0, "seconds": 0.0, "loss": None}
    start = time.perf_counter()
    try:
        with console.progress("training", total=trainer.positions, unit="tokens") as bar:
            bar.advance(trainer.positions_done)
            for event in trainer.events():
                log.write(event)
                board.write(event)
                if isinstance(event, Stepped):
                    summary["positions"] += event.positions
                    summary["seconds"] += event.seconds
                    summary["loss"] = event.loss
                    bar.advance(event.positions)
                    rate = summary["positions"] / max(summary["seconds"], 1e-9)
                    bar.show(cells(event, trainer.positions - event.total_positions, rate))
                elif isinstance(event, Validated):
                    right, words = shares(event.accuracies), cost(event.parts)
                    console.info(f"step {event.step}: held-out loss {event.loss:.3f}, top-1 by head {right}{words}")
                elif isinstance(event, Saved | Stopped):
                    draw_curves(
                        read_log(log.path),
                        target.path / "train.png",
                        f"{target.name}: stage {trainer.recipe.train.stage}",
                    )
                    summary["stopped"] = isinstance(event, Stopped)
    finally:
        log.close()
        board.close()
    summary["wall_seconds"] = time.perf_counter() - start
    # From the log, because a training resumed at its very end validates no more.
    return summary | validations(read_log(log.path))
