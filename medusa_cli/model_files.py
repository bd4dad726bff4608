"""Reads a model's files without torch, whose import takes a second, and refuses models that cannot be used."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from msgspec import Meta

from medusa_cli.assets import RANDOM, gguf_path, model_dir
from medusa_cli.errors import UserError
from medusa_cli.runs.io import convert, read_as, read_object

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# What the names of all tokenizers' files have in common.
TOKENIZER_FILES = ("token", "vocab", "spiece", "tekken")
# Factors and caps that some architectures apply to the lm_head's scores.
SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap")
CONFIG, AGAIN = "the model's config", "get the model again"


@dataclass(frozen=True)
class Config:
    """The types of fields in a model's config.json, and bounds far above the sizes of any model."""

    model_type: str = ""
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)] | None = None
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    intermediate_size: Annotated[int, Meta(ge=1, le=1 << 24)] | list[int] | None = None
    num_attention_heads: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    num_key_value_heads: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    head_dim: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 26)] | None = None
    max_position_embeddings: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    layer_types: list[str] | None = None
    text_config: "Config | None" = None


@dataclass(frozen=True)
class Shards:
    """The index of a checkpoint in several files."""

    weight_map: dict[str, Annotated[str, Meta(min_length=1, max_length=255)]]


def check_model_files(name: str) -> None:
    """Raises UserError for a model whose files show that it cannot be verified over a tree.

    Classes of transformers and a pass tell more, when the model is loaded.
    """
    if name.startswith(RANDOM) or (fields := config_fields(model_dir(name))) is None:
        return
    text = SimpleNamespace(**{"model_type": "", **(fields.get("text_config") or fields)})
    refuse_by_config(SimpleNamespace(**fields), text)
    if "auto_map" not in fields:  # else its own code may run
        refuse_sinks(text, tensors_of(name))
        if lacks_sdpa(text.model_type):
            raise no_sdpa(text)


def config_fields(source: str) -> dict[str, Any] | None:
    """Returns the fields of a model's config.json, if it is on this machine; raises UserError for impossible values."""
    if (path := model_file(source, "config.json")) is None:
        return None
    fields = read_object(path, CONFIG)
    convert(fields, Config, f"{CONFIG} {path}", AGAIN)
    return fields


def check_tokenizer(source: str, model: str) -> None:
    """Raises UserError for a folder without any file of a tokenizer's."""
    folder = Path(source)
    if folder.is_dir() and not any(word in path.name for path in folder.iterdir() for word in TOKENIZER_FILES):
        raise UserError(f"@model {model!r} has no tokenizer", "put the model's tokenizer.json into its folder")


def check_chat_template(name: str) -> None:
    """Raises UserError for a model in a folder whose files hold no chat template."""
    folder = Path(model_dir(name))
    if not folder.is_dir() or any(folder.glob("chat_template.*")) or any(folder.glob("additional_chat_templates/*")):
        return
    config = folder / "tokenizer_config.json"
    if config.is_file() and "chat_template" not in read_object(config, "the tokenizer's config"):
        raise no_chat_template(name)


def no_chat_template(model: str) -> UserError:
    return UserError(
        f"the model {model!r} has no chat template",
        "use an instruction-tuned model, or give @chat_template FILE; `medusa chat --raw` continues texts as they are",
    )


def refuse_by_config(config: Any, text: Any) -> None:
    """Raises UserError for attention that a tree mask cannot express, and for logits that are not the lm_head's own.

    config, text: transformers' configs of a model and of its text part, or objects with the fields of config.json.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise unverifiable(text, "it is an encoder-decoder, not a causal LM")
    if getattr(text, "attn_logit_softcapping", None):
        raise unverifiable(text, "its attention logits are soft-capped")
    if getattr(text, "alibi", False):
        raise unverifiable(text, "its attention has ALiBi position biases")
    if kinds := set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        raise unverifiable(text, f"it has layers of kind {', '.join(sorted(kinds))}")
    values = {key: getattr(text, key, None) for key in (*SCALES, *CAPS)}
    changed = [f"{key}={x}" for key, x in values.items() if x is not None and not (key in SCALES and x == 1)]
    if changed:
        raise foreign_logits(text, ", ".join(changed))


def refuse_sinks(text: Any, tensors: Iterable[str]) -> None:
    """Raises UserError for a model, by its text config and the names of its tensors, whose attention has sinks."""
    if any(name.endswith(".sinks") for name in tensors):
        raise unverifiable(text, "its attention has sinks")


def no_sdpa(text: Any) -> UserError:
    return unverifiable(text, "transformers has no scaled_dot_product_attention for it")


def lacks_sdpa(kind: str) -> bool:
    """Returns True if transformers' source says that it has no scaled_dot_product_attention for a type of model.

    To import the network's class, which knows, takes two seconds.
    """
    spec, module = find_spec("transformers"), kind.replace("-", "_")
    if spec is None or spec.origin is None or not module.isidentifier():
        return False
    path = Path(spec.origin).parent / "models" / module / f"modeling_{module}.py"
    return path.is_file() and "_supports_sdpa = True" not in path.read_text(encoding="utf-8")


def unverifiable(text: Any, why: str) -> UserError:
    """Returns the refusal of a model, by its text config, that tree verification cannot run."""
    return UserError(
        f"the model type {text.model_type!r} cannot be verified over a tree: {why}",
        "use a decoder with full or sliding-window softmax attention (Llama, Mistral, Qwen, Gemma 3, ...)",
    )


def foreign_logits(text: Any, why: str) -> UserError:
    """Returns the refusal of a model, by its text config, whose logits are not the lm_head's product."""
    return UserError(
        f"the model type {text.model_type!r} has logits that are not its lm_head's own ({why}); "
        "sampling and training would not be the model's",
        "use a model whose logits are the lm_head's own (Llama, Mistral, Qwen, Gemma 3, ...)",
    )


def model_file(source: str, name: str) -> Path | None:
    """Returns a file of a model in a folder or in the hub's cache; None without one."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, name)
    return Path(cached) if isinstance(cached, str) else None


def checkpoint_files(source: str) -> list[Path]:
    """Returns the safetensors files of a checkpoint in a folder or the hub's cache; none if some are missing."""
    for name in WEIGHTS:
        path = model_file(source, name)
        if path is None:
            continue
        if path.suffix != ".json":
            return [path]
        names = read_as(path, Shards, "the model's index", AGAIN).weight_map.values()
        parts = [model_file(source, name) for name in sorted(set(names))]
        return [] if None in parts else [part for part in parts if part is not None]
    return []


def weights_file(model: str) -> Path | None:
    """Returns the GGUF file that holds a model's weights; None where its folder holds them."""
    if model.startswith(RANDOM):
        return None
    path = gguf_path(model)
    return path if path is not None and not checkpoint_files(model_dir(model)) else None


def tensors_of(model: str) -> dict[str, tuple[list[int], str]]:
    """Returns shape and type, such as "BF16", of each tensor in a model's files; none if they cannot be read."""
    from safetensors import SafetensorError

    try:
        with opened(checkpoint_files(model_dir(model)), "numpy") as slices:
            return {name: (shape, part.get_dtype()) for name, part in slices.items() if (shape := part.get_shape())}
    except SafetensorError:  # loading will name the damage
        return {}


@contextmanager
def opened(files: Sequence[Path], framework: str) -> Iterator[dict[str, Any]]:
    """Opens a checkpoint's files; yields their tensors by name, of which only what is sliced is read."""
    from safetensors import safe_open

    with ExitStack() as stack:
        parts = [stack.enter_context(safe_open(path, framework=framework)) for path in files]
        yield {name: part.get_slice(name) for part in parts for name in part.keys()}  # noqa: SIM118  (no mapping)
