"""What names a backbone: digests of its weights that agree however it is loaded, and tell a fine-tune from it."""

import hashlib
import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_cli import assets
from medusa_cli.model import random_model as blank

# What of each tensor is looked at: so many windows of so many numbers, from its beginning to its end.
WINDOWS, WIDTH = 4, 64
# Of the many thousands of tensors that experts may be, as many as this are enough, and take no seconds.
MOST = 2000
# In the order in which transformers looks for them.
FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def identity_of(network: Any, *, id: str, weights: str | None, adapter: str | None) -> dict[str, Any]:
    """What names a network in a run: id, architecture, widths, digests of its weights, rounding, adapter.

    weights: the digest of the files it was loaded from; None: it is read from the weights in memory. The fingerprint
    is what runs from before there was such a digest know: that of some norms and embeddings, which a fine-tune may
    share. rounding: how bitsandbytes rounds the weights, where it does.
    """
    text = network.config.get_text_config()
    found = {
        "id": id,
        "architecture": text.model_type,
        "hidden_size": text.hidden_size,
        "vocab_size": network.get_input_embeddings().weight.shape[0],
        "layers": text.num_hidden_layers,
        "fingerprint": _fingerprint(network),
        "weights": weights or _of_network(network),
        "rounding": rounding_of(network),
        "adapter": adapter,
    }
    return {key: value for key, value in found.items() if value is not None}


def weights_of(model: str) -> str | None:
    """The digest of a model by the name it is loaded under, from samples of every tensor in its checkpoint's files.

    A random model is what its name says: its weights are others at every load. None where there are no files to read.
    """
    if model.startswith(blank.PREFIX):
        return hashlib.sha256(model.encode()).hexdigest()[:16]
    files = _files(assets.model_dir(model))
    try:
        return _digest(_samples(files)) if files else None
    except (pickle.UnpicklingError, RuntimeError, ValueError):  # an old kind of file, which cannot be read in parts
        return None


def rounding_of(network: Any) -> str | None:
    """Returns how bitsandbytes quantizes a network's weights, as `LoadOptions.quantize`; None if it does not."""
    settings = getattr(network.config, "quantization_config", None)
    if getattr(settings, "load_in_4bit", False):
        return "bnb.nf4"
    return "bnb.int8" if getattr(settings, "load_in_8bit", False) else None


def _fingerprint(network: Any) -> str:
    digest = hashlib.sha256()
    norms = [p for name, p in network.named_parameters() if "norm" in name and p.dim() == 1]
    for weight in (*norms[-3:], network.get_input_embeddings().weight[:16]):
        digest.update(weight.detach().to(torch.bfloat16).float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _of_network(network: Any) -> str | None:
    """The digest from the weights in memory, without an adapter's; None for quantised ones, which are not its own."""
    if getattr(network.config, "quantization_config", None) is not None:
        return None
    weights = (weight.detach() for name, weight in network.named_parameters() if "lora_" not in name)
    # Of layers split over processes all take part in making each tensor whole.
    whole = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in weights)
    return _digest(_sample(weight, weight.shape) for weight in whole if weight.dim())


def _files(source: str) -> list[Path]:
    """The files of a checkpoint in a folder, or of a hub id in the cache; none where some are missing."""
    for name in FILES:
        path = _file(source, name)
        if path is None:
            continue
        if path.suffix != ".json":
            return [path]
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        found = [one for one in (_file(source, part) for part in names) if one is not None]
        return found if len(found) == len(names) else []
    return []


def _file(source: str, name: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source, name)
    return Path(found) if isinstance(found, str) else None


def _samples(files: Sequence[Path]) -> Iterator[bytes]:
    """Samples of the tensors in a checkpoint's files, of which no more is read."""
    with ExitStack() as stack:
        tensors = {name: one for path in files for name, one in _tensors(path, stack).items()}
        names = sorted(name for name in tensors if not name.endswith("inv_freq"))  # old rotary tables: no weights
        for name in names[:: -(-len(names) // MOST)]:
            one = tensors[name]
            shape = one.shape if isinstance(one, Tensor) else one.get_shape()
            if len(shape):
                yield _sample(one, shape)


def _tensors(path: Path, stack: ExitStack) -> dict[str, Any]:
    """The tensors of a file by name, or the slices of it that they are; open as long as the stack."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        file = stack.enter_context(safe_open(path, framework="pt"))
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    return dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))


def _sample(tensor: Any, shape: Iterable[int]) -> bytes:
    """Windows along the last axis of a tensor, or of the slice of a file that is one, with its shape; floats in bf16.

    A tensor and its copy in another float type, or in another file, give the same.
    """
    *leading, last = shape
    windows = []
    for number in range(WINDOWS):
        along = number / (WINDOWS - 1)
        first = int(max(0, last - WIDTH) * along)
        starts = [int((size - 1) * along) for size in leading]
        place = (*(slice(start, start + 1) for start in starts), slice(first, first + WIDTH))
        windows.append(tensor[place].reshape(-1))
    found = torch.cat(windows).cpu()
    found = found.to(torch.bfloat16) if found.is_floating_point() else found
    return f"{[*leading, last]}".encode() + found.contiguous().view(torch.uint8).numpy().tobytes()


def _digest(samples: Iterable[bytes]) -> str:
    """One digest of all samples, whatever the tensors are called, in which order they come, and which are tied."""
    each = {hashlib.sha256(one).digest() for one in samples}
    return hashlib.sha256(b"".join(sorted(each))).hexdigest()[:16]
