"""Refuses models that cannot be loaded or verified over a tree, by transformers' classes and by one pass."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medusa_cli import assets
from medusa_cli.errors import UserError, first_line, shown
from medusa_cli.model.backbone import eos_ids_of
from medusa_cli.model_files import (
    AGAIN,
    foreign_logits,
    no_sdpa,
    refuse_by_config,
    refuse_sinks,
    tensors_of,
    unverifiable,
)

PROBE = 6  # tokens of the passes that check a network
# A pass through a model that does not fit its config, or through code not known here, raises any of these.
FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


def refuse_unsupported(config: Any) -> None:
    """Raises UserError for a model whose attention or logits, by its config, a tree cannot verify."""
    text = config.get_text_config()
    refuse_by_config(config, text)
    if not hasattr(text, "max_position_embeddings") or not hasattr(text, "num_attention_heads"):
        raise unverifiable(text, "it has no softmax attention over numbered positions")
    for name in ("head_dim", "num_key_value_heads"):
        try:
            getattr(text, name, None)
        except RuntimeError as reason:  # transformers' answer where it is set layer by layer
            raise unverifiable(text, f"its layers differ in {name}") from reason


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
    files, text = tensors_of(model), config.get_text_config()
    refuse_sinks(text, files)
    try:
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as reason:  # a damaged config raises any exception
        raise unloadable(model, reason) from reason
    weights = dict(network.named_parameters())
    if not network._supports_sdpa:
        raise no_sdpa(text)
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
