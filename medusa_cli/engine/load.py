"""Loads a backbone with the engine and kernel that suit it."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from medusa_cli.assets import DEFAULT_MODEL, RANDOM, model_dir
from medusa_cli.engine.autotune import fastest
from medusa_cli.engine.eager import EagerEngine
from medusa_cli.engine.engine import Engine
from medusa_cli.engine.fast import FastEngine
from medusa_cli.engine.kernels import BITS, Kernel, kernels_for
from medusa_cli.engine.layers import FastLayer
from medusa_cli.errors import UsageError, first_line
from medusa_cli.gguf import BLOCKS_FILE
from medusa_cli.model import Backbone, lora
from medusa_cli.model.backbone import Layers, Unsupported, weights_of
from medusa_cli.model.chat_template import check_template, try_template
from medusa_cli.model.checks import FAULTS
from medusa_cli.model.load import (
    DTYPES,
    checkpoint_dtype,
    has_bf16,
    has_own_code,
    load_network,
    read_config,
    resolve_device,
    resolve_dtype,
)
from medusa_cli.runs.resolve import DEFAULT_LOADING, LoadOptions

SIXTEEN = (torch.bfloat16, torch.float16)
log = logging.getLogger(__name__)


def load_backbone(
    model: str = DEFAULT_MODEL,
    options: LoadOptions = DEFAULT_LOADING,
    *,
    adapter: Path | None = None,
    chat_template: str | None = None,
    gradients: bool = False,
    shard: bool = False,
    rows: int | None = None,
    chat: bool = False,
) -> Backbone:
    """Loads a causal LM and its tokenizer for decoding, or, with gradients, to train what its states feed.

    engine "eager" runs transformers' layers, "fast" rewritten ones over a kernel, as do quantize "int8" and "int4";
    "auto" is "fast" if that can run the model. dtype and engine "auto" take the kernel that was fastest on this
    machine, for steps of a few rows or of `rows`. adapter: a folder from stage 2, merged into the weights or kept
    beside quantised ones. chat: the model needs a chat template. The rest is load_network's. Raises UserError for
    anything missing or unusable.
    """
    dtype, quantised = options.dtype, options.quantised
    engine = options.quantize if options.quantize in BITS else options.engine
    assert engine is not None
    fast_only = engine not in ("auto", "eager")
    if shard and fast_only:
        raise UsageError(f"{_flag(engine)} cannot run layers split by @shard", "leave one of them out")
    foreign = options.trust_remote_code and has_own_code(model)  # only the eager engine runs a model's own code
    if foreign and fast_only:
        raise UsageError(f"{_flag(engine)} cannot run the own code of {model!r}", "use @engine auto or eager")
    stamp = lora.digest(adapter) if adapter is not None else None

    def load(kind: str) -> Backbone:
        network, tokenizer = load_network(model, replace(options, dtype=kind), shard=shard, chat_template=chat_template)
        if adapter is not None:
            network = lora.merge(network, adapter, beside=quantised)
        elif (blocks := _blocks_file(model)) is not None:
            for name, rows in load_file(blocks).items():
                network.get_submodule(name).gguf_blocks = rows
        backbone = Backbone(network, tokenizer, id=model, adapter=stamp, weights=weights_of(model))
        if chat:
            check_template(backbone)
        try_template(backbone)
        return backbone

    if engine == "eager" or shard or gradients or foreign or (quantised and engine == "auto"):
        backbone = load(dtype)
    else:
        device = resolve_device(options.device)
        backbone = load(_stored(model, dtype, kernels_of(model, device, dtype, engine)[0].rows, adapter))
        try:
            backbone.engine = fast_engine(backbone, partial(choose_kernel, model, device, dtype, engine, rows))
            return backbone
        except Unsupported as reason:
            if engine != "auto":
                raise _refusal(engine, model, reason) from reason
            log.info("%s runs on the eager engine: %s", model, reason)
        spent = not all(weight.numel() for weight in backbone.model.parameters())  # layers are packed one by one
        if spent or backbone.dtype != resolve_dtype(dtype, model, device):
            backbone = load(dtype)
    backbone.engine = EagerEngine(backbone, backbone.device.type == "cpu" and not (gradients or shard or quantised))
    if not shard:  # all processes must run a split network at once
        backbone.engine.check()
    return backbone


def attach(backbone: Backbone, engine: str = "eager", kernel: Kernel | None = None) -> Engine:
    """Gives a backbone the engine of a name, over a kernel or the first one for its type.

    Raises UsageError if the engine cannot run the network, which is spent then: some of its layers are packed.
    """
    dtype = backbone.embedding.weight.dtype
    if engine == "eager":
        backbone.engine = EagerEngine(backbone)
        return backbone.engine
    if engine in BITS:
        _check_rounded(engine, dtype, backbone.device)
        kernel = Kernel(engine)
    try:
        backbone.engine = fast_engine(backbone, lambda: kernel or kernels_for(dtype, backbone.device)[0])
    except Unsupported as reason:
        raise _refusal(engine, backbone.id, reason) from reason
    return backbone.engine


def fast_engine(backbone: Backbone, choose: Callable[[], Kernel]) -> FastEngine:
    """Returns the fast engine over a chosen kernel; raises Unsupported for any model whose parts it does not know."""
    try:
        # Nothing is timed for such a model.
        FastLayer(Layers(backbone.model).layers[0], backbone.config, Kernel("plain", backbone.dtype), 0, 0)
        return FastEngine(backbone, choose())
    except torch.OutOfMemoryError:
        raise
    except FAULTS as reason:
        raise Unsupported(first_line(reason)) from reason


def choose_kernel(model: str, device: str, dtype: str, engine: str, rows: int | None) -> Kernel:
    """Returns the fastest of the kernels that dtype and engine name; UsageError if they conflict."""
    kernels = kernels_of(model, device, dtype, engine)
    return kernels[0] if len(kernels) == 1 else fastest(kernels, read_config(model), rows)


def kernels_of(model: str, device: str, dtype: str, engine: str) -> list[Kernel]:
    """Returns the kernels that dtype and engine name for a model, of which all take its weights in one type.

    Raises UsageError if dtype and engine conflict.
    """
    place, own = torch.device(device), checkpoint_dtype(model)
    if engine in BITS:
        _check_rounded(engine, torch.bfloat16 if dtype == "auto" else DTYPES[dtype], place)
        return [Kernel(engine)]
    if dtype == "auto" and place.type == "cpu" and has_bf16() and _blocks_file(model) is not None:
        return [Kernel("gguf", torch.bfloat16)]
    if dtype != "auto":
        kinds = [DTYPES[dtype]]
    elif place.type != "cpu":
        kinds = [own]
    else:
        # fp32 arithmetic is never less exact than the checkpoint; fp16's is slow on every CPU.
        kinds = [torch.float32, torch.bfloat16] if own == torch.bfloat16 else [torch.float32]
    kernels = [kernel for kind in kinds for kernel in kernels_for(kind, place)]
    if len(kinds) > 1:  # a CPU without bf16 instructions has but a plain, slow product for it
        kernels = [kernel for kernel in kernels if kernel.name != "plain"]
    if own not in SIXTEEN:
        kernels = [kernel for kernel in kernels if kernel.name != "fp16-weights"] or kernels
    return kernels


def _blocks_file(model: str) -> Path | None:
    """Returns the file of the 4-bit blocks that an unpacked GGUF file's matrices have, or None."""
    if model.startswith(RANDOM):
        return None
    path = Path(model_dir(model)) / BLOCKS_FILE
    return path if path.is_file() else None


def _stored(model: str, dtype: str, rows: torch.dtype, adapter: Path | None) -> str:
    """Returns the type to load the network in: the checkpoint's, at half the size, if an fp32 kernel packs it exactly.

    A merged adapter's sums are rounded to the type they are stored in, so with dtype fp32 they are kept in fp32.
    """
    own = checkpoint_dtype(model)
    half = rows == torch.float32 and own in SIXTEEN and not (dtype == "fp32" and adapter is not None)
    return next(name for name, kind in DTYPES.items() if kind == (own if half else rows))


def _check_rounded(engine: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises UsageError unless rounded weights have kernels for a type on a device."""
    if dtype != torch.bfloat16 or device.type != "cpu":
        raise UsageError(
            f"@quantize {engine} needs bf16 on a CPU, not {str(dtype).removeprefix('torch.')} on {device.type}",
            "use @dtype bf16 @device cpu, or @quantize bnb.int8",
        )


def _refusal(engine: str, model: str, reason: Unsupported) -> UsageError:
    return UsageError(f"{_flag(engine)} cannot run the model {model!r}: {reason}", "use @engine auto or eager")


def _flag(engine: str) -> str:
    return f"@quantize {engine}" if engine in BITS else f"@engine {engine}"
