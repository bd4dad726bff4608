"""Checks, based on transformers' classes and a pass, that a model can be loaded and can verify a tree."""

import math
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from medusa_cli.errors import UserError, first_line, shown
from medusa_cli.files.catalogue import DEFAULT_MODEL
from medusa_cli.files.layer_kinds import STATEFUL
from medusa_cli.files.model_files import (
    ATTENTION_FLAGS,
    OUTSIDE,
    PREFIX_LM,
    foreign_logits,
    layer_kinds,
    no_attention,
    refuse_by_config,
    unverifiable,
)
from medusa_cli.files.model_source import AGAIN, ModelSource
from medusa_cli.model.backbone import auto_class, finish_logits, stateful_modules, text_model
from medusa_cli.model.vocabulary import eos_ids_of

PROBE = 6  # number of tokens in the passes that check a network
# Exceptions that a pass raises if a model does not fit its config, or if its code is not supported.
FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


def probe_tokens(vocab_size: int, count: int = PROBE, device: torch.device | str = "cpu") -> Tensor:
    """Returns tokens [count] for a pass that checks a model; the tokens differ unless the vocabulary is small."""
    return torch.arange(count, device=device) * 37 % vocab_size


def refuse_unsupported(config: Any) -> None:
    """Raises UserError for a model whose attention, according to its config, cannot verify a tree."""
    refuse_by_config(config, config.get_text_config())


def refuse_layers(network: Any, text: Any) -> None:
    """Raises UserError if a network or its text config shows that some layers cannot verify a tree."""
    stateful = bool(stateful_modules(network))
    if not stateful and any(kind in STATEFUL for kind in layer_kinds(text)):
        raise unverifiable(text, f"it has {OUTSIDE}")
    if not stateful and not any(getattr(network, flag, False) for flag in ATTENTION_FLAGS):
        raise no_attention(text)
    if not stateful and not hasattr(text, "num_attention_heads"):
        raise no_attention(text)


def unloadable(model: str, why: str | Exception) -> UserError:
    """Returns the error for a model that transformers cannot load."""
    if "trust_remote_code" in str(why):
        return untrusted(model)
    return UserError(
        f"@model {model!r} could not be loaded: {first_line(why) if isinstance(why, Exception) else why}",
        f"give a folder with a Hugging Face causal LM, a hub id, or the default model's name {DEFAULT_MODEL!r}",
    )


def check_architecture(config: Any, model: ModelSource) -> Any:
    """Returns a model's network without weights, so that no config can exhaust the memory.

    Raises UserError for a model that cannot verify a tree, or whose files do not fit its config.
    """
    refuse_unsupported(config)
    files = model.tensors
    try:
        with torch.device("meta"):
            network = auto_class(config).from_config(config, trust_remote_code=False)
    except Exception as reason:  # a damaged config may raise any exception
        raise unloadable(model.name, reason) from reason
    weights = dict(network.named_parameters())
    refuse_layers(network, config.get_text_config())
    # Quantized weights are packed, and have other shapes than the network's.
    if not files or getattr(config, "quantization_config", None) is not None:
        return network
    prefix = f"{network.base_model_prefix}."
    for name, weight in weights.items():
        shape, _ = files.get(name) or files.get(name.removeprefix(prefix)) or (weight.shape, None)
        if math.prod(shape) != weight.numel():  # some weights are stored transposed
            raise unloadable(
                model.name,
                f"config.json asks for {name} of shape {[*weight.shape]}, its files hold {shape}",
            )
    # Files store experts under other names than the network's, so the totals are compared as well.
    wanted = sum(weight.numel() for weight in weights.values())
    stored = sum(math.prod(shape) for shape, _ in files.values())
    if wanted > 2 * stored:
        raise unloadable(
            model.name, f"config.json asks for {wanted:,} weights, its files hold {stored:,}"
        )
    return network


def check_files(missing: Sequence[str], owners: Sequence[Any], model: str) -> None:
    """Raises UserError for tensors missing from a network's files, and for end tokens that are not token ids."""
    if missing:
        lack = f"its files lack {len(missing)} tensors of the network, such as {shown(missing[0])}"
        raise UserError(f"@model {model!r}: {lack}", AGAIN)
    for id in eos_ids_of(owners):
        if type(id) is not int:
            raise UserError(f"@model {model!r}: eos_token_id {shown(id)} is not a token id", AGAIN)


@torch.no_grad()
def check_network(network: Any, model: str) -> None:
    """Raises UserError if a network's logits are not finite, depend on later tokens, or do not fit its lm_head."""
    table = network.get_input_embeddings().weight
    head = network.get_output_embeddings()
    ids = torch.arange(PROBE, device=table.device)[None] % len(table)
    # Some networks warn if no mask is given.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    passes: list[Any] = []
    hook = text_model(network).register_forward_hook(
        lambda module, args, out: passes.append(out[0])
    )
    try:
        logits = network(**inputs).logits.float()
        # OPT runs only a part of its base model, so the hook is not called.
        states = passes[0] if passes else text_model(network)(**inputs)[0]
        # Mamba's states are fp32.
        own = finish_logits(network.config.get_text_config(), head(states.to(table.dtype))).float()
        looks_ahead = _looks_ahead(network, ids, logits)
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
    if looks_ahead:
        raise unverifiable(network.config.get_text_config(), PREFIX_LM)
    error = difference(own[0], logits[0])
    if error > (1e-3 if table.dtype == torch.float32 else 0.02):
        raise foreign_logits(network.config.get_text_config(), f"they differ by {error:.2%}")


def _looks_ahead(network: Any, ids: Tensor, logits: Tensor) -> bool:
    """Returns True if the first half of logits [1, n, V] changes without the second half of the ids [1, n]."""
    # Only prefix LMs read token types.
    if "token_type_ids" not in signature(type(network).forward).parameters:
        return False
    half = ids[:, : ids.shape[1] // 2]
    first_half = network(input_ids=half, attention_mask=torch.ones_like(half)).logits.float()
    return difference(first_half[0], logits[0, : half.shape[1]]) > 0.1


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Returns the median over rows [n, V] of their difference, relative to the norm of the row in `theirs`.

    The median lets a few rows differ more, at near-ties.
    """
    size = theirs.norm(dim=-1).clamp(min=1e-9)  # a padding token may give zeros
    return float(((ours - theirs).norm(dim=-1) / size).median())


def untrusted(model: str) -> UserError:
    """Returns the error for a model that needs its own Python files."""
    fault = f"@model {model!r} needs Python files of its own to be run, and none is"
    return UserError(fault, "read them, and give @trust_remote_code if you trust them")
