"""What each stage of `medusa train` loads, and what it leaves in the run."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from medusa_cli import console
from medusa_cli.commands.rounding import warn_of


def frozen(
    target: Any, plan: Any, data: Path | None, place: dict[str, Any], world: Any, resume: bool, start: Any = None
) -> tuple[Any, Any, Any, float]:
    """Stage 1: the backbone as it decodes, what the drafter learns from, and a drafter: fresh, or another run's.

    world: the processes that train, which share what there is to compute before.
    """
    import torch

    from medusa_cli.commands.dataset import engine_for, open_dataset
    from medusa_cli.engines import load_backbone
    from medusa_cli.training import build_drafter
    from medusa_cli.training.build import drafter_class, runs_model, taps_of
    from medusa_cli.training.setup import trained_heads

    kind = drafter_class(plan.drafter.name)
    engine, whole = engine_for(kind, plan.train, place["engine"]), runs_model(kind, plan.train)
    place = {**place, "engine": engine, "gradients": whole}
    shard, template = plan.train.shard, plan.chat_template
    backbone = _loaded(
        lambda: load_backbone(plan.model, **place, shard=shard, chat_template=template), target, world, shard
    )
    fraction = plan.train.validation_fraction
    taps, prompts = taps_of(plan.drafter, backbone), kind.sees_prompt(plan.drafter)
    which: Any = {"data": data, "fraction": fraction, "prompts": prompts}
    dataset = open_dataset(target, backbone, kind, taps, plan, **which, together=world, sharded=shard)
    torch.manual_seed(plan.train.seed)
    drafter, coverage = build_drafter(backbone, plan.drafter, dataset)
    if start is not None and not resume:
        if trained_heads(start, backbone, drafter):
            console.info(f"the heads start from {start.drafter_dir}")
            warn_of(start.drafter_dir, backbone.identity.get("rounding"))
        else:
            console.info(f"the heads start fresh: {start.path} holds none of this kind and shape")
    return backbone, dataset, drafter, coverage


def joint(
    target: Any, plan: Any, data: Path | None, place: dict[str, Any], world: Any, resume: bool, start: Any = None
) -> tuple[Any, Any, Any, float]:
    """Stage 2: a backbone that learns, whole conversations, and stage-1 heads: the run's own where it has such ones.

    Another run may give heads of stage 2 as well, with their adapter. world as in `frozen`. UserError where another
    run is to give the heads and has none that fit.
    """
    import torch

    from medusa_cli.errors import UserError
    from medusa_cli.training import build_drafter
    from medusa_cli.training.setup import joint_backbone, trained_heads, whole_conversations

    backbone = _loaded(lambda: joint_backbone(plan, place), target, world, plan.train.shard)
    dataset = whole_conversations(target, backbone, plan, data, plan.train.validation_fraction)
    torch.manual_seed(plan.train.seed)
    drafter, coverage = build_drafter(backbone, plan.drafter, dataset)
    if resume:
        return backbone, dataset, drafter, coverage
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
    return backbone, dataset, drafter, coverage


def _loaded(load: Callable[[], Any], target: Any, world: Any, shard: bool) -> Any:
    """The backbone, its run bound to it: the first process ahead, who fetches what all read; a split one by all."""
    with nullcontext() if shard else world.first_ahead():
        backbone = load()
    with world.first_ahead():
        target.bind(backbone.identity)
    return backbone


def leave(trainer: Any, target: Any, source: Path, coverage: float, validation: Any, run: str) -> tuple[Any, str]:
    """Save the drafter (and the adapter or tuned model) with its provenance; the run they are in and its name."""
    from medusa_cli.backbone import adapter
    from medusa_cli.runs.run import provenance
    from medusa_cli.training.checkpoints import save_drafter

    identity = dict(trainer.backbone.identity)
    tuned = trainer.recipe.train.stage == 2 and trainer.recipe.train.tuning == "full"
    if tuned:
        target, identity = _tuned_run(trainer.backbone, target)
        run = str(target.path)
    elif trainer.recipe.train.stage == 2:
        adapter.save(trainer.backbone.model, target.adapter_dir, identity["id"])
        identity["adapter"] = adapter.digest(target.adapter_dir)
    elif target.adapter is not None:  # it belonged to the drafter that is replaced now
        shutil.rmtree(target.adapter_dir)
    made = provenance(
        identity,
        data={
            "path": str(source),
            "digest": trainer.digest,
            "conversations": trainer.conversations,
        },
        recipe=trainer.recipe.to_dict(),
        steps=trainer.steps,
        positions=trainer.positions,
        draft_coverage=coverage,
        validation=validation,
    )
    save_drafter(trainer.drafter, target.drafter_dir, made)
    if tuned:  # when what was trained is safe
        _copy_conversations(source, target)
    return target, run


def _tuned_run(backbone: Any, target: Any) -> tuple[Any, dict[str, Any]]:
    """A fully tuned model is another model: it goes into a run of its own, RUN/tuned."""
    from medusa_cli.backbone.identity import identity_of, weights_of
    from medusa_cli.runs.files import write_json
    from medusa_cli.runs.run import Run
    from medusa_cli.runs.run import provenance as made_by

    tuned = Run.open(str(target.path / "tuned") + "/", create=True)
    folder = tuned.path / "model"
    backbone.model.set_attn_implementation("sdpa")
    backbone.model.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)
    identity = identity_of(backbone.model, id=str(folder), weights=weights_of(str(folder)), adapter=None)
    write_json(tuned.path / "run.json", made_by(identity))
    console.info(f"the tuned model is in {folder}, its run is {tuned.path}")
    return tuned, identity


def _copy_conversations(source: Path, target: Any) -> None:
    """Give a run the conversations of a file, without their states: these were another model's."""
    from medusa_cli.runs.files import replacing
    from medusa_cli.training.records import ReadReport, parse

    with replacing(target.distill_path) as part, part.open("w", encoding="utf-8") as out:
        for record in parse(source, ReadReport()):
            if isinstance(record, dict):  # what is none was not trained on either
                kept = {key: value for key, value in record.items() if key not in ("state_rows", "seal")}
                out.write(json.dumps(kept) + "\n")
