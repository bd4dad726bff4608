"""Loading of a backbone with the engine that suits its model, the device and the user's options."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_cli.engine.description import Description
from medusa_cli.engine.description_cache import describe_once
from medusa_cli.engine.eager import EagerEngine
from medusa_cli.engine.native_engine import NativeEngine
from medusa_cli.engine.native_linear import NativeEmbedding
from medusa_cli.engine.native_model import NativeModel
from medusa_cli.engine.packed import MissingWeights, Packed, pack_in_memory, pack_once
from medusa_cli.engine.packed_cache import forget
from medusa_cli.engine.plan import Plan
from medusa_cli.engine.probes import Rotary, rotary_of
from medusa_cli.engine.torch_layers import TorchEngine
from medusa_cli.engine.twin import verified
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone, lora
from medusa_cli.model.backbone import (
    Unsupported,
    check_fork,
    has_tied_head,
    text_config,
    text_model,
    usable_positions,
)
from medusa_cli.model.chat_template import check_template, try_template
from medusa_cli.model.checks import PROBE
from medusa_cli.model.digest import weights_of
from medusa_cli.model.load import (
    DTYPES,
    checkpoint_dtype,
    has_own_code,
    lazy_network,
    load_network,
    load_tokenizer,
    name_of_dtype,
    resolve_device,
    resolve_dtype,
    use_device,
)
from medusa_cli.model.weights import CheckpointWeights, NetworkWeights
from medusa_cli.native import Format, is_available, why_unavailable
from medusa_cli.runs.load_options import DEFAULT_LOADING, INTEGER, LoadOptions

log = logging.getLogger(__name__)


def load_backbone(
    model: ModelSource | str,
    options: LoadOptions = DEFAULT_LOADING,
    *,
    adapter: Path | None = None,
    chat_template: str | None = None,
    gradients: bool = False,
    shard: bool = False,
    chat: bool = False,
    drafter: Path | None = None,
) -> Backbone:
    """Loads a causal LM and its tokenizer for decoding or, with `gradients`, for training on its states.

    Engine "native" runs the native library on a CPU, "torch" runs rewritten layers on a GPU, and "eager" runs
    transformers' own layers. "auto" selects the first of these that can run the model. adapter: a folder from stage 2.
    It is merged into the weights or, if bitsandbytes quantized them, kept as separate layers. chat: True if the model
    must have a chat template. drafter: the folder of a drafter, whose memory is counted in addition to the model's. The
    other arguments are those of `load_network`. Raises UserError if anything is missing or unusable, if a GPU's memory
    does not suffice, and in a process that was forked after a model was loaded.
    """
    check_fork()
    if isinstance(model, str):
        model = ModelSource.of(model)
    # Only the eager engine runs a model's own code.
    foreign = options.trust_remote_code and has_own_code(model)
    device = torch.device(resolve_device(options.device))
    use_device(str(device))
    engine = _engine_of(options, device)
    _check_engine(engine, options, foreign, shard, model.name)
    needs_network = gradients or shard or foreign
    if options.exact and (device.type == "cpu" or needs_network or options.quantized):
        fault = f"@exact needs the torch engine on a GPU, which does not run {model.name!r} here"
        raise UsageError(fault, "leave it out; on a CPU, the native engine needs no option for it")

    if device.type == "cuda" and not (gradients or shard):
        _check_memory(model, options, device, drafter)
    inputs = _Inputs(model, options, adapter, chat_template, chat)
    if needs_network or engine == "eager":
        return _load_eager(inputs, shard)
    if device.type == "cpu":
        return _load_on_cpu(inputs, required=engine == "native")
    return _load_on_gpu(inputs, device, drafter, required=engine == "torch")


def load_without_layers(
    name: str, options: LoadOptions, chat_template: str | None = None
) -> Backbone:
    """Loads a model's embeddings, final norm, lm_head and tokenizer, for training on stored states.

    Raises UsageError if the model has no safetensors files or no final norm, or if one of these parts has buffers.
    """
    model = ModelSource.of(name)
    lazy = lazy_network(model)
    tokenizer = load_tokenizer(model, lazy, chat_template, False)
    network = lazy.network
    norm = getattr(text_model(network), "norm", None)
    embeddings, head = network.get_input_embeddings(), network.get_output_embeddings()
    needed = [embeddings, head, norm]
    scaled = any(list(part.buffers()) for part in needed if part is not None)
    if not model.checkpoint or norm is None or scaled:
        fault = (
            f"train.states=vllm cannot read the embeddings, the norm and the lm_head of {name!r}"
        )
        raise UsageError(fault, "use train.states=kept")
    device = resolve_device(options.device)
    use_device(device)
    dtype = resolve_dtype(options.dtype, model, device)
    weights = CheckpointWeights(model.checkpoint, network)
    names = {id(module): own for own, module in network.named_modules()}
    tied = has_tied_head(network)
    for module in (embeddings, norm) if tied else needed:
        for own, _ in list(module.named_parameters(recurse=False)):
            values = weights.tensor(f"{names[id(module)]}.{own}").to(device, dtype)
            setattr(module, own, torch.nn.Parameter(values, requires_grad=False))
    if tied:
        head.weight = embeddings.weight
    backbone = Backbone(network, tokenizer, id=model.name, weights=weights_of(model))
    backbone.engine = EagerEngine(backbone)
    return backbone


@dataclass(frozen=True)
class _Inputs:
    """Holds the arguments of `load_backbone`."""

    model: ModelSource
    options: LoadOptions = DEFAULT_LOADING
    adapter: Path | None = None
    chat_template: str | None = None
    chat: bool = False

    @property
    def integer(self) -> str | None:
        """Returns the integer format to which weights are quantized before they are packed, if any."""
        return self.options.quantize if self.options.quantize in INTEGER else None

    @property
    def int8_rows(self) -> bool:
        """Returns True if activations are rounded to 8 bits before they are multiplied by quantized weights."""
        kind = self.options.activations
        return kind == "int8" or (kind == "auto" and self.options.dtype != "fp32")

    @property
    def has_tiles(self) -> bool:
        """Returns True if packed weights would be quantized: by the options, or already in the model's GGUF file."""
        if self.options.quantize not in (None, "none"):
            return self.integer is not None
        floats = {format.name for format in Format if format.is_float}
        model = self.model
        return self.adapter is None and model.weights_in_gguf and not model.header.types <= floats


def _load_on_cpu(inputs: _Inputs, required: bool) -> Backbone:
    """Loads a backbone on the native engine if this engine can run the model, else on the eager engine."""
    if not inputs.options.quantized:
        try:
            return _load_native(inputs)
        except Unsupported as reason:
            _fall_back(inputs, reason, required)
    return _load_eager(inputs)


def _load_on_gpu(
    inputs: _Inputs, device: torch.device, drafter: Path | None, required: bool
) -> Backbone:
    """Loads a backbone on the torch engine if this engine can run the model, else on the eager engine."""
    options = inputs.options
    if inputs.has_tiles:
        try:
            return _load_tiles(inputs, device)
        except Unsupported as reason:
            _fall_back(inputs, reason, inputs.integer is not None, "with dequantized weights")
            if device.type == "cuda":
                _check_memory(inputs.model, replace(options, engine="eager"), device, drafter)

    backbone = _load_transformers(inputs)
    try:
        _run_by_torch(backbone, options)
    except Unsupported as reason:
        _fall_back(inputs, reason, required or options.exact)
        _run_eagerly(backbone)
    return backbone


def _load_eager(inputs: _Inputs, shard: bool = False) -> Backbone:
    """Loads a backbone on the eager engine, possibly with its layers split over the processes."""
    backbone = _load_transformers(inputs, shard)
    _run_eagerly(backbone, shard)
    return backbone


def _load_transformers(inputs: _Inputs, shard: bool = False) -> Backbone:
    """Loads a backbone without an engine: transformers' network, with the adapter if there is one."""
    model, options, adapter = inputs.model, inputs.options, inputs.adapter
    network, tokenizer = load_network(
        model, options, shard=shard, chat_template=inputs.chat_template
    )
    digest = None
    if adapter is not None:
        digest = lora.digest(adapter)
        network = lora.merge(network, adapter, quantized=options.quantized)
    backbone = Backbone(
        network, tokenizer, id=model.name, adapter=digest, weights=weights_of(model)
    )
    _check_chat(backbone, inputs.chat)
    return backbone


def _fall_back(
    inputs: _Inputs, reason: Unsupported, required: bool, instead: str = "on the eager engine"
) -> None:
    """Logs how a model runs without the preferred engine, or raises UsageError if the options require this engine."""
    name, options = inputs.model.name, inputs.options
    if required:
        fault = f"{_flag(options)} cannot run the model {name!r}: {reason}"
        raise UsageError(fault, _remedy(options)) from reason
    log.info("%s runs %s: %s", name, instead, reason)


def _check_memory(
    model: ModelSource, options: LoadOptions, device: torch.device, drafter: Path | None
) -> None:
    from medusa_cli.engine.memory import check_memory

    check_memory(model, options, device, drafter)


def _run_eagerly(backbone: Backbone, shard: bool = False) -> None:
    backbone.engine = EagerEngine(backbone)
    if not shard:  # all processes must run a sharded network together
        backbone.engine.check()


def _run_by_torch(backbone: Backbone, options: LoadOptions) -> None:
    backbone.engine = engine = TorchEngine(backbone)
    if options.exact:
        from medusa_cli.engine.exact import use_exact_path

        use_exact_path(engine)


@dataclass(frozen=True)
class _Loaded:
    """A model with packed weights, and its network without weights, which may not be built yet."""

    network: Any
    tokenizer: Any
    description: Description
    packed: Packed
    rotary: Rotary


def _load_native(inputs: _Inputs) -> Backbone:
    """Loads a backbone on the native engine; raises Unsupported for a model that this engine cannot run."""
    loaded = _pack(inputs, inputs.int8_rows)
    context = usable_positions(text_config(loaded.network.config))
    with _forgetting_refused(loaded.packed):
        native = NativeModel(loaded.description, loaded.packed, loaded.rotary, context)
    backbone = _backbone_of(
        inputs,
        loaded,
        loaded.network,
        embedding=NativeEmbedding(native),
        lm_head=partial(_lm_head, native),
    )
    int8_rows = inputs.int8_rows and loaded.packed.is_quantized
    backbone.engine = NativeEngine(backbone, native, int8_rows, inputs.integer, inputs.options.kv)
    _check_chat(backbone, inputs.chat)
    with _forgetting_refused(loaded.packed):
        _check_finite(backbone)
    return backbone


def _load_tiles(inputs: _Inputs, device: torch.device) -> Backbone:
    """Loads a backbone on the torch engine with the weights that the native engine packs; see `_load_native`."""
    from medusa_cli.engine.tile_network import network_of

    options = inputs.options
    dtype = resolve_dtype(options.dtype, inputs.model, str(device))
    as_stored = replace(inputs, options=replace(options, dtype="auto"))
    loaded = _pack(as_stored, inputs.int8_rows)
    if not loaded.packed.is_quantized:
        raise Unsupported("its weights are not quantized")
    network, head = network_of(
        loaded.network.config, loaded.description, loaded.packed, dtype, device, inputs.int8_rows
    )
    network.generation_config = loaded.network.generation_config
    backbone = _backbone_of(inputs, loaded, network, lm_head=head)
    _check_chat(backbone, inputs.chat)
    _run_by_torch(backbone, options)
    backbone.engine.quantize = inputs.integer
    _check_finite(backbone)
    return backbone


def _backbone_of(inputs: _Inputs, loaded: _Loaded, network: Any, **parts: Any) -> Backbone:
    """Returns a backbone with packed weights and without an engine."""
    return Backbone(
        network,
        loaded.tokenizer,
        id=inputs.model.name,
        adapter=None if inputs.adapter is None else lora.digest(inputs.adapter),
        weights=loaded.packed.digest or weights_of(inputs.model),
        **parts,
    )


def _pack(inputs: _Inputs, int8_rows: bool) -> _Loaded:
    """Packs a model's weights: from its files if these can be packed unchanged, else from transformers' network."""
    if (reason := why_unavailable()) is not None:
        raise Unsupported(reason)
    model, dtype = inputs.model, inputs.options.dtype
    as_stored = dtype in ("auto", "fp32") or DTYPES[dtype] == checkpoint_dtype(model)
    loaded = None
    if inputs.adapter is None and as_stored and model.kind != "random":
        loaded = _from_files(inputs, int8_rows)
    return loaded or _from_network(inputs, int8_rows)


@contextmanager
def _forgetting_refused(packed: Packed) -> Iterator[None]:
    """Removes packed weights from the cache if their model is refused, as no later start would use them."""
    try:
        yield
    except (Unsupported, UserError):
        if packed.path is not None:
            forget(packed.path)
        raise


def _from_files(inputs: _Inputs, int8_rows: bool) -> _Loaded | None:
    """Packs a model's files unchanged; returns None if it has none, or if only transformers can read its files."""
    model = inputs.model
    if not model.weights:
        return None
    lazy = lazy_network(model)
    # Quantized weights may have the names of plain weights, although they need other layers.
    settings = getattr(lazy.config, "quantization_config", None)
    is_mxfp4 = isinstance(settings, dict) and settings.get("quant_method") == "mxfp4"
    if settings is not None and not is_mxfp4:
        return None
    cached = describe_once(model, lazy)
    tokenizer = load_tokenizer(model, lazy, inputs.chat_template, inputs.chat)
    try:
        packed = pack_once(model, cached.description, lazy, inputs.integer, int8_rows)
    except MissingWeights:
        return None
    return _Loaded(lazy, tokenizer, cached.description, packed, partial(cached.rotary, lazy))


def _from_network(inputs: _Inputs, int8_rows: bool) -> _Loaded:
    """Packs a network that transformers loads, with the adapter, if any, merged into it."""
    options = replace(inputs.options, dtype=_dtype_in_memory(inputs), device="cpu", quantize=None)
    network, tokenizer = load_network(inputs.model, options, chat_template=inputs.chat_template)
    if inputs.adapter is not None:
        network = lora.merge(network, inputs.adapter)
    description = verified(network)
    packed = pack_in_memory(description, NetworkWeights(network), inputs.integer, int8_rows)
    rotary = rotary_of(network)
    return _Loaded(network.to("meta"), tokenizer, description, packed, rotary)


def _dtype_in_memory(inputs: _Inputs) -> str:
    """Returns the number type in which a network is loaded before packing.

    It is the checkpoint's type unless the options request another one. fp32 counts as a request only if
    there is an adapter, because the sums of weights and adapter are rounded to the type returned.
    """
    dtype = inputs.options.dtype
    if dtype != "auto" and not (dtype == "fp32" and inputs.adapter is None):
        return dtype
    return name_of_dtype(checkpoint_dtype(inputs.model))


def _lm_head(
    native: NativeModel, ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Looks up the lm_head's weight [M, H] and bias [M] for token ids, or for all tokens, in fp32."""
    rows = np.arange(native.description.sizes["vocab"]) if ids is None else ids.numpy()
    hidden = native.description.sizes["hidden"]
    weight = native.head.embed(rows)[:, :hidden]
    bias = native.head.bias
    return torch.from_numpy(weight), None if bias is None else torch.from_numpy(bias[rows])


@torch.inference_mode()
def _check_finite(backbone: Backbone) -> None:
    """Raises UserError if the model's logits for a few tokens are not finite."""
    engine = backbone.engine
    tokens = torch.arange(PROBE) % backbone.vocab_size
    out = engine.forward(Plan.chain(tokens, logits="all"), engine.new_cache())
    if not torch.isfinite(out.logits).all():
        fault = f"@model {backbone.id!r} computes numbers that are not finite: its weights are damaged, or too large"
        raise UserError(fault, "get the model again")


def _check_chat(backbone: Backbone, chat: bool) -> None:
    if chat:
        check_template(backbone)
    try_template(backbone)


def _check_engine(named: str, options: LoadOptions, foreign: bool, shard: bool, model: str) -> None:
    """Raises UsageError if the other options rule out the named engine."""
    if named in ("auto", "eager"):
        return
    flag = _flag(options) if options.engine == "auto" else f"@engine {named}"
    if shard:
        fault = f"{flag} cannot run layers split by train.shard=true"
        raise UsageError(fault, "leave one of them out")
    if foreign:
        fault = f"{flag} cannot run the code that {model!r} brings along"
        raise UsageError(fault, _remedy(options))
    device = torch.device(resolve_device(options.device)).type
    if named == "native" and device != "cpu":
        fault = f"{flag} runs on a CPU, not on {device}"
        raise UsageError(fault, "use @device cpu, or leave it out")
    if named == "native" and not is_available():
        raise UsageError(f"{flag} cannot run: {why_unavailable()}", _remedy(options))
    if named == "torch" and device == "cpu":
        raise UsageError(f"{flag} runs on a GPU, not on a CPU", "use @engine auto, native or eager")


def _engine_of(options: LoadOptions, device: torch.device) -> str:
    """Returns the engine that the options name or require, or "auto"."""
    if options.engine != "auto" or _forced(options) is None:
        return options.engine
    return "torch" if options.kv == "fp32" and device.type != "cpu" else "native"


def _forced(options: LoadOptions) -> str | None:
    """Returns the option that requires an engine for packed weights; None if there is none."""
    if options.quantize in INTEGER:
        return f"@quantize {options.quantize}"
    return None if options.kv == "fp32" else f"@kv {options.kv}"


def _flag(options: LoadOptions) -> str:
    """Returns the option that requested the engine."""
    own = "@exact" if options.exact else f"@engine {options.engine}"
    return _forced(options) or own


def _remedy(options: LoadOptions) -> str:
    return f"leave {_flag(options).split()[0]} out"
