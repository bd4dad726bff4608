"""What trainings on whole conversations start from: these, and for stage 2 a backbone that learns, stage-1 heads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from medusa_cli.backbone import Backbone, adapter
from medusa_cli.backbone.identity import weights_of
from medusa_cli.backbone.network import NetworkOptions, load_network
from medusa_cli.drafters.config import HeadsConfig
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engines import attach
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.made import describe_drafter
from medusa_cli.runs.recipe import Recipe, TrainRecipe
from medusa_cli.runs.run import Run, check_backbone
from medusa_cli.training.build import drafter_class
from medusa_cli.training.conversations import Conversations, split_conversations
from medusa_cli.training.distributed import World
from medusa_cli.training.parsing import read_records


def check_shard(train: TrainRecipe, place: NetworkOptions, world: World) -> None:
    """UsageError where train.shard is set and the model cannot be split."""
    if not train.shard:
        return
    if world.size == 1:
        raise UsageError(
            "@shard splits the model over several processes, and there is one",
            "start it as `torchrun --nproc_per_node N -m medusa_cli train ... --run-dir RUN`, or use train.shard=false",
        )
    tuning = train.tuning if train.stage == 2 else None
    if tuning == "full":
        raise UsageError(
            "@shard splits frozen weights, and train.tuning=full trains them all",
            "use train.tuning=lora, or train.shard=false",
        )
    if tuning == "qlora" or place["load_in_4bit"] or place["load_in_8bit"]:
        raise UsageError(
            "@shard cannot split weights of 4 or 8 bits", "train in whole weights, or use train.shard=false"
        )


def joint_backbone(recipe: Recipe, place: NetworkOptions) -> Backbone:
    """Load the recipe's model with fresh LoRA (over 4-bit weights for qlora), or with every weight free to learn."""
    train = recipe.train
    if drafter_class(recipe.drafter.name).whole_sequences:
        raise UsageError(
            f"train.stage=2 cannot train drafter={recipe.drafter.name}: its states ride in a frozen model",
            "use train.stage=1, or another drafter",
        )
    quantised = train.tuning == "qlora" or place["load_in_4bit"] or place["load_in_8bit"]
    if train.tuning == "full":
        if quantised:
            raise UsageError("train.tuning=full cannot train a quantised model", "use train.tuning=qlora")
        if train.objective == "kl":
            raise UsageError(
                "train.objective=kl needs an adapter that can be switched off; train.tuning=full has none",
                "use train.objective=ce, or train.tuning=lora",
            )
    place = {**place, "load_in_4bit": train.tuning == "qlora" or place["load_in_4bit"]}
    if train.dtype == "fp32" and place["dtype"] == "auto":  # nothing casts what a network of bf16 hands to the heads
        place["dtype"] = "fp32"
    network, tokenizer = load_network(recipe.model, **place, shard=train.shard, chat_template=recipe.chat_template)
    if train.tuning == "full":
        network = network.float()
    else:
        depth = network.config.get_text_config().num_hidden_layers
        if (train.lora_layers or 0) > depth:
            raise UsageError(
                f"train.lora_layers={train.lora_layers} is more than this model's {depth} layers",
                f"use {depth} or less, or leave it out for all of them",
            )
        torch.manual_seed(train.seed)
        sizes: dict[str, Any] = {"rank": train.lora_rank, "alpha": train.lora_alpha, "dropout": train.lora_dropout}
        adapter.attach(network, **sizes, layers=train.lora_layers)
    backbone = Backbone(network, tokenizer, id=recipe.model, weights=weights_of(recipe.model))
    attach(backbone, "eager")  # gradients pass through the network's own layers alone
    adapter.unfreeze(network, everything=train.tuning == "full")
    if train.gradient_checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})  # a frozen embedding starts no gradient
    network.train()
    attach(backbone)  # heads that are loaded ask how it multiplies
    return backbone


def whole_conversations(
    run: Run, backbone: Backbone, recipe: Recipe, data: Path | None, fraction: float
) -> Conversations:
    """The run's distilled conversations (or those of `data`), whole; UserError for missing or unusable data."""
    path = data or run.data_path
    records, report = read_records(path, backbone)
    train = recipe.train
    return split_conversations(
        records,
        report,
        max_length=min(train.max_length, train.batch_tokens, backbone.max_positions),
        fraction=fraction,
    )


def trained_heads(run: Run, backbone: Backbone, drafter: HeadDrafter, adapted: bool = False) -> bool:
    """Copy the run's drafter into a fresh one of the same shape; False where there is no such drafter.

    Those of stage 1, or, `adapted`, those of stage 2 with the adapter they belong to. A fresh one may read states of
    more layers beside the final ones, see them through prefix layers, and have more blocks in its heads: what is more
    of it changes nothing yet.
    """
    if not (run.drafter_dir / "config.json").is_file():
        return False
    made = describe_drafter(run.drafter_dir).provenance.identity
    if not made or bool(made.get("adapter")) != adapted:
        return False
    try:
        check_backbone(made, backbone.identity, "the drafter")
        found = type(drafter).load(run.drafter_dir, backbone)
    except UserError:
        return False
    if found.config != _begun_by(drafter.config, found.config):
        return False
    if adapted:
        if run.adapter is None or adapter.digest(run.adapter) != made["adapter"]:
            return False
        adapter.take_up(backbone.model, run.adapter)
    with torch.no_grad():
        given = dict(found.named_parameters())
        for name, weight in drafter.named_parameters():
            if name in given:
                weight.copy_(given[name])
    drafter.draft_ids.copy_(found.draft_ids)
    return True


def mean_heads(runs: Sequence[Run], backbone: Backbone, drafter: HeadDrafter) -> Run | None:
    """Copy the mean of several runs' drafters into a fresh one, as `trained_heads` each; the first run that has none.

    None where all have one. Heads that went on from the same ones may lie in one valley, and their mean be better than
    any of them (model soups, arXiv:2203.05482). UserError for draft vocabularies that differ.
    """
    fresh = {name: weight.detach().clone() for name, weight in drafter.named_parameters()}
    sums = {name: torch.zeros_like(weight) for name, weight in fresh.items()}
    ids: torch.Tensor | None = None
    with torch.no_grad():
        for run in runs:
            for name, weight in drafter.named_parameters():  # what the run has not is as nothing in it
                weight.copy_(fresh[name])
            if not trained_heads(run, backbone, drafter):
                return run
            if ids is not None and not torch.equal(ids, drafter.draft_ids):
                raise UserError(
                    f"@from {run.path}: its heads score another draft vocabulary than those of {runs[0].path}",
                    "give runs of which one went on from the other",
                )
            ids = drafter.draft_ids.clone()
            for name, weight in drafter.named_parameters():
                sums[name] += weight.float() / len(runs)
        for name, weight in drafter.named_parameters():
            weight.copy_(sums[name])
    return None


def _begun_by(config: HeadsConfig, found: HeadsConfig) -> HeadsConfig:
    """`config` without those parts that `found` has not and that change nothing at first: what its heads can begin."""
    less: dict[str, Any] = {"num_layers": min(config.num_layers, found.num_layers)}
    for key, none in (("taps", ()), ("prefix_layers", 0)):
        if getattr(found, key, None) == none:
            less[key] = none
    return replace(config, **{key: one for key, one in less.items() if hasattr(config, key)})
