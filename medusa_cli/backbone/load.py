"""From a name to a backbone: the default model, a local folder or a hub id, in bf16, fp32, 8 or 4 bits."""

from pathlib import Path
from typing import Any

import torch

from medusa_cli import assets
from medusa_cli.backbone import adapter as adapters
from medusa_cli.backbone import blank
from medusa_cli.backbone.model import Backbone
from medusa_cli.backbone.packed import pack_linears
from medusa_cli.backbone.rounded import BITS
from medusa_cli.backbone.sharding import split_layers
from medusa_cli.errors import UsageError, UserError

ENGINES = ("auto", "eager", "fast", *BITS)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def load_backbone(
    model: str = assets.DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    load_in_4bit: bool = False,
    load_in_8bit: bool = False,
    engine: str = "auto",
    adapter: Path | None = None,
    gradients: bool = False,
    shard: bool = False,
    chat_template: str | None = None,
) -> Backbone:
    """Load a causal LM and its tokenizer for decoding, or, with gradients, for what learns beneath its layers.

    device "auto" takes CUDA where there is one; dtype "auto" is bf16. engine "fast" is the lean one over fused weights,
    packed on a CPU; "int8" and "int4" are "fast" over rounded weights; "eager" is transformers' own layers, their
    weights packed where the CPU has kernels for that; "auto" is "fast" on a CPU where it can run the model.
    "random:SHAPE" is a model of random weights, for timing.
    adapter is a folder from joint training: merged into the weights, or beside them where they are quantised.
    Gradients pass through plain weights alone, which the engine "eager" then keeps; packed ones would lose them
    without a word. shard: with the layers split over all processes (see split_layers), which "eager" alone runs.
    chat_template takes the place of the tokenizer's own.
    Raises UserError for what cannot be found or used.
    """
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine!r} is unknown", f"use one of {', '.join(ENGINES)}")
    if shard and engine not in ("auto", "eager"):
        raise UsageError(f"--engine {engine} cannot run layers split by --shard", "leave one of them out")
    network, tokenizer = load_network(
        model,
        device=device,
        dtype=dtype,
        load_in_4bit=load_in_4bit,
        load_in_8bit=load_in_8bit,
        shard=shard,
        chat_template=chat_template,
    )
    if adapter is not None:
        network = adapters.merge(network, adapter, beside=load_in_4bit or load_in_8bit)
    stamp = adapters.digest(adapter) if adapter is not None else None
    backbone = Backbone(network, tokenizer, id=model, engine="eager" if shard else engine, adapter=stamp)
    packs = backbone.engine == "eager" and backbone.device.type == "cpu" and not (gradients or shard)
    if packs and not (load_in_4bit or load_in_8bit):
        pack_linears(network)
    return backbone


def load_network(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    load_in_4bit: bool = False,
    load_in_8bit: bool = False,
    shard: bool = False,
    chat_template: str | None = None,
) -> tuple[Any, Any]:
    """The unmodified transformers model and its tokenizer, on the device; arguments and errors as in load_backbone."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # a second of loading needs no bar, and a quiet command must print none
    place = resolve_device(device)
    kind = resolve_dtype(dtype)
    if load_in_4bit and load_in_8bit:
        raise UsageError("--load-in-4bit and --load-in-8bit exclude each other", "give one of them")
    options: dict[str, Any] = {"dtype": kind, "attn_implementation": "sdpa"}
    if load_in_4bit or load_in_8bit:
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=load_in_4bit,
            load_in_8bit=load_in_8bit,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=kind,
        )
        options["device_map"] = {"": place}
    if model.startswith(blank.PREFIX):
        if "quantization_config" in options:
            raise UsageError(f"--model {model!r} is not quantised", "leave --load-in-4bit and --load-in-8bit out")
        return _placed(blank.blank_network(model, "cpu" if shard else place, kind), place, shard), None
    source = assets.model_dir(model)
    try:
        network = AutoModelForCausalLM.from_pretrained(source, **options)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, SafetensorError) as reason:
        first = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
        raise UserError(
            f"--model {model!r} could not be loaded: {first}",
            "give a folder with a Hugging Face causal LM, a hub id, or the default model's name "
            f"{assets.DEFAULT_MODEL!r}",
        ) from reason
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if load_in_4bit or load_in_8bit:
        _keep_gradients(network)
        return network, tokenizer
    return _placed(network, place, shard), tokenizer


def _placed(network: Any, place: str, shard: bool) -> Any:
    """The network on its device, or with shard this process's part of it."""
    if not shard:
        return network.to(place)
    split_layers(network, place)
    return network


def resolve_device(device: str) -> str:
    """The torch device a --device value stands for; UsageError where it is unknown or absent."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as reason:
        raise UsageError(f"--device {device!r} is no device", "use auto, cpu, cuda or cuda:N") from reason
    absent = {"cuda": not torch.cuda.is_available(), "mps": not torch.backends.mps.is_available()}
    if absent.get(place.type):
        name = place.type.upper()
        raise UsageError(f"--device {device!r}: this machine has no usable {name} device", "use --device cpu or auto")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        most = torch.cuda.device_count() - 1
        raise UsageError(f"--device {device!r}: this machine has no such CUDA device", f"use cuda:0 to cuda:{most}")
    return device


def resolve_dtype(dtype: str) -> torch.dtype:
    """The torch dtype a --dtype value stands for; UsageError where it is unknown."""
    if dtype == "auto":
        return torch.bfloat16
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is unknown", f"use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _keep_gradients(network: torch.nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights on AVX512-BF16 hosts at the first inference.

    The repacked layers silently lose the gradients of adapters in later training forwards.
    """
    for module in network.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
