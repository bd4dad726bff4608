"""A fresh drafter as a recipe describes it."""

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_cli.data.conversation import Conversation, read_conversations
from medusa_cli.data.packing import Dataset, frequent_tokens, split_conversations
from medusa_cli.drafters import DRAFTERS
from medusa_cli.drafters.base import HeadsConfig, check_layers, with_last_layer
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.io import load_kind
from medusa_cli.engine import attach
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.model.identity import weights_of
from medusa_cli.model.load import load_network
from medusa_cli.runs.provenance import describe_drafter
from medusa_cli.runs.recipe import DrafterRecipe, Recipe, TrainRecipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run, check_backbone
from medusa_cli.train.distributed import Distributed

# Conversations run through the backbone whole, not as the few rows of a tree: kernels are chosen for so many rows.
ROWS = 64


def drafter_class(name: str) -> type[HeadDrafter]:
    """The class of a drafter's name; UsageError, with the nearest name, for an unknown one."""
    if name not in DRAFTERS:
        near = difflib.get_close_matches(name, DRAFTERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(sorted(DRAFTERS))}"
        raise UsageError(f"drafter.name={name!r} is unknown", hint)
    return DRAFTERS[name]


def runs_model(kind: type[HeadDrafter] | HeadDrafter, train: TrainRecipe) -> bool:
    """Whether a drafter of a kind learns in stage 1 beside passes of the model over whole conversations."""
    return kind.uses_verify_pass or train.states == "fresh"


def engine_for(kind: type[HeadDrafter], train: TrainRecipe, engine: str) -> str:
    """Returns the engine to load the backbone with; raises UsageError for fast if whole conversations run."""
    if not runs_model(kind, train):
        return engine
    if engine == "fast":
        raise UsageError(
            f"@engine fast cannot run {kind.name} over whole conversations: it packs the layers' weights",
            "leave @engine out; the trained drafter runs on either engine",
        )
    return "eager"


def check_drafter(recipe: Recipe) -> None:
    """UsageError where the recipe's way of training is none for its kind of drafter."""
    kind, train = drafter_class(recipe.drafter.name), recipe.train
    if train.regress and not kind.autoregressive:
        raise UsageError(
            f"train.regress={train.regress:g} says nothing to {kind.name}: its states are not held to the model's",
            "leave it out, or use drafter=hydra or drafter=eagle",
        )
    if train.heads_in_turn and not kind.uses_verify_pass:
        raise UsageError(
            f"train.heads_in_turn=true says nothing to {kind.name}: its heads learn at once",
            "leave it out, or use drafter=firp",
        )
    if train.loss == "lk" and train.soft:
        raise UsageError(
            f"train.soft={train.soft:g} has no effect with train.loss=lk: its target is the model's own distribution",
            "leave it out, or use train.loss=ce",
        )
    if train.muon_lr is not None and train.optimizer != "muon":
        raise UsageError(
            f"train.muon_lr={train.muon_lr:g} says nothing to train.optimizer={train.optimizer}",
            "leave it out, or use train.optimizer=muon",
        )
    if train.lora_layers is not None and (train.stage == 1 or train.tuning == "full"):
        way = "train.stage=1" if train.stage == 1 else "train.tuning=full"
        raise UsageError(
            f"train.lora_layers={train.lora_layers} says nothing to {way}: it trains no LoRA",
            "leave it out, or use train.stage=2 with train.tuning=lora",
        )
    # Such heads learn beside the lm_head's weight without the adapter, and would score with the merged one.
    if train.stage == 2 and recipe.drafter.vocabulary == "shared":
        raise UsageError(
            "train.stage=2 trains the lm_head, which drafter.vocabulary=shared needs to stay as it is",
            "use drafter.vocabulary=own or draft, or train.stage=1",
        )


def check_flags_of_2(train: TrainRecipe, **flags: str | bool | None) -> None:
    """UsageError where flags that are stage 2's are given to stage 1, or name more than one way of tuning."""
    given = {flag: one for flag, one in flags.items() if one}
    if len(given.keys() & {"lora", "qlora", "tuning"}) > 1:
        raise UsageError("@lora, @qlora and @tuning exclude each other", "give one of them")
    if given and train.stage == 1:
        flag, one = next(iter(given.items()))
        said = f"@{flag}" if one is True else f"@{flag} {one}"
        raise UsageError(f"{said} says nothing to train.stage=1, heads alone", "leave it out, or give @stage 2")


def taps_of(recipe: DrafterRecipe, backbone: Backbone) -> tuple[int, ...]:
    """The layers whose states a drafter is to read; UsageError for ones that this model has not."""
    kind = drafter_class(recipe.name)
    if "taps" not in kind.settings:
        return kind.taps
    taps = recipe.taps or kind.default_taps(backbone.num_layers)
    check_layers(taps, backbone.num_layers, "drafter.taps")
    return with_last_layer(taps)


def vocabulary_of(recipe: DrafterRecipe, backbone: Backbone, kind: type[HeadDrafter]) -> str:
    """What "auto" stands for: a draft vocabulary where it is smaller than the model's, else the whole of that."""
    if recipe.vocabulary != "auto":
        return recipe.vocabulary
    whole = "own" if "own" in kind.vocabularies else "shared"
    return "draft" if recipe.draft_vocab_size < backbone.vocab_size else whole


def build_drafter(backbone: Backbone, recipe: DrafterRecipe, dataset: Dataset[Any]) -> HeadDrafter:
    """An untrained drafter, its draft vocabulary, where it is to have one, that of the data set's answers."""
    kind = drafter_class(recipe.name)
    for other in DRAFTERS.values():
        for key in set(other.settings) - set(kind.settings):
            if getattr(recipe, key) != getattr(DrafterRecipe(), key):
                raise UsageError(
                    f"drafter.{key}={getattr(recipe, key)} says nothing to {kind.name}",
                    f"leave it out, or use drafter={other.name}",
                )
    vocabulary = vocabulary_of(recipe, backbone, kind)
    draft_ids: Tensor | None = None
    if vocabulary == "draft":
        if recipe.draft_vocab_size > backbone.vocab_size:
            raise UsageError(
                f"drafter.draft_vocab_size={recipe.draft_vocab_size} is larger than the model's vocabulary",
                f"use {backbone.vocab_size} or less, or drafter.vocabulary=own",
            )
        draft_ids = frequent_tokens(dataset.answer_tokens(), recipe.draft_vocab_size, backbone.vocab_size)
    return kind.create(
        backbone,
        num_heads=recipe.num_heads,
        num_layers=recipe.num_layers,
        vocabulary=vocabulary,
        draft_ids=draft_ids,
        matrices=recipe.matrices,
        rank=recipe.rank,
        **{key: getattr(recipe, key) for key in kind.settings},
    )


def check_shard(train: TrainRecipe, options: LoadOptions, world: Distributed) -> None:
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
    if tuning == "qlora" or options.quantised:
        raise UsageError(
            "@shard cannot split weights of 4 or 8 bits", "train in whole weights, or use train.shard=false"
        )


def joint_backbone(recipe: Recipe, options: LoadOptions) -> Backbone:
    """Load the recipe's model with fresh LoRA (over 4-bit weights for qlora), or with every weight free to learn."""
    train = recipe.train
    if drafter_class(recipe.drafter.name).uses_verify_pass:
        raise UsageError(
            f"train.stage=2 cannot train drafter={recipe.drafter.name}: its states ride in a frozen model",
            "use train.stage=1, or another drafter",
        )
    quantised = train.tuning == "qlora" or options.quantised
    if train.tuning == "full":
        if quantised:
            raise UsageError("train.tuning=full cannot train a quantised model", "use train.tuning=qlora")
        if train.objective == "kl":
            raise UsageError(
                "train.objective=kl needs an adapter that can be switched off; train.tuning=full has none",
                "use train.objective=ce, or train.tuning=lora",
            )
    options = replace(options, quantize="bnb.nf4") if train.tuning == "qlora" else options
    if train.dtype == "fp32" and options.dtype == "auto":  # nothing casts what a network of bf16 hands to the heads
        options = replace(options, dtype="fp32")
    network, tokenizer = load_network(recipe.model, options, shard=train.shard, chat_template=recipe.chat_template)
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
) -> Dataset[Conversation]:
    """The run's distilled conversations (or those of `data`), whole; UserError for missing or unusable data."""
    path = data or run.data_path
    records, report = read_conversations(path, backbone)
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
        found = load_kind(type(drafter), run.drafter_dir, backbone)
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
