"""Loads a backbone with the engine that its model, the device and the user's options call for."""

import dataclasses
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_cli.engine.eager import EagerEngine
from medusa_cli.engine.engine import Engine
from medusa_cli.engine.native import LookUp, NativeEngine
from medusa_cli.engine.native_model import (
    PROBE,
    TOLERANCE,
    Description,
    MissingWeights,
    NativeModel,
    Packed,
    describe,
    gains_one_more,
    pack_in_memory,
    pack_to_file,
    read_packed,
    rotary_of,
    stamp_of,
    twin_of,
)
from medusa_cli.engine.plan import Plan
from medusa_cli.engine.torch_layers import TorchEngine
from medusa_cli.errors import UsageError, UserError, first_line
from medusa_cli.files.assets import RANDOM, home
from medusa_cli.model import Backbone, lora
from medusa_cli.model.backbone import Unsupported, padded_pass, usable_positions, weights_of
from medusa_cli.model.chat_template import check_template, try_template
from medusa_cli.model.checks import FAULTS
from medusa_cli.model.load import (
    DTYPES,
    checkpoint_dtype,
    has_own_code,
    load_network,
    load_without_weights,
    resolve_device,
)
from medusa_cli.model.weights import NetworkWeights, has_files, open_weights, source_stamp
from medusa_cli.native import is_available, why_unavailable
from medusa_cli.runs.load_options import DEFAULT_LOADING, INTEGER, LoadOptions

log = logging.getLogger(__name__)


def load_backbone(
    model: str,
    options: LoadOptions = DEFAULT_LOADING,
    *,
    adapter: Path | None = None,
    chat_template: str | None = None,
    gradients: bool = False,
    shard: bool = False,
    chat: bool = False,
) -> Backbone:
    """Loads a causal LM and its tokenizer for decoding, or, with gradients, to train what its states feed.

    engine "native" runs the library on a CPU, "torch" rewritten layers on a GPU, "eager" transformers' own; "auto" the
    first of these that can run the model. adapter: a folder from stage 2, merged into the weights or kept beside
    quantised ones. chat: the model needs a chat template. The rest is load_network's. Raises UserError for anything
    missing or unusable.
    """
    foreign = options.trust_remote_code and has_own_code(model)  # only the eager engine runs a model's own code
    named = "native" if options.quantize in INTEGER else options.engine
    _check_engine(named, options, foreign, shard, model)
    device = torch.device(resolve_device(options.device))
    whole = gradients or shard or foreign or options.quantised
    if named in ("auto", "native") and device.type == "cpu" and not whole:
        try:
            return _load_native(model, options, adapter, chat_template, chat)
        except Unsupported as reason:
            if named == "native":
                raise _refusal(options, model, reason) from reason
            log.info("%s runs on the eager engine: %s", model, reason)
    network, tokenizer = load_network(model, options, shard=shard, chat_template=chat_template)
    stamp = None
    if adapter is not None:
        stamp = lora.digest(adapter)
        network = lora.merge(network, adapter, beside=options.quantised)
    backbone = Backbone(network, tokenizer, id=model, adapter=stamp, weights=weights_of(model))
    _check_chat(backbone, chat)
    if named != "eager" and device.type != "cpu" and not whole:
        try:
            backbone.engine = TorchEngine(backbone)
            return backbone
        except Unsupported as reason:
            if named == "torch":
                raise _refusal(options, model, reason) from reason
            log.info("%s runs on the eager engine: %s", model, reason)
    backbone.engine = EagerEngine(backbone)
    if not shard:  # all processes must run a split network at once
        backbone.engine.check()
    return backbone


def attach(backbone: Backbone, engine: str = "eager", *, quantize: str | None = None, rows: str = "auto") -> Engine:
    """Gives a backbone, whose network is in memory, the engine of a name.

    Raises UsageError if the engine cannot run the network.
    """
    try:
        if engine == "native":
            network = backbone.model
            description = verified(network)
            int8 = rows != "fp32" and quantize is not None
            packed = pack_in_memory(description, NetworkWeights(network), quantize, int8)
            model = NativeModel(description, packed, rotary_of(network))
            backbone.engine = NativeEngine(backbone, model, int8, quantize)
        elif engine == "torch":
            backbone.engine = TorchEngine(backbone)
        else:
            backbone.engine = EagerEngine(backbone)
    except Unsupported as reason:
        raise UsageError(
            f"@engine {engine} cannot run the model {backbone.id!r}: {reason}", "use @engine auto or eager"
        ) from reason
    return backbone.engine


def _load_native(
    model: str, options: LoadOptions, adapter: Path | None, chat_template: str | None, chat: bool
) -> Backbone:
    """Loads a backbone on the native engine; raises Unsupported for a model that it cannot run."""
    if (reason := why_unavailable()) is not None:
        raise Unsupported(reason)
    own = checkpoint_dtype(model)
    as_stored = options.dtype in ("auto", "fp32") or DTYPES[options.dtype] == own
    quantize = options.quantize if options.quantize in INTEGER else None
    int8_rows = options.rows == "int8" or (options.rows == "auto" and options.dtype != "fp32")
    from_files = False
    if adapter is None and as_stored and not model.startswith(RANDOM):
        network, tokenizer = load_without_weights(model, chat_template)
        from_files = has_files(model)
    packed: Packed | None = None
    if from_files:
        description = verified(network)
        with suppress(MissingWeights):
            packed = _packed_once(model, description, network, quantize, int8_rows)
    if packed is None:
        kind = _merged_dtype(model, options, own, adapter)
        network, tokenizer = load_network(
            model, replace(options, dtype=kind, device="cpu", quantize=None), chat_template=chat_template
        )
        if adapter is not None:
            network = lora.merge(network, adapter)
        description = verified(network)
        packed = pack_in_memory(description, NetworkWeights(network), quantize, int8_rows)
        network = network.to("meta")
    rounded = any(not matrix.format.is_float for matrix in packed.matrices.values())
    int8_rows = int8_rows and rounded
    native = NativeModel(description, packed, rotary_of(network))
    backbone = Backbone(
        network,
        tokenizer,
        id=model,
        adapter=None if adapter is None else lora.digest(adapter),
        weights=packed.digest or weights_of(model),
        embedding=LookUp(native),
        lm_head=lambda: _lm_head(native),
    )
    backbone.engine = NativeEngine(backbone, native, int8_rows, quantize)
    _check_chat(backbone, chat)
    _check_finite(backbone)
    return backbone


def _merged_dtype(model: str, options: LoadOptions, own: torch.dtype, adapter: Path | None) -> str:
    """Returns the type to load a network in that is packed from memory: the checkpoint's, unless another is named.

    A merged adapter's sums are rounded to the type they are stored in, so with dtype fp32 they are kept in fp32.
    """
    if options.dtype != "auto" and not (options.dtype == "fp32" and adapter is None):
        return options.dtype
    return next(name for name, kind in DTYPES.items() if kind == own)


def _packed_once(model: str, description: Description, network: Any, quantize: str | None, int8_rows: bool) -> Packed:
    """Returns the packed weights of a model's files from the cache, where they are written at the first time.

    Where the cache cannot be written, they are packed in memory.
    """
    path = home() / "packed" / f"{stamp_of(source_stamp(model), quantize)}.bin"
    try:
        return read_packed(path, description, int8_rows)
    except (OSError, ValueError, KeyError, TypeError):  # missing, or damaged
        pass
    weights = open_weights(model, network)
    try:
        log.info("packing the weights of %s, once", model)
        pack_to_file(path, description, weights, quantize, weights_of(model))
        return read_packed(path, description, int8_rows)
    except OSError as reason:
        log.warning("packed weights cannot be kept in %s: %s", path.parent, reason.strerror)
        return pack_in_memory(description, weights, quantize, int8_rows)


def _lm_head(native: NativeModel) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the lm_head's weight [V, H] and bias in fp32, by looking all of its rows up."""
    vocab, hidden = native.description.sizes["vocab"], native.description.sizes["hidden"]
    weight = native.head.embed(np.arange(vocab))[:, :hidden]
    bias = native.head.bias
    return torch.from_numpy(weight), None if bias is None else torch.from_numpy(bias[:vocab])


def verified(network: Any) -> Description:
    """Describes a network and compares the library's pass with transformers' on a small random twin.

    Raises Unsupported where parts are unknown or states differ.
    """
    try:
        description = describe(network)
        twin = twin_of(network)
        more = gains_one_more(twin)
        _compare(twin, more)
    except (Unsupported, torch.OutOfMemoryError):
        raise
    except FAULTS as reason:
        raise Unsupported(first_line(reason)) from reason
    return dataclasses.replace(description, one_more=more)


@torch.inference_mode()
def _compare(twin: Any, one_more: bool) -> None:
    """Raises Unsupported unless the library gives a twin's states and logits, at its first and last positions."""
    description = dataclasses.replace(describe(twin), one_more=one_more)
    packed = pack_in_memory(description, NetworkWeights(twin), None, False)
    backbone = Backbone(twin)
    engine = NativeEngine(backbone, NativeModel(description, packed, rotary_of(twin)), False)
    tokens = torch.arange(PROBE) * 37 % backbone.vocab_size
    # A twin's window is short; its context is the model's.
    for first in (0, max(0, usable_positions(twin.config) - PROBE)):
        positions = first + torch.arange(PROBE)[None]
        expected = padded_pass(backbone, tokens[None], position_ids=positions).last_hidden_state[0]
        ours = engine.states_at(tokens, first)
        error = float((ours - expected).norm() / expected.norm())
        if not error <= TOLERANCE:
            raise Unsupported(f"its states differ from the network's own by {error:.2%} from position {first:,} on")
    logits = twin.get_output_embeddings()(expected)
    ours_logits = engine.logits_of(expected)
    if not torch.allclose(logits, ours_logits, atol=1e-4 * float(logits.abs().max())):
        raise Unsupported("its logits are not its lm_head's own")


@torch.inference_mode()
def _check_finite(backbone: Backbone) -> None:
    """Raises UserError for a model whose logits of a few tokens are not finite."""
    engine = backbone.engine
    tokens = torch.arange(6) % backbone.vocab_size
    out = engine.forward(Plan.chain(tokens, logits="all"), engine.new_cache())
    if not torch.isfinite(out.logits).all():
        raise UserError(
            f"@model {backbone.id!r} computes numbers that are not finite: its weights are damaged, or too large",
            "get the model again",
        )


def _check_chat(backbone: Backbone, chat: bool) -> None:
    if chat:
        check_template(backbone)
    try_template(backbone)


def _check_engine(named: str | None, options: LoadOptions, foreign: bool, shard: bool, model: str) -> None:
    """Raises UsageError for an engine that the other options rule out."""
    if named in ("auto", "eager", None):
        return
    flag = f"@quantize {options.quantize}" if options.quantize in INTEGER else f"@engine {named}"
    if shard:
        raise UsageError(f"{flag} cannot run layers split by train.shard=true", "leave one of them out")
    if foreign:
        raise UsageError(f"{flag} cannot run the own code of {model!r}", "use @engine auto or eager")
    device = torch.device(resolve_device(options.device)).type
    if named == "native" and device != "cpu":
        raise UsageError(f"{flag} runs on a CPU, not on {device}", "use @device cpu, or @quantize bnb.int8")
    if named == "native" and not is_available():
        raise UsageError(f"{flag} cannot run: {why_unavailable()}", "use @engine auto or eager")
    if named == "torch" and device == "cpu":
        raise UsageError(f"{flag} runs on a GPU, not on a CPU", "use @engine auto, native or eager")


def _refusal(options: LoadOptions, model: str, reason: Unsupported) -> UsageError:
    flag = f"@quantize {options.quantize}" if options.quantize in INTEGER else f"@engine {options.engine}"
    return UsageError(f"{flag} cannot run the model {model!r}: {reason}", "use @engine auto or eager")
