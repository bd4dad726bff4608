"""A fresh drafter as a recipe describes it."""

import difflib

from torch import Tensor

from medusa_cli.backbone import Backbone
from medusa_cli.drafters import DRAFTERS
from medusa_cli.drafters.base import beside_final, check_layers
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.errors import UsageError
from medusa_cli.runs.recipe import DrafterRecipe, Recipe, TrainRecipe
from medusa_cli.training.conversations import Conversations
from medusa_cli.training.data import Dataset, frequent_tokens


def drafter_class(name: str) -> type[HeadDrafter]:
    """The class of a drafter's name; UsageError, with the nearest name, for an unknown one."""
    if name not in DRAFTERS:
        near = difflib.get_close_matches(name, DRAFTERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(sorted(DRAFTERS))}"
        raise UsageError(f"drafter.name={name!r} is unknown", hint)
    return DRAFTERS[name]


def runs_model(kind: type[HeadDrafter] | HeadDrafter, train: TrainRecipe) -> bool:
    """Whether a drafter of a kind learns in stage 1 beside passes of the model over whole conversations."""
    return kind.whole_sequences or train.states == "fresh"


def check_drafter(recipe: Recipe) -> None:
    """UsageError where the recipe's way of training is none for its kind of drafter."""
    kind, train = drafter_class(recipe.drafter.name), recipe.train
    if train.regress and not kind.sees_drafted:
        raise UsageError(
            f"train.regress={train.regress:g} says nothing to {kind.name}: its states are not held to the model's",
            "leave it out, or use drafter=hydra, drafter=amphista or drafter=eagle",
        )
    if train.heads_in_turn and not kind.whole_sequences:
        raise UsageError(
            f"train.heads_in_turn=true says nothing to {kind.name}: its heads learn at once",
            "leave it out, or use drafter=firp",
        )
    if train.loss != "ce" and train.soft:
        raise UsageError(
            f"train.soft={train.soft:g} says nothing to train.loss={train.loss}: its target is the model's own "
            "distribution in any case",
            "use train.soft=0, or train.loss=ce",
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
    return beside_final(taps)


def vocabulary_of(recipe: DrafterRecipe, backbone: Backbone, kind: type[HeadDrafter]) -> str:
    """What "auto" stands for: a draft vocabulary where it is smaller than the model's, else the whole of that."""
    if recipe.vocabulary != "auto":
        return recipe.vocabulary
    whole = "own" if "own" in kind.vocabularies else "shared"
    return "draft" if recipe.draft_vocab_size < backbone.vocab_size else whole


def build_drafter(backbone: Backbone, recipe: DrafterRecipe, dataset: Dataset | Conversations) -> HeadDrafter:
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
