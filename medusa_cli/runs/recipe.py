"""The recipe: every setting for distillation and training, from a YAML file and KEY=VALUE words."""

import dataclasses
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import Meta

from medusa_cli.files.catalogue import DEFAULT_MODEL

# A count in a recipe; a number above the limit is taken for a typing error.
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Rank = Annotated[int, Meta(ge=1, le=65_536)]
Seed = Annotated[int, Meta(ge=0, le=2**62)]
Layers = tuple[int, ...]
Positive = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
# The lowest temperature. Scores divided by a lower temperature would exceed the range of their number type.
COLDEST = 1e-3


def key(default: Any, meaning: str) -> Any:
    """Returns a recipe's field with its default, and with its meaning for the help and the docs."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class DrafterRecipe:
    """Describes the drafter to train."""

    name: Literal["amphista", "eagle", "firp", "hydra", "medusa", "mtp"] = key(
        "medusa", "the kind of drafter; drafter=NAME is short for it"
    )
    num_heads: Annotated[int, Meta(ge=1, le=64)] = key(
        5, "number of heads; head k predicts the token k + 1 positions ahead"
    )
    num_layers: Annotated[int, Meta(ge=1, le=16)] = key(1, "residual blocks in each head")
    vocabulary: Literal["auto", "draft", "own", "shared"] = key(
        "auto",
        "tokens that the heads score: draft (the most frequent in the data), own (all, with the heads' own "
        "matrices), shared (all, with the model's lm_head); auto: draft if that has fewer tokens than the model",
    )
    draft_vocab_size: Count = key(12288, "size of the draft vocabulary in tokens")
    matrices: Literal["each", "one", "none"] = key(
        "each",
        "a vocabulary matrix for each head, one for all heads, or none: heads score with rows of the lm_head, "
        "which are not trained",
    )
    prefix_layers: Annotated[int, Meta(ge=0, le=4)] = key(
        0, "Hydra: decoder layers before the heads; 1 is Hydra++"
    )
    taps: Layers = key(
        (),
        "EAGLE: the model's layers whose output the drafter reads; []: a low, a middle and a high one",
    )
    intermediate_size: Count | None = key(
        None,
        "EAGLE: width of the MLP in the drafter's layer; it has most of the layer's weights; null: as in the model",
    )
    norm_before_residual: bool = key(
        False, "EAGLE: the layer adds attention to its normed input, as in speculators' checkpoints"
    )
    attention_layers: Annotated[int, Meta(ge=0, le=4)] = key(
        1, "Amphista: self-attention layers over the heads"
    )
    context: Literal["conversation", "answer"] = key(
        "conversation",
        "what Hydra's prefix layers and Amphista's layers see: the whole conversation or only the answer",
    )
    conditional: Rank | None = key(
        None,
        "Medusa, Amphista, FIRP: rank of a bias that depends on the previous draft token; null: no bias",
    )
    layers: Layers | None = key(
        None,
        "FIRP: the model's layer that each head's pseudo state enters; null: from 1/2 to 5/6 of the depth",
    )


@dataclass(frozen=True)
class DistillRecipe:
    """Describes the conversations to distill."""

    seed: str = key(
        "sharegpt",
        "prompts: sharegpt, sharegpt-long, sharegpt-code, ultrachat, code, a file, or a hub data set",
    )
    max_samples: Count | None = key(None, "maximum number of conversations; null: all")
    max_new_tokens: Count = key(256, "maximum tokens per answer")
    max_turns: Count = key(2, "maximum turns per conversation")
    temperature: Annotated[float, Meta(ge=0, le=100)] = key(
        0.0, "sampling temperature; 0 is greedy"
    )
    random_seed: Seed = key(0, "seed of the sampler")
    context: Annotated[int, Meta(ge=16, le=10_000_000)] = key(
        512, "maximum length of a conversation in tokens"
    )
    batch_size: Count | None = key(
        None,
        "conversations decoded together; null: as many as fit in memory, but at most 64, or 256 on a GPU",
    )
    taps: Layers = key((), "layers whose hidden states are kept, besides the last layer")
    dedup: bool = key(
        True,
        "skip a seed whose first prompt equals that of an earlier seed, apart from case and white space",
    )
    system: str | None = key(None, "system prompt of seeds that have none")
    drop_refusals: bool = key(False, "drop conversations with a refusal")
    min_answer_tokens: Annotated[int, Meta(ge=0)] = key(
        0, "drop conversations with an answer of fewer tokens"
    )
    endpoint: str | None = key(None, "URLs of servers that answer instead of this machine")
    endpoint_model: str | None = key(
        None, "the model's name on the servers; null: the servers are asked for it"
    )
    concurrency: Annotated[int, Meta(ge=1, le=65_536)] = key(
        8, "concurrent conversations on the servers"
    )


@dataclass(frozen=True)
class TrainRecipe:
    """Describes the training. Sizes are in positions (answer tokens), and intervals in optimizer steps."""

    stage: Literal[1, 2] = key(1, "1: heads on the frozen model; 2: heads and model")
    epochs: Annotated[int, Meta(ge=1, le=10_000)] = key(2, "passes over the data")
    max_tokens: Count | None = key(800_000, "maximum positions over all epochs; null: no limit")
    batch_tokens: Annotated[int, Meta(ge=2, le=10_000_000)] = key(
        1024,
        "positions per micro-batch of whole conversations; tokens with padding if the model runs in every step",
    )
    accumulation: Count = key(1, "micro-batches per step")
    optimizer: Literal["adamw", "adamw8bit"] = key(
        "adamw", "adamw, or adamw8bit, which keeps its state in 8 bits (bitsandbytes)"
    )
    lr: Positive | None = key(None, "the heads' peak learning rate; null: the drafter's default")
    min_lr_ratio: Share = key(0.05, "final learning rate as a fraction of the peak")
    warmup_steps: Annotated[int, Meta(ge=0)] = key(
        20, "steps over which the learning rate rises to its peak, at most a tenth of all steps"
    )
    decay: Share = key(0.8, "weight of head k's loss is decay^k")
    soft: Share = key(
        0.0,
        "share of soft targets (the model's own distribution) in the loss; the rest is for the data's tokens",
    )
    regress: Positive | None = key(
        None,
        "weight of a regression onto the model's hidden states, for Hydra, and for EAGLE with "
        "little data; null: the drafter's default",
    )
    scored: Annotated[int, Meta(ge=64, le=10_000_000)] | None = key(
        None, "sampled softmax: tokens scored per batch; null: the whole vocabulary"
    )
    states: Literal["kept", "fresh", "vllm"] = key(
        "kept",
        "stage 1: where the model's hidden states come from: kept (the disk), fresh (the model runs in every step) "
        "or vllm (files that vLLM wrote to RUN/vllm)",
    )
    # Stage 2 (section 3.2.2 of the Medusa paper).
    tuning: Literal["lora", "qlora", "full"] = key(
        "lora",
        "stage 2: lora, qlora (the model in 4 bits), or full (all weights; writes the model and a new run)",
    )
    lora_rank: Rank = key(32, "stage 2: rank of the adapter")
    lora_alpha: Positive = key(
        16.0, "stage 2: alpha of the adapter, which scales it by alpha / rank"
    )
    lora_dropout: Share = key(0.05, "stage 2: dropout on the adapter's input")
    objective: Literal["kl", "ce"] = key(
        "kl",
        "stage 2: the model's loss: KL divergence to the original model (kl) or cross-entropy (ce)",
    )
    lambda_0: Positive = key(0.2, "stage 2: peak weight of the heads' loss")
    schedule: Literal["constant", "warmup", "sine"] = key(
        "warmup",
        "stage 2: schedule of lambda_0: constant, warmup (first only the heads are trained, then it rises) or sine",
    )
    heads_first: Share = key(
        0.1, "stage 2, warmup: share of the steps in which only the heads learn"
    )
    backbone_lr: Positive | None = key(
        None, "stage 2: the model's peak learning rate; null: a quarter of the heads' rate"
    )
    max_length: Annotated[int, Meta(ge=16)] = key(
        1024,
        "if the model runs in every step (stage 2, states: fresh, firp): conversations are cut after this many tokens",
    )
    gradient_checkpointing: bool = key(
        False, "stage 2: recompute activations in the backward pass to save memory"
    )
    # Both stages.
    shard: bool = key(False, "under torchrun: each process holds a part of the model's layers")
    validation_fraction: Annotated[float, Meta(ge=0, le=0.5)] = key(
        0.05, "fraction of the conversations held out for validation"
    )
    validation_every: Count = key(50, "steps between validations")
    validation_tokens: Count = key(16_384, "positions per validation")
    checkpoint_every: Count = key(100, "steps between checkpoints")
    seed: Seed = key(0, "seed of data order, weight initialization and dropout")
    dtype: Literal["auto", "bf16", "fp32"] = key(
        "auto", "number type of the computation; auto is bf16, but fp32 on CPUs without bf16"
    )
    save_dtype: Literal["bf16", "int8"] = key(
        "bf16", "number type of the drafter's file; int8 halves its size and is as fast on a CPU"
    )


@dataclass(frozen=True)
class Recipe:
    """Holds the model and the sections of a recipe. chat_template is the text of a Jinja template."""

    model: str = key(
        DEFAULT_MODEL, "as --model: a named model, a folder, a GGUF file, or a Hugging Face id"
    )
    chat_template: str | None = key(
        None, "a Jinja file in the recipe's folder, for a tokenizer without a template"
    )
    drafter: DrafterRecipe = DrafterRecipe()
    distill: DistillRecipe = DistillRecipe()
    train: TrainRecipe = TrainRecipe()

    def to_dict(self) -> dict[str, Any]:
        """Returns every key and value as nested dictionaries."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """Returns the recipe as YAML that load_recipe can read."""
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False))


def meanings() -> dict[str, tuple[str, str]]:
    """Returns the default, as YAML writes it, and the meaning of every dotted key."""
    found: dict[str, tuple[str, str]] = {}
    for section in dataclasses.fields(Recipe):
        keys: Sequence[Any] = [section]
        prefix = ""
        if dataclasses.is_dataclass(section.default):
            keys = dataclasses.fields(section.default)
            prefix = f"{section.name}."
        for field in keys:
            default = field.default if isinstance(field.default, str) else json.dumps(field.default)
            found[f"{prefix}{field.name}"] = (default, field.metadata["meaning"])
    return found


@cache
def types() -> dict[str, Any]:
    """Returns the type of every dotted key."""
    types: dict[str, Any] = {}
    for section, kind in typing.get_type_hints(Recipe).items():
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind, include_extras=True)
            types |= {f"{section}.{key}": hint for key, hint in hints.items()}
        else:
            types[section] = kind
    return types
