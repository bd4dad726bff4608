"""`medusa train`: a drafter from the run's distilled conversations."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import console, extras, options
from medusa_cli.commands.groups import Said, Where
from medusa_cli.errors import INTERRUPTED
from medusa_cli.runs.run import DEFAULT_RUN

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
    place: Where,
    said: Said,
) -> None:
    """Train a drafter on the model's own answers, the model itself frozen, or with --stage 2 both together.

    Writes RUN/drafter (and RUN/adapter), the log train.jsonl, the curves train.png, checkpoints, and where tensorboard
    is installed its scalars in RUN/tensorboard. Typed bare it takes about ten minutes on two cores; Ctrl-C leaves a
    checkpoint for --resume.
    """
    from medusa_cli.runs.files import write_atomic
    from medusa_cli.runs.lock import sole_writer
    from medusa_cli.runs.recipe import plan_of, recipe_file
    from medusa_cli.runs.run import Run

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
    from medusa_cli.training.build import check_drafter, check_flags_of_2, drafter_class, runs_model

    check_drafter(plan)
    check_flags_of_2(plan.train, schedule=schedule, tuning=tuning, lora=lora, qlora=qlora)
    bound, kind = plan.train.max_tokens, drafter_class(plan.drafter.name)
    whole = plan.train.stage == 2 or runs_model(kind, plan.train)
    minutes = 1 + int((bound or 0) / (60 * (WHOLE_RATE if whole else RATE / kind.effort)))
    length = f" or {bound:,} tokens, at most {minutes} min on two cores" if bound else ""
    console.info(
        f"Training {plan.drafter.num_heads} {plan.drafter.name} heads for {place.of(plan.model)} on {source}: "
        f"{plan.train.epochs} epochs{length}; train.epochs=4 train.max_tokens=null or a recipe trains longer"
    )

    from medusa_cli.commands.live import command_on, follow, name_idle, run_training, stopping
    from medusa_cli.commands.outcome import finish
    from medusa_cli.commands.stages import frozen, joint
    from medusa_cli.training import Trainer, World
    from medusa_cli.training.allocator import keep_freed_memory
    from medusa_cli.training.checkpoints import set_aside
    from medusa_cli.training.data import coverage
    from medusa_cli.training.setup import check_shard

    keep_freed_memory()
    world = World.join(place.device)
    asked_for = place
    place = replace(place, device=world.device(place.device))
    check_shard(plan.train, place.network, world)
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
    world.leave()
    if not world.first:
        return
    if summary["stopped"]:
        again = command_on({"--run": run, **sources}, asked_for)
        console.warn(f"stopped at step {trainer.step} of {trainer.steps}; go on with: {again}")
        raise typer.Exit(INTERRUPTED)
    finish(trainer, target, source, covered, summary, said.json, run)
