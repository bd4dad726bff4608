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

    Engine "native" runs the library on a CPU, "torch" runs rewritten layers on a GPU, and "eager"
    runs transformers' own layers. "auto" selects the first of these that can run the model. adapter:
    a folder from stage 2. It is merged into the weights or, if bitsandbytes quantized them, kept as
    separate layers. chat: the model must have a chat template. drafter: the folder of a drafter that
    needs memory beside the model's. The other arguments are those of `load_network`. Raises UserError
    if anything is missing or unusable or a GPU's memory does not suffice, and in a process forked from
    one that has loaded a model.
    """
    check_fork()
    if isinstance(model, str):
        model = ModelSource.of(model)
    # Only the eager engine runs a model's own code.
    foreign = options.trust_remote_code and has_own_code(model)
    device = torch.device(resolve_device(options.device))
    on_cpu = device.type == "cpu"
    named = options.engine
    if named == "auto":
        named = _forced_engine(options, on_cpu)
    _check_engine(named, options, foreign, shard, model.name)
    needs_network = gradients or shard or foreign
    if options.exact and (on_cpu or needs_network or options.quantized):
        raise UsageError(
            f"@exact needs the torch engine on a GPU, which does not run {model.name!r} here",
            "leave it out; on a CPU, the native engine needs no option for it",
        )

    if device.type == "cuda" and not (gradients or shard):
        _check_memory(model, options, device, drafter)

    if named in ("auto", "native") and on_cpu and not (needs_network or options.quantized):
        try:
            return _load_native(model, options, adapter, chat_template, chat)
        except Unsupported as reason:
            _fall_back(options, model, reason, required=named == "native")

    by_torch = named in ("auto", "torch") and not on_cpu and not needs_network
    if by_torch and _has_tiles(model, options, adapter):
        try:
            return _load_tiles(model, options, adapter, chat_template, chat, device)
        except Unsupported as reason:
            required = options.quantize in INTEGER
            _fall_back(options, model, reason, required, "with dequantized weights")
            if device.type == "cuda":
                _check_memory(model, replace(options, engine="eager"), device, drafter)

    backbone = _load_transformers(model, options, adapter, chat_template, shard)
    _check_chat(backbone, chat)
    if by_torch:
        try:
            _run_by_torch(backbone, options)
            return backbone
        except Unsupported as reason:
            _fall_back(options, model, reason, required=named == "torch" or options.exact)
    backbone.engine = EagerEngine(backbone)
    if not shard:  # all processes must run a sharded network together
        backbone.engine.check()
    return backbone


def load_without_layers(
    name: str, options: LoadOptions, chat_template: str | None = None
) -> Backbone:
    """Loads a model's embeddings, final norm, lm_head and tokenizer, for training on stored states.

    Raises UsageError for a model without safetensors files, or with another structure.
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
        raise UsageError(
            f"train.states=vllm cannot read the embeddings, the norm and the lm_head of {name!r}",
            "use train.states=kept",
        )
    device = resolve_device(options.device)
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


def _load_transformers(
    model: ModelSource,
    options: LoadOptions,
    adapter: Path | None,
    chat_template: str | None,
    shard: bool,
) -> Backbone:
    """Loads a backbone with transformers' network in memory, and the adapter, if any, in it; it has no engine yet."""
    network, tokenizer = load_network(model, options, shard=shard, chat_template=chat_template)
    digest = None
    if adapter is not None:
        digest = lora.digest(adapter)
        network = lora.merge(network, adapter, quantized=options.quantized)
    return Backbone(network, tokenizer, id=model.name, adapter=digest, weights=weights_of(model))


def _fall_back(
    options: LoadOptions,
    model: ModelSource,
    reason: Unsupported,
    required: bool,
    instead: str = "on the eager engine",
) -> None:
    """Logs how a model runs instead; raises UsageError if the options require what it cannot."""
    if required:
        raise UsageError(
            f"{_flag(options)} cannot run the model {model.name!r}: {reason}", _remedy(options)
        ) from reason
    log.info("%s runs %s: %s", model.name, instead, reason)


def _check_memory(
    model: ModelSource, options: LoadOptions, device: torch.device, drafter: Path | None
) -> None:
    from medusa_cli.engine.memory import check_memory

    check_memory(model, options, device, drafter)


def _run_by_torch(backbone: Backbone, options: LoadOptions) -> None:
    backbone.engine = engine = TorchEngine(backbone)
    if options.exact:
        from medusa_cli.engine.exact import use_exact_path

        use_exact_path(engine)


@dataclass(frozen=True)
class _Loaded:
    """A model for the native engine: its network without weights, possibly not built yet, and packed weights."""

    network: Any
    tokenizer: Any
    description: Description
    packed: Packed
    rotary: Rotary


def _load_native(
    model: ModelSource,
    options: LoadOptions,
    adapter: Path | None,
    chat_template: str | None,
    chat: bool,
) -> Backbone:
    """Loads a backbone on the native engine; raises Unsupported for a model that it cannot run."""
    int8_rows = _rounds_rows(options)
    loaded = _pack(model, options, adapter, chat_template, int8_rows, chat)
    context = usable_positions(text_config(loaded.network.config))
    with _forgetting_refused(loaded.packed):
        native = NativeModel(loaded.description, loaded.packed, loaded.rotary, context)
    backbone = Backbone(
        loaded.network,
        loaded.tokenizer,
        id=model.name,
        adapter=None if adapter is None else lora.digest(adapter),
        weights=loaded.packed.digest or weights_of(model),
        embedding=NativeEmbedding(native),
        lm_head=partial(_lm_head, native),
    )
    int8_rows = int8_rows and loaded.packed.is_quantized
    backbone.engine = NativeEngine(backbone, native, int8_rows, _integer(options), options.kv)
    _check_chat(backbone, chat)
    with _forgetting_refused(loaded.packed):
        _check_finite(backbone)
    return backbone


def _load_tiles(
    model: ModelSource,
    options: LoadOptions,
    adapter: Path | None,
    chat_template: str | None,
    chat: bool,
    device: torch.device,
) -> Backbone:
    """Loads a backbone on the torch engine with the weights that the native engine packs; see `_load_native`."""
    from medusa_cli.engine.tile_network import network_of

    int8_rows = _rounds_rows(options)
    dtype = resolve_dtype(options.dtype, model, str(device))
    stored = replace(options, dtype="auto")
    loaded = _pack(model, stored, adapter, chat_template, int8_rows, chat)
    if not loaded.packed.is_quantized:
        raise Unsupported("its weights are not quantized")
    network, head = network_of(
        loaded.network.config, loaded.description, loaded.packed, dtype, device, int8_rows
    )
    network.generation_config = loaded.network.generation_config
    backbone = Backbone(
        network,
        loaded.tokenizer,
        id=model.name,
        adapter=None if adapter is None else lora.digest(adapter),
        weights=loaded.packed.digest or weights_of(model),
        lm_head=head,
    )
    _check_chat(backbone, chat)
    _run_by_torch(backbone, options)
    backbone.engine.quantize = _integer(options)
    _check_finite(backbone)
    return backbone


def _has_tiles(model: ModelSource, options: LoadOptions, adapter: Path | None) -> bool:
    """Returns True if a model has quantized weights that the native engine would pack, or will have them."""
    if options.quantize not in (None, "none"):
        return options.quantize in INTEGER
    floats = {format.name for format in Format if format.is_float}
    return adapter is None and model.weights_in_gguf and not model.header.types <= floats


def _rounds_rows(options: LoadOptions) -> bool:
    """Returns True if rows are rounded to 8 bits before they are multiplied by quantized weights."""
    return options.rows == "int8" or (options.rows == "auto" and options.dtype != "fp32")


def _pack(
    model: ModelSource,
    options: LoadOptions,
    adapter: Path | None,
    chat_template: str | None,
    int8_rows: bool,
    chat: bool,
) -> _Loaded:
    """Packs a model's weights, from its files if they can be packed as they are."""
    if (reason := why_unavailable()) is not None:
        raise Unsupported(reason)
    as_stored = options.dtype in ("auto", "fp32") or DTYPES[options.dtype] == checkpoint_dtype(
        model
    )
    loaded = None
    if adapter is None and as_stored and model.kind != "random":
        loaded = _from_files(model, options, chat_template, int8_rows, chat)
    if loaded is None:
        loaded = _from_network(model, options, adapter, chat_template, int8_rows)
    return loaded


@contextmanager
def _forgetting_refused(packed: Packed) -> Iterator[None]:
    """Removes packed weights from the cache if their model is refused, as no later start would use them."""
    try:
        yield
    except (Unsupported, UserError):
        if packed.path is not None:
            forget(packed.path)
        raise


def _from_files(
    model: ModelSource, options: LoadOptions, chat_template: str | None, int8_rows: bool, chat: bool
) -> _Loaded | None:
    """Packs a model's files as they are; returns None if there are none or if only transformers can read them."""
    if not model.weights:
        return None
    lazy = lazy_network(model)
    # Quantized weights may have their usual names, but belong to other layers than those of a plain network.
    settings = getattr(lazy.config, "quantization_config", None)
    is_mxfp4 = isinstance(settings, dict) and settings.get("quant_method") == "mxfp4"
    if settings is not None and not is_mxfp4:
        return None
    cached = describe_once(model, lazy)
    tokenizer = load_tokenizer(model, lazy, chat_template, chat)
    try:
        packed = pack_once(model, cached.description, lazy, _integer(options), int8_rows)
    except MissingWeights:
        return None
    return _Loaded(lazy, tokenizer, cached.description, packed, partial(cached.rotary, lazy))


def _from_network(
    model: ModelSource,
    options: LoadOptions,
    adapter: Path | None,
    chat_template: str | None,
    int8_rows: bool,
) -> _Loaded:
    """Packs a network that transformers loads, with the adapter, if any, merged into it."""
    options = replace(options, dtype=_dtype_in_memory(model, options, adapter), device="cpu")
    network, tokenizer = load_network(
        model, replace(options, quantize=None), chat_template=chat_template
    )
    if adapter is not None:
        network = lora.merge(network, adapter)
    description = verified(network)
    packed = pack_in_memory(description, NetworkWeights(network), _integer(options), int8_rows)
    rotary = rotary_of(network)
    return _Loaded(network.to("meta"), tokenizer, description, packed, rotary)


def _dtype_in_memory(model: ModelSource, options: LoadOptions, adapter: Path | None) -> str:
    """Returns the number type in which a network is loaded before packing.

    It is the checkpoint's type unless the options request another one. fp32 counts as a request only
    with an adapter: its sums with the weights are rounded to the type in which they are stored.
    """
    if options.dtype != "auto" and not (options.dtype == "fp32" and adapter is None):
        return options.dtype
    return name_of_dtype(checkpoint_dtype(model))


def _integer(options: LoadOptions) -> str | None:
    """Returns the integer format that the native engine quantizes weights to, if any."""
    return options.quantize if options.quantize in INTEGER else None


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
        raise UserError(
            f"@model {backbone.id!r} computes numbers that are not finite: its weights are damaged, or too large",
            "get the model again",
        )


def _check_chat(backbone: Backbone, chat: bool) -> None:
    if chat:
        check_template(backbone)
    try_template(backbone)


def _check_engine(
    named: str | None, options: LoadOptions, foreign: bool, shard: bool, model: str
) -> None:
    """Raises UsageError if the other options rule out the named engine."""
    if named in ("auto", "eager", None):
        return
    flag = _flag(options) if options.engine == "auto" else f"@engine {named}"
    if shard:
        raise UsageError(
            f"{flag} cannot run layers split by train.shard=true", "leave one of them out"
        )
    if foreign:
        raise UsageError(
            f"{flag} cannot run the code that {model!r} brings along", _remedy(options)
        )
    device = torch.device(resolve_device(options.device)).type
    if named == "native" and device != "cpu":
        raise UsageError(
            f"{flag} runs on a CPU, not on {device}", "use @device cpu, or leave it out"
        )
    if named == "native" and not is_available():
        raise UsageError(f"{flag} cannot run: {why_unavailable()}", _remedy(options))
    if named == "torch" and device == "cpu":
        raise UsageError(f"{flag} runs on a GPU, not on a CPU", "use @engine auto, native or eager")


def _forced_engine(options: LoadOptions, on_cpu: bool) -> str:
    """Returns the engine that other options require, or "auto"."""
    if _forced(options) is None:
        return "auto"
    return "torch" if options.kv == "fp32" and not on_cpu else "native"


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
