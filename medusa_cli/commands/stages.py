"""What each stage of `medusa train` loads."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_cli import console
from medusa_cli.commands.groups import Where
from medusa_cli.commands.loading import warn_of
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.recipe import Recipe
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.backbone import Backbone
    from medusa_cli.drafters.heads import HeadDrafter
    from medusa_cli.training import Conversations, Dataset, World

    # The backbone, what is learnt from, and the drafter.
    Loaded = tuple[Backbone, Dataset | Conversations, HeadDrafter]


def frozen(
    target: Run, plan: Recipe, data: Path | None, place: Where, world: "World", resume: bool, starts: Sequence[Run] = ()
) -> "Loaded":
    """Stage 1: the backbone as it decodes, what the drafter learns from, and a drafter: fresh, or other runs'.

    world: the processes that train, which share what there is to compute before. UserError where several runs are to
    give the heads and one has none that fit.
    """
    import torch

    from medusa_cli.commands.dataset import ROWS, engine_for, open_dataset
    from medusa_cli.engines import load_backbone
    from medusa_cli.training import build_drafter
    from medusa_cli.training.build import drafter_class, runs_model, taps_of
    from medusa_cli.training.setup import mean_heads

    kind = drafter_class(plan.drafter.name)
    engine, whole = engine_for(kind, plan.train, place.engine), runs_model(kind, plan.train)
    given = replace(place, engine=engine).loading
    shard, template = plan.train.shard, plan.chat_template
    backbone = _loaded(
        lambda: load_backbone(plan.model, **given, gradients=whole, shard=shard, chat_template=template, rows=ROWS),
        target,
        world,
        shard,
    )
    fraction = plan.train.validation_fraction
    taps, prompts = taps_of(plan.drafter, backbone), kind.sees_prompt(plan.drafter)
    dataset = open_dataset(
        target, backbone, kind, taps, plan, prompts=prompts, data=data, fraction=fraction, together=world, sharded=shard
    )
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
    target: Run, plan: Recipe, data: Path | None, place: Where, world: "World", resume: bool, starts: Sequence[Run] = ()
) -> "Loaded":
    """Stage 2: a backbone that learns, whole conversations, and stage-1 heads: the run's own where it has such ones.

    Another run may give heads of stage 2 as well, with their adapter. world as in `frozen`. UserError where another
    run is to give the heads and has none that fit.
    """
    import torch

    from medusa_cli.training import build_drafter
    from medusa_cli.training.setup import joint_backbone, trained_heads, whole_conversations

    if len(starts) > 1:
        raise UsageError("--from is given more than once, and stage 2 starts from one run", "name one")
    start = starts[0] if starts else None
    backbone = _loaded(lambda: joint_backbone(plan, place.network), target, world, plan.train.shard)
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


def _loaded(load: "Callable[[], Backbone]", target: Run, world: "World", shard: bool) -> "Backbone":
    """The backbone, its run bound to it: the first process ahead, who fetches what all read; a split one by all."""
    with nullcontext() if shard else world.first_ahead():
        backbone = load()
    with world.first_ahead():
        target.bind(backbone.identity)
    return backbone
