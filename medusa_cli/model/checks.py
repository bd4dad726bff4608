"""Refuses models that cannot be loaded or verified over a tree: by config and file headers, then by one pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor

from medusa_cli import assets
from medusa_cli.errors import UserError, first_line, shown
from medusa_cli.model.backbone import eos_ids_of
from medusa_cli.model.identity import tensors_of
from medusa_cli.runs.io import read_as

# Factors and caps that some architectures apply to the lm_head's scores.
SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap")
PROBE = 6  # tokens of the passes that check a network
# What the names of all tokenizers' files have in common.
TOKENIZER_FILES = ("token", "vocab", "spiece", "tekken")
AGAIN = "get the model again"
# A pass through a model that does not fit its config, or through code not known here, raises any of these.
FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Sizes:
    """The bounds of the sizes in a model's config.json, far above those of any model."""

    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)] | None = None
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    intermediate_size: Annotated[int, Meta(ge=1, le=1 << 24)] | list[int] | None = None
    num_attention_heads: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    num_key_value_heads: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    head_dim: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 26)] | None = None
    max_position_embeddings: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    text_config: "Sizes | None" = None


def check_sizes(folder: str) -> None:
    """Raises UserError for impossible sizes in a model's config, before layers are made of them."""
    path = Path(folder) / "config.json"
    if path.exists():
        read_as(path, Sizes, "the model's config", AGAIN)


def refuse_unsupported(config: Any) -> None:
    """Raises UserError for attention that a tree mask cannot express, and for logits that are not the lm_head's own."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise unverifiable(text, "it is an encoder-decoder, not a causal LM")
    if getattr(text, "attn_logit_softcapping", None):
        raise unverifiable(text, "its attention logits are soft-capped")
    if getattr(text, "alibi", False):
        raise unverifiable(text, "its attention has ALiBi position biases")
    if not hasattr(text, "max_position_embeddings") or not hasattr(text, "num_attention_heads"):
        raise unverifiable(text, "it has no softmax attention over numbered positions")
    if kinds := set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        raise unverifiable(text, f"it has layers of kind {', '.join(sorted(kinds))}")
    for name in ("head_dim", "num_key_value_heads"):
        try:
            getattr(text, name, None)
        except RuntimeError as reason:  # transformers' answer where it is set layer by layer
            raise unverifiable(text, f"its layers differ in {name}") from reason
    values = {key: getattr(text, key, None) for key in (*SCALES, *CAPS)}
    changed = [f"{key}={x}" for key, x in values.items() if x is not None and not (key in SCALES and x == 1)]
    if changed:
        raise foreign_logits(text, ", ".join(changed))


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


def unloadable(model: str, why: str | Exception) -> UserError:
    """Returns the error for a model that transformers cannot load."""
    if "trust_remote_code" in str(why):
        return assets.untrusted(model)
    return UserError(
        f"@model {model!r} could not be loaded: {first_line(why) if isinstance(why, Exception) else why}",
        f"give a folder with a Hugging Face causal LM, a hub id, or the default model's name {assets.DEFAULT_MODEL!r}",
    )


def check_architecture(config: Any, model: str) -> None:
    """Raises UserError for a model that cannot be verified, or whose files do not fit its config.

    The network is built without weights, so that no config can take the memory.
    """
    from transformers import AutoModelForCausalLM

    refuse_unsupported(config)
    files = tensors_of(model)
    if any(name.endswith(".sinks") for name in files):
        raise unverifiable(config.get_text_config(), "its attention has sinks")
    try:
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as reason:  # a damaged config raises any exception
        raise unloadable(model, reason) from reason
    weights = dict(network.named_parameters())
    if not network._supports_sdpa:
        raise unverifiable(config.get_text_config(), "transformers has no scaled_dot_product_attention for it")
    if not files or getattr(config, "quantization_config", None) is not None:  # packed weights have their own shapes
        return
    prefix = f"{network.base_model_prefix}."
    for name, weight in weights.items():
        shape, _ = files.get(name) or files.get(name.removeprefix(prefix)) or (weight.shape, None)
        if math.prod(shape) != weight.numel():  # some are stored transposed
            raise unloadable(model, f"config.json asks for {name} of shape {[*weight.shape]}, its files hold {shape}")
    # Experts are stored by other names.
    wanted = sum(weight.numel() for weight in weights.values())
    stored = sum(math.prod(shape) for shape, _ in files.values())
    if wanted > 2 * stored:
        raise unloadable(model, f"config.json asks for {wanted:,} weights, its files hold {stored:,}")


def check_tokenizer(source: str, model: str) -> None:
    """Raises UserError for a folder without any file of a tokenizer's."""
    folder = Path(source)
    if folder.is_dir() and not any(word in path.name for path in folder.iterdir() for word in TOKENIZER_FILES):
        raise UserError(f"@model {model!r} has no tokenizer", "put the model's tokenizer.json into its folder")


def check_files(missing: Sequence[str], owners: Sequence[Any], model: str) -> None:
    """Raises UserError for tensors missing from a network's files, and for ends of an answer that are no token ids."""
    if missing:
        lack = f"its files lack {len(missing)} tensors of the network, such as {shown(missing[0])}"
        raise UserError(f"@model {model!r}: {lack}", AGAIN)
    for id in eos_ids_of(owners):
        if type(id) is not int:
            raise UserError(f"@model {model!r}: eos_token_id {shown(id)} is no token id", AGAIN)


@torch.no_grad()
def check_network(network: Any, model: str) -> None:
    """Raises UserError for a network whose logits of a few tokens are not finite, or not its lm_head's own."""
    table, head = network.get_input_embeddings().weight, network.get_output_embeddings()
    ids = torch.arange(PROBE, device=table.device)[None] % len(table)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # some warn without
    passes: list[Any] = []
    hook = network.base_model.register_forward_hook(lambda module, args, out: passes.append(out[0]))
    try:
        logits = network(**inputs).logits.float()
        own = head(passes[0] if passes else network.base_model(**inputs)[0]).float()  # OPT runs a part of its base
    except torch.OutOfMemoryError:
        raise
    except FAULTS as reason:
        remedy = "check its config.json, or get it again"
        raise UserError(f"@model {model!r} cannot be run: {first_line(reason)}", remedy) from reason
    finally:
        hook.remove()
    if not torch.isfinite(logits).all():
        kind = str(table.dtype).removeprefix("torch.")
        raise UserError(
            f"@model {model!r} computes numbers that are not finite in {kind}: its weights are damaged, or too large",
            f"{AGAIN}, or try @dtype fp32",
        )
    if difference(own[0], logits[0]) > (1e-3 if table.dtype == torch.float32 else 0.02):
        raise foreign_logits(network.config.get_text_config(), "other layers or factors follow")


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Returns how much rows [n, V] differ relative to their size: the median, as few rows may part at near-ties."""
    size = theirs.norm(dim=-1).clamp(min=1e-9)  # a padding token may give zeros
    return float(((ours - theirs).norm(dim=-1) / size).median())
