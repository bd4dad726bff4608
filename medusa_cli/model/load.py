"""Loading and checking of networks and tokenizers, and the choice of their device and number type."""

from functools import partial
from typing import Any

import torch
from torch import nn

from medusa_cli.device import has_bf16, has_cuda
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files import extras
from medusa_cli.files.model_files import check_tokenizer, check_weights, no_chat_template
from medusa_cli.files.model_source import RANDOM, ModelSource
from medusa_cli.files.quiet import without_progress_bars
from medusa_cli.model.backbone import LazyNetwork, auto_class, text_config, untie_head
from medusa_cli.model.checks import (
    check_architecture,
    check_files,
    check_network,
    refuse_unsupported,
    unloadable,
)
from medusa_cli.model.distributed import split_layers
from medusa_cli.runs.load_options import DEFAULT_LOADING, LoadOptions

# Number types by safetensors' names.
FLOATS = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "F64": torch.float64}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}

# Config fields of models with random weights, and the fields' values by shape. Such models serve to time models that
# cannot be downloaded.
FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
SHAPES = {
    "0.36b": (49152, 960, 2560, 32, 15, 5, 4096),  # SmolLM2-360M
    "0.5b": (151936, 896, 4864, 24, 14, 2, 4096),  # Qwen2.5-0.5B
    "1b": (128256, 2048, 8192, 16, 32, 8, 4096),  # Llama-3.2-1B
    "1.7b": (49152, 2048, 8192, 24, 32, 32, 4096),  # SmolLM2-1.7B
    "3b": (128256, 3072, 8192, 28, 24, 8, 4096),  # Llama-3.2-3B
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32, 4096),
}


@without_progress_bars()
def load_network(
    model: ModelSource,
    options: LoadOptions = DEFAULT_LOADING,
    *,
    shard: bool = False,
    chat_template: str | None = None,
) -> tuple[Any, Any]:
    """Returns the unmodified transformers model, on the device, and its tokenizer.

    The device "auto" is CUDA if available. The dtype "auto" is that of the checkpoint, or fp32 on a CPU that has no
    instructions for that type. A model "random:SHAPE" has random weights and no tokenizer. shard: see split_layers.
    chat_template: replaces the tokenizer's template. Raises UserError for a model that is missing, damaged or unusable.
    """
    device = resolve_device(options.device)
    use_device(device)
    if options.quantized:
        extras.need_extra("quant", f"@quantize {options.quantize}")
        if model.kind in ("gguf", "random"):
            other = "a GGUF file" if model.kind == "gguf" else "random weights"
            fault = f"@quantize {options.quantize} cannot quantize {other}"
            raise UsageError(fault, "leave it out")
    trusted = options.trust_remote_code
    dtype = resolve_dtype(options.dtype, model, device, trusted)
    if model.kind == "random":
        return _random_network(model, dtype, device, shard), None
    config = read_config(model, trusted, whole=True)
    if trusted and has_own_code(model):
        refuse_unsupported(config)
    else:
        check_architecture(config, model)
    check_tokenizer(model)
    check_weights(model)
    try:
        _refuse_adapter(model)
        missing: list[str] = []
        if model.weights_in_gguf:
            network = _network_of_gguf(model, config, dtype)
        else:
            network, missing = _network_of_checkpoint(model, config, dtype, device, options)
        tokenizer = _load_tokenizer(model.folder, chat_template, trusted)
    except (UserError, MemoryError):
        raise
    except Exception as reason:  # damaged files may raise any exception
        raise unloadable(model.name, reason) from reason
    check_files(missing, (network.generation_config, network.config, tokenizer), model.name)
    if shard:  # all processes must run a split network together, so it is not checked
        split_layers(network, device)
        return network, tokenizer
    if options.quantized:
        _keep_gradients(network)
    else:
        network = network.to(device)
    check_network(network, model.name)
    return network, tokenizer


def _random_network(model: ModelSource, dtype: torch.dtype, device: str, shard: bool) -> Any:
    """Returns a network with random weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("cpu" if shard else device):
        network = AutoModelForCausalLM.from_config(
            random_config(model.name), dtype=dtype, trust_remote_code=False
        )
    if shard:
        split_layers(network, device)
    return network


def _network_of_checkpoint(
    model: ModelSource, config: Any, dtype: torch.dtype, device: str, options: LoadOptions
) -> tuple[Any, list[str]]:
    """Returns transformers' network with the weights of a checkpoint, and the names of missing weights."""
    settings: dict[str, Any] = {}
    if options.quantized:
        from transformers import BitsAndBytesConfig

        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=options.quantize == "bnb.nf4",
            load_in_8bit=options.quantize == "bnb.int8",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
        )
        settings["device_map"] = {"": device}
    # Weights are read only from safetensors, because a pickle may contain any code.
    network, info = auto_class(config).from_pretrained(
        model.folder,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=options.trust_remote_code,
        output_loading_info=True,
        **settings,
    )
    return network, sorted(info["missing_keys"])


def lazy_network(model: ModelSource) -> LazyNetwork:
    """Returns a model's network without weights, to be built later; raises UserError for an unusable model."""
    from transformers import GenerationConfig

    config = read_config(model, whole=True)
    refuse_unsupported(config)
    check_weights(model)
    try:
        if model.file("generation_config.json") is not None:
            generation_config = GenerationConfig.from_pretrained(model.folder)
        else:
            generation_config = GenerationConfig.from_model_config(config)
    except Exception as reason:  # damaged files may raise any exception
        raise unloadable(model.name, reason) from reason
    return LazyNetwork(config, generation_config, partial(_network_of_files, config, model))


def _network_of_files(config: Any, model: ModelSource) -> Any:
    """Returns a model's network without weights; its lm_head is tied only if it is tied in the files."""
    from medusa_cli.model.weights import has_own_head

    network = check_architecture(config, model)
    if has_own_head(model, network):
        untie_head(network)
    return network


def load_tokenizer(
    model: ModelSource, lazy: LazyNetwork, chat_template: str | None, chat: bool
) -> Any:
    """Returns the tokenizer of a model; raises UserError if it, or a file that it needs, is missing or unusable."""
    check_tokenizer(model)
    try:
        _refuse_adapter(model)
        tokenizer = _load_tokenizer(model.folder, chat_template, False)
    except (UserError, MemoryError):
        raise
    except Exception as reason:  # damaged files may raise any exception
        raise unloadable(model.name, reason) from reason
    check_files([], (lazy.generation_config, lazy.config, tokenizer), model.name)
    if chat and not tokenizer.chat_template:
        raise no_chat_template(model.name)
    return tokenizer


def _load_tokenizer(source: str, chat_template: str | None, trusted: bool) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trusted)
    tokenizer.encode("a")  # some settings are read only with the first text
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _refuse_adapter(model: ModelSource) -> None:
    """Raises UserError for an adapter next to a model, because transformers would load the adapter's model instead."""
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(model.folder):
        fault = f"@model {model.name!r} has an adapter next to it (adapter_config.json), which is not the model's own"
        raise UserError(fault, "merge it into the model, or put it into the adapter/ of a run")


def _network_of_gguf(model: ModelSource, config: Any, dtype: torch.dtype) -> Any:
    """Returns transformers' network with a GGUF file's weights, dequantized exactly to fp32, then in `dtype`."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig

    from medusa_cli.files.gguf_names import names_of
    from medusa_cli.model.weights import GgufWeights

    with init_empty_weights(include_buffers=False):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    network.tie_weights()  # accelerate's context gives each tied layer a weight
    weights = GgufWeights(model, names_of(model.header, network))
    state = {name: values.to(dtype) for name, values in weights.items()}
    network.load_state_dict(state, strict=False, assign=True)
    network.tie_weights()
    if model.file("generation_config.json") is not None:
        network.generation_config = GenerationConfig.from_pretrained(model.folder)
    return network.eval()


def _keep_gradients(network: nn.Module) -> None:
    """Stops bitsandbytes from repacking 4-bit weights on AVX512-BF16 hosts at the first inference.

    The repacked layers silently lose the gradients of adapters in later training passes.
    """
    for module in network.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def resolve_device(device: str) -> str:
    """Returns the torch device for a setting; raises UsageError if this machine lacks it."""
    if device == "auto":
        return "cuda" if has_cuda() else "cpu"
    place = torch.device(device)
    absent = {"cuda": not torch.cuda.is_available(), "mps": not torch.backends.mps.is_available()}
    if absent.get(place.type):
        name = place.type.upper()
        fault = f"@device {device!r}: this machine has no usable {name} device"
        raise UsageError(fault, "use @device cpu or auto")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        fault = f"@device {device!r}: this machine has no such CUDA device"
        raise UsageError(fault, f"use cuda:0 to cuda:{last}")
    return device


def use_device(device: str) -> None:
    """Prepares torch and Triton for work on a device, if it is a GPU."""
    place = torch.device(device)
    if place.type == "cuda":
        # cuDNN plans attention anew for every length of a text; each plan takes 70 ms on an H100.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Triton starts kernels on the current GPU, wherever their tensors are.
        if place.index is not None:
            torch.cuda.set_device(place)


def name_of_dtype(dtype: torch.dtype) -> str:
    """Returns the name of a number type as given to `--dtype`."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def resolve_dtype(
    dtype: str, model: ModelSource, device: str, trust_remote_code: bool = False
) -> torch.dtype:
    """Returns the torch dtype for the setting `dtype`."""
    if dtype != "auto":
        return DTYPES[dtype]
    own = checkpoint_dtype(model, trust_remote_code)
    slow = torch.device(device).type == "cpu" and (own == torch.float16 or not has_bf16())
    return torch.float32 if slow else own


def has_own_code(model: ModelSource) -> bool:
    """Returns True if a model's config refers to Python files that come with the model."""
    from transformers import PretrainedConfig

    return (
        model.kind != "random" and "auto_map" in PretrainedConfig.get_config_dict(model.folder)[0]
    )


def read_config(model: ModelSource, trust_remote_code: bool = False, whole: bool = False) -> Any:
    """Returns a model's text config or, with `whole`, its whole config; raises UserError for an unusable config."""
    from transformers import AutoConfig

    if model.kind == "random":
        return random_config(model.name)
    # This reads the fields, to raise UserError for impossible values before transformers reads them.
    model.fields  # noqa: B018
    try:
        config = AutoConfig.from_pretrained(model.folder, trust_remote_code=trust_remote_code)
        _agree_on_tied_head(config)
        return config if whole else text_config(config)
    except Exception as reason:  # damaged files may raise any exception
        raise unloadable(model.name, reason) from reason


def _agree_on_tied_head(config: Any) -> None:
    """Marks the lm_head as tied in both a whole config and its text part, if one of them says so.

    Some classes of transformers read the whole config, others its text part. An lm_head in the
    files is used in any case, as in transformers.
    """
    parts = (config, config.get_text_config())
    if any(getattr(part, "tie_word_embeddings", False) for part in parts):
        for part in parts:
            part.tie_word_embeddings = True


def checkpoint_dtype(model: ModelSource, trust_remote_code: bool = False) -> torch.dtype:
    """Returns the number type of a model's saved weights; bf16 if it is unknown or not in DTYPES."""
    stored = stored_dtype(model, trust_remote_code)
    return next((dtype for dtype in DTYPES.values() if dtype == stored), torch.bfloat16)


def stored_dtype(model: ModelSource, trust_remote_code: bool = False) -> torch.dtype | None:
    """Returns the number type in a model's config, else that of its safetensors files, else None."""
    dtype = getattr(read_config(model, trust_remote_code), "dtype", None)
    if dtype is None and model.kind != "random":
        return next((FLOATS[kind] for _, kind in model.tensors.values() if kind in FLOATS), None)
    return getattr(torch, dtype, None) if isinstance(dtype, str) else dtype


def random_config(name: str) -> Any:
    """Returns the Llama config for "random:SHAPE"; raises UsageError for an unknown shape."""
    from transformers import LlamaConfig

    shape = name.removeprefix(RANDOM)
    if shape not in SHAPES:
        fault = f"@model {name!r}: the shape {shape!r} is unknown"
        raise UsageError(fault, f"use {', '.join(SHAPES)}")
    return LlamaConfig(**dict(zip(FIELDS, SHAPES[shape], strict=True)), dtype="bfloat16")
