"""What `train` and `calibrate` share: the engine and the data set that a drafter of a kind learns with."""

import math
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medusa_cli import console, extras, options
from medusa_cli.errors import INTERRUPTED, UsageError, UserError
from medusa_cli.options import LoadFlags, OutputFlags, warn_of
from medusa_cli.runs.io import Document
from medusa_cli.runs.recipe import Recipe, TrainRecipe
from medusa_cli.runs.run import DEFAULT_RUN, Run

if TYPE_CHECKING:
    from types import FrameType

    from medusa_cli.drafters.heads import HeadDrafter
    from medusa_cli.model import Backbone
    from medusa_cli.train import Dataset, Distributed, Stepped, Trainer

    # The backbone, what is learnt from, and the drafter.
    Loaded = tuple[Backbone, Dataset[Any], HeadDrafter]


def open_dataset(
    run: Run,
    backbone: "Backbone",
    kind: "type[HeadDrafter]",
    taps: Sequence[int],
    recipe: Recipe,
    *,
    prompts: bool,
    data: Path | None,
    world: "Distributed",
) -> "Dataset[Any]":
    """Returns a drafter's training data: answers with cached states, or whole conversations.

    taps: the layers whose states it reads; prompts: True if its layers see those of prompts.
    """
    from medusa_cli.train import load_dataset
    from medusa_cli.train.setup import runs_model, whole_conversations

    fraction = recipe.train.validation_fraction
    if runs_model(kind, recipe.train):
        return whole_conversations(run, backbone, recipe, data, fraction)
    with console.bars() as show:
        return load_dataset(
            run,
            backbone,
            data=data,
            fraction=fraction,
            taps=taps,
            prompts=prompts,
            world=world,
            on_progress=lambda done, total: show("hidden states", done, total, "tokens"),
        )


def cells(event: "Stepped", left: int, rate: float) -> dict[str, str]:
    """A step as the cells of the table above the bar; `left` positions are to come, at `rate` a second."""
    shown = {
        "step": f"{event.step:,}/{event.steps:,}",
        "loss": f"{event.loss:.3f}",
        "top-1 by head": "/".join(f"{value:.2f}".lstrip("0") for value in event.accuracies),
    }
    if "lambda_0" in event.parts:
        shown["lambda_0"] = f"{event.parts['lambda_0']:.3f}"
    shown["lr"] = f"{event.lr:.1e}"
    shown["tokens/s"] = f"{rate:,.0f}"
    shown["memory"] = f"{event.memory / 1e9:.1f} GB"
    seconds = int(left / rate) if rate > 0 else 0
    shown["time left"] = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return shown


def name_idle(train: TrainRecipe, world: "Distributed") -> None:
    """Say how many processes find no micro-batch in a step, and which settings give them some."""
    idle = world.size - train.accumulation
    if idle > 0 and world.first:
        console.warn(
            f"{idle} of {world.size} processes have nothing to do: a step has train.accumulation={train.accumulation} "
            f"micro-batches; train.accumulation={train.accumulation * world.size} with "
            f"train.batch_tokens={max(2, train.batch_tokens // world.size)} gives all a part of the same steps"
        )


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a request to stop between batches; a second one interrupts at once."""
    asked = threading.Event()

    def ask(number: int, frame: "FrameType | None") -> None:
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


def follow(trainer: "Trainer") -> Document:
    """Run the training as one of several processes that neither write nor speak."""
    for _ in trainer.events():
        pass
    return {}


def run_training(trainer: "Trainer", target: Run) -> Document:
    """Run the training, logging and showing every event; return what the last ones said."""
    from medusa_cli.train import Saved, Stepped, Stopped, Validated
    from medusa_cli.train.log import NAME, Board, TrainLog, draw_curves, read_log

    log = TrainLog(target.path / NAME, resumed_at=trainer.step if trainer.step else None)
    board = Board(target.path / "tensorboard", resumed_at=trainer.step if trainer.step else None)
    summary: Document = {"stopped": False, "positions": 0, "seconds": 0.0, "loss": None}
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


def command_on(words: Mapping[str, object], place: LoadFlags) -> str:
    """The command that goes on with a training: the words it was given, and where and how its model is loaded."""
    asked = {f"--{name.replace('_', '-')}": one for name, one in vars(place).items() if one != getattr(LoadFlags, name)}
    flags = {**words, **asked}
    given = [(flag, one) for flag, some in flags.items() for one in (some if isinstance(some, list) else [some]) if one]
    said = [str(word) for flag, one in given for word in ((flag,) if one is True else (flag, one))]
    return shlex.join(["medusa", "train", "--resume", *said])


# Nats a token from the original beyond which joint training warns.
FAR = 0.05
# Of a validation, as the log has it, what the summary keeps.
KEPT = ("loss", "head_losses", "accuracies", "positions", "parts")


def validations(log: Sequence[Document]) -> Document:
    """The last validation of a log, and the acceptance to expect after it and, where there was one, before step 1."""
    checks = [line for line in log if line["event"] == "validated"]
    last = {key: checks[-1][key] for key in KEPT} if checks else None
    start = next((one for one in checks if one["step"] == 0), None)
    return {
        "validation": last,
        "expected_acceptance": last and expected_acceptance(last["accuracies"]),
        "expected_acceptance_at_start": start and expected_acceptance(start["accuracies"]),
    }


def expected_acceptance(accuracies: Sequence[float]) -> float:
    """Tokens a step over a chain of the heads' first guesses: 1 + a_1 + a_1 a_2 + ..., as if each were independent."""
    return 1 + sum(accumulate(accuracies, mul))


def finish(
    trainer: "Trainer", target: Run, source: Path, coverage: float, summary: Document, json: bool, run: str
) -> None:
    """Save the drafter with its provenance and say what came of it."""
    from medusa_cli.train.results import leave

    target, run = leave(trainer, target, source, coverage, summary["validation"], run)
    rate = summary["positions"] / summary["seconds"] if summary["seconds"] else 0.0
    if json:
        console.emit_json(
            {
                "run": str(target.path),
                "drafter": str(target.drafter_dir),
                "heads": trainer.drafter.num_heads,
                "steps": trainer.steps,
                "positions": trainer.positions,
                "loss": summary["loss"],
                "validation": summary["validation"],
                "expected_acceptance": summary["expected_acceptance"],
                "expected_acceptance_at_start": summary["expected_acceptance_at_start"],
                "draft_coverage": coverage,
                "tokens_per_s": round(rate, 1),
                "seconds": round(summary["wall_seconds"], 1),
            }
        )
        return
    console.result(
        f"{target.drafter_dir}: {trainer.drafter.num_heads} heads, {trainer.steps:,} steps"
        + (f" at {rate:,.0f} tokens/s" if rate else "")
        + _gain(summary)
        + f". Curves: {trainer.run.path / 'train.png'}. Next: medusa calibrate --run {run}"
    )


def _gain(summary: Document) -> str:
    """What held-out answers say of the heads, as words; nothing where none were held out."""
    if summary["validation"] is None:
        return ""
    start = summary["expected_acceptance_at_start"]
    return (
        f", held-out top-1 by head {shares(summary['validation']['accuracies'])}, "
        f"about {summary['expected_acceptance']:.2f} tokens a step over a chain of first guesses"
        + (f" ({start:.2f} at the start)" if start else "")
    )


def cost(parts: dict[str, float]) -> str:
    """What joint training has made of the model so far, as words after a validation; nothing in stage 1."""
    if "kl" not in parts:
        return f"; perplexity {math.exp(parts['nll']):.3f}" if "nll" in parts else ""
    words = (
        f"; KL to the original {parts['kl']:.4f} nats, perplexity {math.exp(parts['nll']):.3f} "
        f"(original {math.exp(parts['nll_original']):.3f}), greedy agreement {parts['agreement']:.1%}"
    )
    if parts["kl"] > FAR:
        console.warn(f"the model moves away from the original (KL over {FAR} nats): lower train.lambda_0 or the rates")
    return words


def shares(values: Sequence[float]) -> str:
    """Shares of 1 in two digits each."""
    return "/".join(f"{value:.2f}".lstrip("0") for value in values)


def frozen(
    target: Run,
    plan: Recipe,
    data: Path | None,
    place: LoadFlags,
    world: "Distributed",
    resume: bool,
    starts: Sequence[Run] = (),
) -> "Loaded":
    """Stage 1: the backbone as it decodes, what the drafter learns from, and a drafter: fresh, or other runs'.

    world: the processes that train, which share what there is to compute before. UserError where several runs are to
    give the heads and one has none that fit.
    """
    import torch

    from medusa_cli.engine import load_backbone
    from medusa_cli.train import build_drafter
    from medusa_cli.train.setup import ROWS, drafter_class, engine_for, mean_heads, runs_model, taps_of

    kind = drafter_class(plan.drafter.name)
    engine, whole = engine_for(kind, plan.train, place.engine), runs_model(kind, plan.train)
    given = replace(place, engine=engine)
    shard, template = plan.train.shard, plan.chat_template
    backbone = _loaded(
        lambda: load_backbone(plan.model, given, gradients=whole, shard=shard, chat_template=template, rows=ROWS),
        target,
        world,
        shard,
    )
    taps, prompts = taps_of(plan.drafter, backbone), kind.sees_prompt(plan.drafter)
    dataset = open_dataset(target, backbone, kind, taps, plan, prompts=prompts, data=data, world=world)
    torch.manual_seed(plan.train.seed)
    drafter = build_drafter(backbone, plan.drafter, dataset)
    if starts and not resume:
        without = mean_heads(starts, backbone, drafter)
        if without is None:
            mean = "the mean of " if len(starts) > 1 else ""
            console.info(f"the heads start from {mean}{' and '.join(str(one.drafter_dir) for one in starts)}")
            for one in starts:
                warn_of(one.drafter_dir, backbone.identity.get("rounding"))
        elif len(starts) > 1:
            raise UserError(
                f"--from {without.path}: it holds no heads of this kind and shape", "name runs whose heads fit together"
            )
        else:
            console.info(f"the heads start fresh: {without.path} holds none of this kind and shape")
    return backbone, dataset, drafter


def joint(
    target: Run,
    plan: Recipe,
    data: Path | None,
    place: LoadFlags,
    world: "Distributed",
    resume: bool,
    starts: Sequence[Run] = (),
) -> "Loaded":
    """Stage 2: a backbone that learns, whole conversations, and stage-1 heads: the run's own where it has such ones.

    Another run may give heads of stage 2 as well, with their adapter. world as in `frozen`. UserError where another
    run is to give the heads and has none that fit.
    """
    import torch

    from medusa_cli.train import build_drafter
    from medusa_cli.train.setup import joint_backbone, trained_heads, whole_conversations

    if len(starts) > 1:
        raise UsageError("--from is given more than once, and stage 2 starts from one run", "name one")
    start = starts[0] if starts else None
    backbone = _loaded(lambda: joint_backbone(plan, place), target, world, plan.train.shard)
    dataset = whole_conversations(target, backbone, plan, data, plan.train.validation_fraction)
    torch.manual_seed(plan.train.seed)
    drafter = build_drafter(backbone, plan.drafter, dataset)
    if resume:
        return backbone, dataset, drafter
    giver = start or target
    if trained_heads(giver, backbone, drafter):
        console.info(f"the heads start from {giver.drafter_dir}")
        warn_of(giver.drafter_dir, backbone.identity.get("rounding"))
    elif start is not None and trained_heads(start, backbone, drafter, adapted=True):
        console.info(f"the heads and the adapter start from {start.path}")
        warn_of(start.drafter_dir, backbone.identity.get("rounding"))
    elif start is not None:
        raise UserError(
            f"--from {start.path}: it holds no heads of this model and this shape",
            "train such heads there, or give its conversations alone as --data",
        )
    else:
        console.info("the heads start fresh: the run holds no stage-1 heads of this shape")
    return backbone, dataset, drafter


def _loaded(load: "Callable[[], Backbone]", target: Run, world: "Distributed", shard: bool) -> "Backbone":
    """The backbone, its run bound to it: the first process ahead, who fetches what all read; a split one by all."""
    with nullcontext() if shard else world.first_ahead():
        backbone = load()
    with world.first_ahead():
        target.bind(backbone.identity)
    return backbone


# Positions trained a second on two cores with the default model, from cached states and beside whole passes (a guess);
# for the estimate only.
RATE, WHOLE_RATE = 1500, 250


def train(
    asked: typer.Context,
    *,
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
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Another run whose heads, where they fit (in stage 2 with their adapter), this starts from, and whose "
            "data where this one has none; for its data alone give --data. A run inside it (runs/RUN/NAME) is "
            "calibrated on the same held-out conversations. Given again, heads start from the mean of all, with the "
            "first one's data.",
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
    place: LoadFlags,
    said: OutputFlags,
) -> None:
    """Train a drafter on the model's own answers, the model itself frozen, or with --stage 2 both together.

    Writes RUN/drafter (and RUN/adapter), the log train.jsonl, the curves train.png, checkpoints, and where tensorboard
    is installed its scalars in RUN/tensorboard. Typed bare it takes about ten minutes on two cores; Ctrl-C leaves a
    checkpoint for --resume.
    """
    from medusa_cli.runs.io import write_atomic
    from medusa_cli.runs.recipe import plan_of, recipe_file
    from medusa_cli.runs.run import Run, sole_writer

    rank = int(os.environ.get("RANK", "0"))
    said.configure(first=rank == 0)  # one process of several speaks
    extras.need("train", "`medusa train`")
    starts = [Run.open(one, named="@from") for one in origins or ()]
    target = Run.open(run, create=data is not None or bool(starts) or Run.inside(run))
    given = {"drafter.num_heads": heads, "train.seed": random_seed, "model": model, "train.stage": stage}
    way = tuning if tuning is not None else "lora" if lora else "qlora" if qlora else None
    given |= {"train.schedule": schedule, "train.tuning": way, "train.shard": shard}
    # A run gone on with by its own recipe computes as that says: --dtype is then the backbone's alone.
    own = resume and recipe_file(target, recipe or [], resume) == target.recipe_path
    if place.dtype in ("bf16", "fp32") and not own:
        given["train.dtype"] = place.dtype
    if rank == 0:  # it alone writes
        asked.with_resource(sole_writer(target.path, "medusa train", console.warn))
    plan = plan_of(target, recipe or [], given, resume, starts[0] if starts else target)
    target.keep_template(plan.chat_template)
    sources = {"--from": origins, "--data": data}
    if data is None and starts and not target.data_path.is_file():
        data = starts[0].data_path
    source = data or target.data_path
    from medusa_cli.train.setup import check_drafter, check_flags_of_2, drafter_class, runs_model

    check_drafter(plan)
    check_flags_of_2(plan.train, schedule=schedule, tuning=tuning, lora=lora, qlora=qlora)
    bound, kind = plan.train.max_tokens, drafter_class(plan.drafter.name)
    whole = plan.train.stage == 2 or runs_model(kind, plan.train)
    minutes = 1 + int((bound or 0) / (60 * (WHOLE_RATE if whole else RATE / kind.training_cost)))
    length = f" or {bound:,} tokens, at most {minutes} min on two cores" if bound else ""
    console.info(
        f"Training {plan.drafter.num_heads} {plan.drafter.name} heads for {place.of(plan.model)} on {source}: "
        f"{plan.train.epochs} epochs{length}; train.epochs=4 train.max_tokens=null or a recipe trains longer"
    )

    from medusa_cli.data.packing import coverage
    from medusa_cli.train import Distributed, Trainer
    from medusa_cli.train.checkpoint import set_aside
    from medusa_cli.train.loop import keep_freed_memory
    from medusa_cli.train.setup import check_shard

    keep_freed_memory()
    world = Distributed.join(place.device, sharded=plan.train.shard)
    asked_for = place
    place = replace(place, device=world.device(place.device))
    check_shard(plan.train, place, world)
    learn = frozen if plan.train.stage == 1 else joint
    backbone, dataset, drafter = learn(target, plan, data, place, world, resume, starts)
    with stopping() as should_stop:
        trainer = Trainer(backbone, drafter, dataset, plan, target, resume=resume, should_stop=should_stop, world=world)
        covered = coverage(drafter.draft_ids, dataset.answer_tokens())  # its vocabulary may be another data set's
        if world.first:
            if not resume:
                set_aside(target)
            write_atomic(target.recipe_path, plan.to_yaml())
        items = "conversations" if whole else "answers"
        console.info(
            f"{dataset.report}; {len(dataset.train):,} {items} to train on, {len(dataset.held_out):,} held "
            f"out; {trainer.positions:,} tokens in {trainer.steps:,} steps"
            + (f"; the draft vocabulary covers {covered:.2%} of the answers" if covered < 1 else "")
        )
        name_idle(plan.train, world)
        summary = run_training(trainer, target) if world.first else follow(trainer)
    world.wait()
    world.destroy()
    if not world.first:
        return
    if summary["stopped"]:
        again = command_on({"--run": run, **sources}, asked_for)
        console.warn(f"stopped at step {trainer.step} of {trainer.steps}; go on with: {again}")
        raise typer.Exit(INTERRUPTED)
    finish(trainer, target, source, covered, summary, said.json, run)
