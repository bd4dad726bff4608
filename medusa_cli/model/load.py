"""What this CPU can do, as far as the choice of kernels needs to know; MEDUSA_CPU=avx2 makes it look smaller."""

import json
import logging
import os
import resource
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from medusa_cli import assets, extras
from medusa_cli.errors import UsageError, UserError, first_line
from medusa_cli.model import random_model as blank
from medusa_cli.model.checks import check_complete, check_config, check_ends, check_finite
from medusa_cli.model.layers import decoder_layers
from medusa_cli.runs.resolve import DEFAULT_LOADING, LoadOptions


def limited() -> bool:
    """Whether the environment asks for a CPU without AVX-512 and bf16, as most desktops are."""
    return os.environ.get("MEDUSA_CPU", "").lower() == "avx2"


def has_bf16() -> bool:
    """Whether the CPU multiplies bf16 numbers: without such instructions bf16 is many times slower than fp32."""
    return not limited() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def split_layers(network: Any, device: str) -> None:
    """Freeze a network and split the matrices of its decoder layers over all processes, layer by layer.

    It may lie on the CPU: no more than one whole layer at a time goes to the device. What is outside the layers, and
    every vector, is whole on each process. From then on all processes must make the same passes, forward and backward.
    UserError for a network without a list of layers.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    base = network.base_model
    layers = decoder_layers(network, "@shard")
    mesh = init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))
    network.requires_grad_(False)
    for layer in layers:
        layer.to(device)
        # Vectors weigh next to nothing, and the identity of a backbone reads its norms.
        fully_shard(layer, mesh=mesh, ignored_params={one for one in layer.parameters() if one.dim() < 2})
    # It splits nothing more, but makes one pass of the layers' own: the next layer is gathered while one runs.
    kind = type(base)
    fully_shard(base, mesh=mesh, ignored_params=set(base.parameters()))
    base.__class__ = kind  # transformers knows by its name which states a model can return
    for tensor in chain(network.parameters(), network.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SYSTEM, _CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken: of the device under CUDA, else of this machine or its container's allowance."""
    if device.type == "cuda":
        # What torch holds for later is free as well.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = 1024 * _numbers(_SYSTEM)["MemAvailable"] if "MemAvailable" in _numbers(_SYSTEM) else whole // 2
    try:
        allowed = int((_CONTAINER / "memory.max").read_text())
        taken = int((_CONTAINER / "memory.current").read_text())
    except (OSError, ValueError):  # there is no container, or none with a limit
        return free
    # Files that were read count as taken until others need the room.
    return max(0, min(free, allowed - taken + _numbers(_CONTAINER / "memory.stat").get("inactive_file", 0)))


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a file of lines "name number ..."; none where there is no such file."""
    lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()] if path.is_file() else []
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def reset_peak(device: torch.device) -> None:
    """Count from what is held now; where the system cannot, peaks stay those since the start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")  # Linux: resets the high-water mark of the resident set
    except OSError:
        return


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak since reset_peak, or since the start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.is_file():
        marks = [line.split() for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")]
        if marks:
            return 1024 * int(marks[0][1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def load_network(
    model: str, options: LoadOptions = DEFAULT_LOADING, *, shard: bool = False, chat_template: str | None = None
) -> tuple[Any, Any]:
    """The unmodified transformers model and its tokenizer, on the device.

    device "auto" takes CUDA where there is one; dtype "auto" is the checkpoint's own, but fp32 on a CPU that has no
    instructions for it. "random:SHAPE" is a model of random weights, for timing. shard: with the layers split over all
    processes (see split_layers). chat_template takes the place of the tokenizer's own. trust_remote_code lets Python
    files of the model's run. Raises UserError for what cannot be found or used.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import find_adapter_config_file
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a second of loading needs no bar, and a quiet command must print none
    # It hints at kernels that a CPU can do without, whenever one of the libraries imports it.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    place = resolve_device(options.device)
    kind = resolve_dtype(options.dtype, model, place, options.trust_remote_code)
    if options.quantised:
        extras.need("quant", f"@quantize {options.quantize}")
    settings: dict[str, Any] = {"dtype": kind, "attn_implementation": "sdpa", "output_loading_info": True}
    settings["use_safetensors"] = True  # a pickle may hold any code
    if options.quantised:
        from transformers import BitsAndBytesConfig

        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=options.quantize == "bnb.nf4",
            load_in_8bit=options.quantize == "bnb.int8",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=kind,
        )
        settings["device_map"] = {"": place}
    if model.startswith(blank.PREFIX):
        if "quantization_config" in settings:
            raise UsageError(f"@model {model!r} is not quantised", "leave @quantize out")
        return _placed(blank.blank_network(model, "cpu" if shard else place, kind), place, shard), None
    source = assets.model_dir(model)
    check_config(source)
    try:
        beside = find_adapter_config_file(source)
    except Exception as reason:  # damaged files raise whatever the code that meets them does
        raise unloadable(model, reason) from reason
    if beside is not None:  # transformers would load it, and the model that it names, by settings that nobody checked
        raise UserError(
            f"@model {model!r} has an adapter beside it (adapter_config.json), which is not the model's own",
            "merge it into the model, or put it into the adapter/ of a run",
        )
    trust_remote_code = options.trust_remote_code
    try:
        network, info = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=trust_remote_code, **settings)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        tokenizer.encode("a")  # some settings are read at the first text alone
    except MemoryError:
        raise
    except Exception as reason:  # as above
        raise unloadable(model, reason) from reason
    check_complete(info, model)
    check_ends((network.generation_config, network.config, tokenizer), model)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if options.quantised:
        _keep_gradients(network)
    else:
        network = _placed(network, place, shard)
    if not shard:  # what is split must be run by all processes at once
        check_finite(network, model)
    return network, tokenizer


def _placed(network: Any, place: str, shard: bool) -> Any:
    """The network on its device, or with shard this process's part of it."""
    if not shard:
        return network.to(place)
    split_layers(network, place)
    return network


def resolve_device(device: str) -> str:
    """The torch device a value of device stands for; UsageError where it is unknown or absent."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as reason:
        raise UsageError(f"@device {device!r} is no device", "use auto, cpu, cuda or cuda:N") from reason
    absent = {"cuda": not torch.cuda.is_available(), "mps": not torch.backends.mps.is_available()}
    if absent.get(place.type):
        name = place.type.upper()
        raise UsageError(f"@device {device!r}: this machine has no usable {name} device", "use @device cpu or auto")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        most = torch.cuda.device_count() - 1
        raise UsageError(f"@device {device!r}: this machine has no such CUDA device", f"use cuda:0 to cuda:{most}")
    return device


def resolve_dtype(dtype: str, model: str, place: str, trust_remote_code: bool = False) -> torch.dtype:
    """The torch dtype a value of dtype stands for; UsageError where it is unknown."""
    if dtype == "auto":
        own = checkpoint_dtype(model, trust_remote_code)
        slow = torch.device(place).type == "cpu" and (own == torch.float16 or not has_bf16())
        return torch.float32 if slow else own
    if dtype not in DTYPES:
        raise UsageError(f"@dtype {dtype!r} is unknown", f"use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def has_own_code(model: str) -> bool:
    """Whether a model's config names Python files beside it."""
    from transformers import PretrainedConfig

    if model.startswith(blank.PREFIX):
        return False
    return "auto_map" in PretrainedConfig.get_config_dict(assets.model_dir(model))[0]


def read_config(model: str, trust_remote_code: bool = False) -> Any:
    """A model's text config, without its weights; UserError where there is none."""
    from transformers import AutoConfig

    if model.startswith(blank.PREFIX):
        return blank.blank_config(model)
    source = assets.model_dir(model)
    check_config(source)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    except Exception as reason:  # as above
        raise unloadable(model, reason) from reason


def checkpoint_dtype(model: str, trust_remote_code: bool = False) -> torch.dtype:
    """The type that a model's weights were saved in; bf16 where that is none of DTYPES, or nothing tells."""
    found = stored_dtype(model, trust_remote_code)
    return next((kind for kind in DTYPES.values() if kind == found), torch.bfloat16)


def stored_dtype(model: str, trust_remote_code: bool = False) -> torch.dtype | None:
    """The type that a model's config names, else that of its safetensors files; None where neither tells."""
    found = getattr(read_config(model, trust_remote_code), "dtype", None)
    if found is None and not model.startswith(blank.PREFIX):
        found = _dtype_in_files(assets.model_dir(model))
    return getattr(torch, found, None) if isinstance(found, str) else found


def _dtype_in_files(source: str) -> torch.dtype | None:
    """The type of the first tensor of floats in a model's safetensors files, which transformers goes by; None without
    such files at hand."""
    from safetensors import SafetensorError, safe_open
    from transformers.utils import cached_file

    def at_hand(name: str) -> str | None:
        return cached_file(source, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)

    path, index = at_hand("model.safetensors"), at_hand("model.safetensors.index.json")
    try:
        if path is None and index is not None:
            path = at_hand(next(iter(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())))
        if path is None:
            return None
        with safe_open(path, framework="pt") as file:
            slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118  (it is no mapping)
            kinds = (one[:0].dtype for one in slices if one.get_shape())
            return next((kind for kind in kinds if kind.is_floating_point), None)
    except (SafetensorError, ValueError, KeyError, AttributeError, StopIteration):  # damage is named by who loads them
        return None


def unloadable(model: str, reason: Exception) -> UserError:
    """What to tell of a model that transformers could not load."""
    if "trust_remote_code" in str(reason):
        return assets.untrusted(model)
    return UserError(
        f"@model {model!r} could not be loaded: {first_line(reason)}",
        f"give a folder with a Hugging Face causal LM, a hub id, or the default model's name {assets.DEFAULT_MODEL!r}",
    )


def _keep_gradients(network: torch.nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights on AVX512-BF16 hosts at the first inference.

    The repacked layers silently lose the gradients of adapters in later training forwards.
    """
    for module in network.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
