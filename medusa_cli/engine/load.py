"""From a name to a backbone with the engine that runs it, chosen by what was measured on this machine."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.engine.autotune import fastest
from medusa_cli.engine.eager import EagerEngine
from medusa_cli.engine.engine import Engine
from medusa_cli.engine.fast import FastEngine
from medusa_cli.engine.kernels import BITS, IntKernel, Kernel, PlainKernel, kernels_for
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapters
from medusa_cli.model.backbone import Unsupported
from medusa_cli.model.identity import weights_of
from medusa_cli.model.load import (
    DTYPES,
    checkpoint_dtype,
    has_own_code,
    load_network,
    read_config,
    resolve_device,
)
from medusa_cli.runs.resolve import DEFAULT_LOADING, LoadOptions

ENGINES = ("auto", "eager", "fast")
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
) -> Backbone:
    """Load a causal LM and its tokenizer for decoding, or, with gradients, for what learns beneath its layers.

    engine "fast" is the fast one over a kernel's products, also with quantize "int8" and "int4"; "eager"
    is transformers' own layers; "auto" is "fast" where that can run the model. dtype and engine "auto" together mean
    the fastest kernel, as measured on this machine, that computes what the checkpoint says: for steps of a few rows, or
    of so many `rows`. adapter is a folder from joint training: merged into the weights, or beside them where they are
    quantised. Gradients pass through plain weights alone, which the engine "eager" then keeps. The rest is
    load_network's. Raises UserError for what cannot be found or used.
    """
    if options.engine not in ENGINES:
        raise UsageError(f"@engine {options.engine!r} is unknown", f"use one of {', '.join(ENGINES)}")
    engine, dtype, quantised = options.engine, options.dtype, options.quantised
    if options.quantize in BITS:
        engine = options.quantize
    if shard and engine not in ("auto", "eager"):
        raise UsageError(f"{_flag(engine)} cannot run layers split by @shard", "leave one of them out")
    stamp = adapters.digest(adapter) if adapter is not None else None

    def made(kind: str) -> Backbone:
        network, tokenizer = load_network(model, replace(options, dtype=kind), shard=shard, chat_template=chat_template)
        if adapter is not None:
            network = adapters.merge(network, adapter, beside=quantised)
        return Backbone(network, tokenizer, id=model, adapter=stamp, weights=weights_of(model))

    foreign = options.trust_remote_code and has_own_code(model)  # whose layers no other engine knows
    if foreign and engine not in ("auto", "eager"):
        raise UsageError(f"{_flag(engine)} cannot run the own code of {model!r}", "use @engine auto or eager")
    if engine != "eager" and not (shard or gradients or foreign or (quantised and engine == "auto")):
        kernel = choose_kernel(model, resolve_device(options.device), dtype, engine, rows)
        try:
            backbone = made(_stored(model, dtype, kernel, adapter))
            backbone.engine = FastEngine(backbone, kernel)
            return backbone
        except Unsupported as reason:
            if engine != "auto":
                raise refusal(engine, model, reason) from reason
            log.info("%s runs on the eager engine: %s", model, reason)
    backbone = made(dtype)
    pack = backbone.device.type == "cpu" and not (gradients or shard or quantised)
    backbone.engine = EagerEngine(backbone, pack)
    return backbone


def attach(backbone: Backbone, engine: str = "eager", kernel: Kernel | None = None) -> Engine:
    """Give a backbone the engine of a name, over a kernel or the first there is for its type.

    UsageError where that is in vain; the network, of whose layers some have been packed by then, is spent.
    """
    dtype = backbone.embedding.weight.dtype
    if engine == "eager":
        backbone.engine = EagerEngine(backbone)
        return backbone.engine
    if engine in BITS:
        check_rounding(engine, dtype, backbone.device)
        kernel = IntKernel(BITS[engine])
    try:
        backbone.engine = FastEngine(backbone, kernel or kernels_for(dtype, backbone.device)[0])
    except Unsupported as reason:
        raise refusal(engine, backbone.id, reason) from reason
    return backbone.engine


def choose_kernel(model: str, device: str, dtype: str, engine: str, rows: int | None) -> Kernel:
    """The kernel that dtype and engine come to on a device; UsageError for those that contradict each other."""
    if dtype not in ("auto", *DTYPES):
        raise UsageError(f"@dtype {dtype!r} is unknown", f"use auto, {', '.join(DTYPES)}")
    place, own = torch.device(device), checkpoint_dtype(model)
    if engine in BITS:
        check_rounding(engine, torch.bfloat16 if dtype == "auto" else DTYPES[dtype], place)
        return IntKernel(BITS[engine])
    if dtype != "auto":
        kinds = [DTYPES[dtype]]
    elif place.type != "cpu":
        kinds = [own]
    else:
        # fp32 arithmetic is never less than the checkpoint says; fp16's is slow on every CPU.
        kinds = [torch.float32, torch.bfloat16] if own == torch.bfloat16 else [torch.float32]
    found = [kernel for kind in kinds for kernel in kernels_for(kind, place)]
    if dtype == "auto" and len(kinds) > 1:  # bf16 without instructions for it
        found = [kernel for kernel in found if not isinstance(kernel, PlainKernel)]
    if own not in SIXTEEN:
        found = [kernel for kernel in found if kernel.name != "fp16-weights"] or found
    return found[0] if len(found) == 1 else fastest(found, read_config(model), rows)


def check_rounding(engine: str, dtype: torch.dtype, device: torch.device) -> None:
    """UsageError where an engine of rounded weights has no kernels."""
    if dtype != torch.bfloat16 or device.type != "cpu":
        raise UsageError(
            f"@quantize {engine} needs bf16 on a CPU, not {str(dtype).removeprefix('torch.')} on {device.type}",
            "use @dtype bf16 @device cpu, or @quantize bnb.int8",
        )


def refusal(engine: str, model: str, reason: Unsupported) -> UsageError:
    """What to tell of an engine that cannot run a model."""
    return UsageError(f"{_flag(engine)} cannot run the model {model!r}: {reason}", "use @engine auto or eager")


def _stored(model: str, dtype: str, kernel: Kernel, adapter: Path | None) -> str:
    """The type to load the network in: the checkpoint's where the kernel packs that without a change, at half the size.

    A merged adapter's sums are rounded to the type they lie in, so fp32 that was asked for is kept.
    """
    own = checkpoint_dtype(model)
    wide = kernel.rows == torch.float32 and own in SIXTEEN
    kept = own if wide and not (dtype == "fp32" and adapter is not None) else kernel.rows
    return next(name for name, kind in DTYPES.items() if kind == kept)


def _flag(engine: str) -> str:
    return f"@quantize {engine}" if engine in BITS else f"@engine {engine}"
