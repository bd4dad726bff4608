"""The model, data and drafter of a training run, set up according to the recipe."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medusa_cli.data.draft_vocabulary import frequent_tokens
from medusa_cli.data.packing import Dataset, read_dataset
from medusa_cli.device import has_bf16
from medusa_cli.drafters import DRAFTERS
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.io import load_kind
from medusa_cli.engine import load_backbone
from medusa_cli.engine.eager import EagerEngine
from medusa_cli.engine.load import load_without_layers
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.model.digest import weights_of
from medusa_cli.model.distributed import Distributed
from medusa_cli.model.load import load_network, resolve_device, resolve_dtype
from medusa_cli.runs.load_options import INTEGER, LoadOptions
from medusa_cli.runs.recipe import DrafterRecipe, Recipe, TrainRecipe
from medusa_cli.runs.run import Run, check_backbone, describe_drafter, rounding_in

# Load options that have no effect on transformers' own layers, which stage 2 trains.
IGNORED_JOINTLY = {
    "quantize": INTEGER,
    "engine": ("native", "torch"),
    "activations": ("fp32", "int8"),
    "kv": ("fp16", "q8_0"),
    "exact": (True,),
}
log = logging.getLogger(__name__)


def with_dtype(recipe: Recipe, options: LoadOptions) -> Recipe:
    """Returns the recipe with the number type that `auto` stands for on the device.

    On a CPU without bf16 instructions, bf16 gradients take many times as long as fp32 gradients.
    """
    if recipe.train.dtype != "auto":
        return recipe
    on_cpu = torch.device(resolve_device(options.device)).type == "cpu"
    dtype: Literal["bf16", "fp32"] = "fp32" if on_cpu and not has_bf16() else "bf16"
    return replace(recipe, train=replace(recipe.train, dtype=dtype))


def runs_model(kind: type[HeadDrafter] | HeadDrafter, train: TrainRecipe) -> bool:
    """Returns True if stage 1 runs the model over whole conversations in every step."""
    return kind.uses_verify_pass or train.states == "fresh"


def needs_network(kind: type[HeadDrafter], train: TrainRecipe, options: LoadOptions) -> bool:
    """Returns True if stage 1 runs the network's own layers.

    On a GPU, the torch engine can also run whole conversations, with a third of the operations of these layers.
    """
    on_cpu = torch.device(resolve_device(options.device)).type == "cpu"
    return kind.uses_verify_pass or (runs_model(kind, train) and on_cpu)


def longest(train: TrainRecipe) -> int:
    """Returns the length in tokens to which conversations are truncated if the model runs them whole."""
    return min(train.max_length, train.batch_tokens)


def check_recipe(recipe: Recipe) -> None:
    """Raises UsageError for settings that have no effect or cannot be combined."""
    kind = DRAFTERS[recipe.drafter.name]
    train = recipe.train
    drafter = recipe.drafter
    if train.regress and kind.regress is None:
        raise UsageError(
            f"train.regress={train.regress:g} has no effect on {kind.name}: its heads do not read the draft tokens",
            "leave it out, or use drafter=hydra or drafter=eagle",
        )
    for other in DRAFTERS.values():
        for key in set(other.settings) - set(kind.settings):
            if getattr(drafter, key) != getattr(DrafterRecipe(), key):
                raise UsageError(
                    f"drafter.{key}={getattr(drafter, key)} has no effect on {kind.name}",
                    f"leave it out, or use drafter={other.name}",
                )
    if train.states == "vllm" and (train.stage == 2 or kind.uses_verify_pass):
        raise UsageError(
            "train.states=vllm reads states from files, and this training runs the model in every step",
            "leave it out, or use train.stage=1 and another drafter",
        )
    if train.stage == 1:
        return
    if kind.uses_verify_pass:
        raise UsageError(
            f"train.stage=2 cannot train drafter={kind.name}: its states are computed in a frozen model",
            "use train.stage=1, or another drafter",
        )
    # Heads that use the model's lm_head are trained with its original weights, but decoding would
    # use the lm_head into which the adapter is merged.
    if "own" not in kind.vocabularies:
        raise UsageError(
            f"train.stage=2 trains the lm_head, which drafter={kind.name} needs unchanged",
            "use train.stage=1, or another drafter",
        )
    for name, value in (("vocabulary", "shared"), ("matrices", "none")):
        if getattr(drafter, name) == value:
            raise UsageError(
                f"train.stage=2 trains the lm_head, which drafter.{name}={value} needs unchanged",
                f"use another drafter.{name}, or train.stage=1",
            )
    if train.tuning == "full" and train.objective == "kl":
        raise UsageError(
            "train.objective=kl needs an adapter that can be switched off; train.tuning=full has none",
            "use train.objective=ce, or train.tuning=lora",
        )


def check_loading(train: TrainRecipe, options: LoadOptions, world: Distributed) -> None:
    """Raises UsageError if the model cannot be trained or sharded with these options, or if an option has no effect."""
    for name, values in IGNORED_JOINTLY.items():
        value = getattr(options, name)
        if train.stage == 2 and value in values:
            raise UsageError(
                f"@{name} {value} has no effect with train.stage=2, which runs transformers' own layers",
                "leave it out",
            )
    tuning = train.tuning if train.stage == 2 else None
    quantized = tuning == "qlora" or options.quantized
    if tuning == "full" and quantized:
        raise UsageError(
            "train.tuning=full cannot train a quantized model", "use train.tuning=qlora"
        )
    if tuning == "qlora" and options.quantize == "bnb.int8":
        raise UsageError(
            "@quantize bnb.int8 has no effect with train.tuning=qlora, whose model has 4 bits",
            "leave it out",
        )
    if not train.shard:
        return
    if world.size == 1:
        raise UsageError(
            "train.shard=true splits the model over several processes, and there is one",
            "start it as `torchrun --nproc_per_node N -m medusa_cli train ... --run-dir RUN`, or use train.shard=false",
        )
    if tuning == "full":
        raise UsageError(
            "train.shard=true splits frozen weights, and train.tuning=full trains them all",
            "use train.tuning=lora, or train.shard=false",
        )
    if quantized:
        raise UsageError(
            "train.shard=true cannot split quantized weights",
            "leave @quantize out, or use train.shard=false",
        )


def build_drafter(backbone: Backbone, recipe: DrafterRecipe, dataset: Dataset) -> HeadDrafter:
    """Returns an untrained drafter; its draft vocabulary, if any, holds the tokens that occur in the most texts.

    Raises UsageError if the draft vocabulary would be larger than the model's vocabulary.
    """
    kind = DRAFTERS[recipe.name]
    size = recipe.draft_vocab_size
    vocabulary: str = recipe.vocabulary
    if vocabulary == "auto":
        whole = "own" if "own" in kind.vocabularies else "shared"
        vocabulary = "draft" if size < backbone.vocab_size else whole
    draft_ids: Tensor | None = None
    if vocabulary == "draft":
        if size > backbone.vocab_size:
            raise UsageError(
                f"drafter.draft_vocab_size={size} is larger than the model's vocabulary",
                f"use {backbone.vocab_size} or less, or drafter.vocabulary=own",
            )
        draft_ids = frequent_tokens(dataset.texts(), size, backbone.vocab_size)
    return kind.create(
        backbone,
        num_heads=recipe.num_heads,
        vocabulary=vocabulary,
        draft_ids=draft_ids,
        **{key: getattr(recipe, key) for key in kind.settings},
    )


def options_for(kind: type[HeadDrafter], train: TrainRecipe, options: LoadOptions) -> LoadOptions:
    """Returns the options with which to load the backbone.

    If stage 1 runs the network's own layers, the engine is eager. In that case, raises UsageError if
    another engine was requested, or an option that needs another engine.
    """
    if not needs_network(kind, train, options):
        return options
    if options.engine in ("native", "torch"):
        raise UsageError(
            f"@engine {options.engine} cannot run {kind.name} over whole conversations: "
            "it does not keep the network's layers",
            "leave @engine out; the trained drafter runs on any engine",
        )
    for given in options.native_options:
        raise UsageError(
            f"{given} needs the native engine, which cannot run {kind.name} over whole conversations",
            f"leave {given.split()[0]} out",
        )
    return replace(options, engine="eager")


def without_fp16(recipe: Recipe, options: LoadOptions) -> LoadOptions:
    """Returns the options with another number type if gradients would pass through a network in fp16.

    The gradients of single elements are smaller than the smallest fp16 number. Raises UsageError if fp16 was requested.
    """
    if options.dtype == "fp16":
        raise UsageError(
            "@dtype fp16 cannot hold the gradients that pass through the model",
            "use @dtype bf16 or fp32",
        )
    model = ModelSource.of(recipe.model)
    device = resolve_device(options.device)
    own = resolve_dtype(options.dtype, model, device, options.trust_remote_code)
    return replace(options, dtype=recipe.train.dtype) if own == torch.float16 else options


def load_model(recipe: Recipe, options: LoadOptions) -> Backbone:
    """Loads the recipe's model for its stage: frozen, or with trainable weights."""
    load = frozen_backbone if recipe.train.stage == 1 else joint_backbone
    return load(recipe, options)


def read_data(
    recipe: Recipe, backbone: Backbone, source: Path
) -> tuple[Dataset, HeadDrafter, bool]:
    """Reads the conversations and builds the recipe's drafter for them.

    The third value is True if every step runs the model over whole conversations; they are then truncated.
    """
    train = recipe.train
    online = train.stage == 2 or runs_model(DRAFTERS[recipe.drafter.name], train)
    dataset = read_dataset(
        source, backbone, train.validation_fraction, longest(train) if online else None
    )
    torch.manual_seed(train.seed)
    return dataset, build_drafter(backbone, recipe.drafter, dataset), online


def frozen_backbone(recipe: Recipe, options: LoadOptions) -> Backbone:
    """Loads the frozen model with its decoding engine, or with the engine that can run whole conversations.

    If a vLLM server computes the states, the model's layers stay on the disk.
    """
    kind = DRAFTERS[recipe.drafter.name]
    train = recipe.train
    if train.states == "vllm":
        return load_without_layers(recipe.model, options, recipe.chat_template)
    options = options_for(kind, train, options)
    template = recipe.chat_template
    gradients = needs_network(kind, train, options)
    if kind.uses_verify_pass:
        options = without_fp16(recipe, options)
    return load_backbone(
        recipe.model, options, gradients=gradients, shard=train.shard, chat_template=template
    )


def joint_backbone(recipe: Recipe, options: LoadOptions) -> Backbone:
    """Loads the recipe's model with a new LoRA adapter (on 4-bit weights for qlora), or with all weights trainable."""
    train = recipe.train
    model = ModelSource.of(recipe.model)
    if train.tuning == "qlora":
        if model.kind == "gguf":
            raise UsageError(
                "train.tuning=qlora cannot quantize a GGUF file",
                "use train.tuning=lora, or a folder or hub id with the model's safetensors",
            )
        options = replace(options, quantize="bnb.nf4")
    # In fp32 training, the states of a bf16 network are not cast for the heads, so the network is
    # loaded in fp32.
    if train.dtype == "fp32" and options.dtype == "auto":
        options = replace(options, dtype="fp32")
    options = without_fp16(recipe, options)
    network, tokenizer = load_network(
        model, options, shard=train.shard, chat_template=recipe.chat_template
    )
    _remove_noise(network)
    if train.tuning == "full":
        network = network.float()
    else:
        torch.manual_seed(train.seed)
        adapter.attach(
            network, rank=train.lora_rank, alpha=train.lora_alpha, dropout=train.lora_dropout
        )
    backbone = Backbone(network, tokenizer, id=recipe.model, weights=weights_of(model))
    # Gradients flow only through the network's own layers.
    backbone.engine = EagerEngine(backbone)
    adapter.unfreeze(network, everything=train.tuning == "full")
    if train.gradient_checkpointing:
        # Reentrant checkpointing needs inputs that require gradients. A frozen embedding does not
        # return such inputs.
        network.gradient_checkpointing_enable({"use_reentrant": False})
    network.train()
    return backbone


def _remove_noise(network: nn.Module) -> None:
    """Sets the network's dropout and the noise of its routers to 0.

    With noise, the model would seem to differ from the original model, which the same layers
    compute.
    """
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def start_heads(
    run: Run,
    start: Run | None,
    backbone: Backbone,
    drafter: HeadDrafter,
    stage: int,
    dataset: Dataset,
) -> None:
    """Copies the heads of the run `start` into the new drafter, in stage 2 with their adapter.

    If `start` is None, stage 2 starts from the run's own heads, and stage 1 copies nothing. Heads of
    another model, kind or shape are not copied; stage 2 then raises UserError if `start` was given.
    """
    giver = start or run
    needed = stage == 2 and start is not None
    if start is None and stage == 1:
        return
    if copy_heads(giver, backbone, drafter, adapted=needed):
        _renew_vocabulary(drafter, dataset)
        folder = giver.drafter_dir
        trained = rounding_in(giver.drafter_dir)
        log.info(f"the heads start from {folder}")
        if trained not in (None, backbone.identity.get("rounding")):
            log.warning(
                f"{folder} was trained on the model quantized by {trained}; @quantize {trained} does so"
            )
    elif needed:
        raise UserError(
            f"@from {giver.path}: it holds no heads of this model and this shape",
            "train such heads there, or give only its conversations as @data",
        )
    else:
        log.info(f"the heads are initialized anew: {giver.path} holds none of this kind and shape")


def _renew_vocabulary(drafter: HeadDrafter, dataset: Dataset) -> None:
    """Sets the draft vocabulary of copied heads to the most frequent tokens of the new texts.

    Among equally frequent tokens, those in the old vocabulary are preferred. If heads have a weight
    for each token, nothing changes: the weights belong to the old tokens.
    """
    config = drafter.config
    if config.vocabulary != "draft" or len(drafter.matrices) or drafter.conditional is not None:
        return
    known = drafter.draft_ids
    ids = frequent_tokens(dataset.texts(), len(known), config.vocab_size, known)
    drafter.draft_ids.copy_(ids.sort().values)


def copy_heads(run: Run, backbone: Backbone, drafter: HeadDrafter, adapted: bool) -> bool:
    """Copies the run's drafter into a new drafter of the same shape; returns False if the run has no such drafter.

    The drafter may belong to a model with other weights, such as the base of a fine-tune. Heads of
    stage 2 belong to an adapter. They are copied only if `adapted` is True, and the model then takes
    up their adapter. The new drafter may have more prefix layers and more blocks per head than the
    run's drafter, because these have no effect before they are trained.
    """
    if not run.has_drafter:
        return False
    identity = describe_drafter(run.drafter_dir).provenance.identity
    learned = identity.get("adapter")
    if not identity or (learned and not adapted):
        return False
    try:
        check_backbone(identity, backbone.identity, "the drafter", tuned=not adapted)
        trained = load_kind(type(drafter), run.drafter_dir, backbone)
    except UserError:
        return False
    smaller: dict[str, Any] = {
        "num_layers": min(drafter.config.num_layers, trained.config.num_layers)
    }
    if getattr(trained.config, "prefix_layers", None) == 0:
        smaller["prefix_layers"] = 0
    if trained.config != replace(drafter.config, **smaller):
        return False
    if learned:
        if run.adapter is None or adapter.digest(run.adapter) != learned:
            return False
        adapter.take_up(backbone.model, run.adapter)
    drafter.start_from(trained)
    return True
