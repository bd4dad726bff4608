"""A backbone's identity: digests of its weights that agree however it is loaded, and differ for a fine-tune."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta

from medusa_cli import assets
from medusa_cli.model.random_model import PREFIX
from medusa_cli.runs.io import read_as

# A sample of a tensor: this many windows of this many numbers, from its beginning to its end.
WINDOWS, WIDTH = 4, 64
# Tensors sampled of a checkpoint: experts may be many thousands.
MAX_TENSORS = 2000
FILES = ("model.safetensors", "model.safetensors.index.json")


def identity_of(network: Any, *, id: str, weights: str | None, adapter: str | None) -> dict[str, Any]:
    """Returns a network's identity: id, architecture, sizes, rounding, digests of its files' weights and adapter."""
    text = network.config.get_text_config()
    identity = {
        "id": id,
        "architecture": text.model_type,
        "hidden_size": text.hidden_size,
        "vocab_size": network.get_input_embeddings().weight.shape[0],
        "layers": text.num_hidden_layers,
        "weights": weights,
        "rounding": quantization_of(network),
        "adapter": adapter,
    }
    return {key: value for key, value in identity.items() if value is not None}


def weights_of(model: str) -> str | None:
    """Returns the digest of the weights in a model's files, from samples of its tensors; None without files.

    A random model's digest is that of its name: its weights differ at every load.
    """
    if model.startswith(PREFIX):
        return hashlib.sha256(model.encode()).hexdigest()[:16]
    files = checkpoint_files(assets.model_dir(model))
    return _digest(_samples(files)) if files else None


def quantization_of(network: Any) -> str | None:
    """Returns how bitsandbytes quantizes a network's weights, as `LoadOptions.quantize`; None if it does not."""
    settings = getattr(network.config, "quantization_config", None)
    if getattr(settings, "load_in_4bit", False):
        return "bnb.nf4"
    return "bnb.int8" if getattr(settings, "load_in_8bit", False) else None


@dataclass(frozen=True)
class Shards:
    """The index of a checkpoint in several files."""

    weight_map: dict[str, Annotated[str, Meta(min_length=1, max_length=255)]]


def checkpoint_files(source: str) -> list[Path]:
    """Returns the safetensors files of a checkpoint in a folder or the hub's cache; none if some are missing."""
    for name in FILES:
        path = _file(source, name)
        if path is None:
            continue
        if path.suffix != ".json":
            return [path]
        names = read_as(path, Shards, "the model's index", "get the model again").weight_map.values()
        parts = [_file(source, name) for name in sorted(set(names))]
        return [] if None in parts else [part for part in parts if part is not None]
    return []


def _file(source: str, name: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source, name)
    return Path(path) if isinstance(path, str) else None


def tensors_of(model: str) -> dict[str, tuple[list[int], torch.dtype]]:
    """Returns shape and type of each tensor in a model's files, from their headers; none if they cannot be read."""
    from safetensors import SafetensorError

    files = checkpoint_files(assets.model_dir(model))
    try:
        with _slices(files) as slices:
            return {name: (shape, part[:0].dtype) for name, part in slices.items() if (shape := part.get_shape())}
    except SafetensorError:  # loading will name the damage
        return {}


@contextmanager
def _slices(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Opens a checkpoint's files; yields their tensors by name, of which only what is sliced is read."""
    from safetensors import safe_open

    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path, framework="pt")) for path in files]
        yield {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118  (no mapping)


def _samples(files: Sequence[Path]) -> Iterator[bytes]:
    """Yields samples of the tensors in a checkpoint's files, reading nothing else."""
    with _slices(files) as slices:
        names = sorted(name for name in slices if not name.endswith("inv_freq"))  # old rotary tables: no weights
        for name in names[:: -(-len(names) // MAX_TENSORS)]:
            if shape := slices[name].get_shape():
                yield _sample(slices[name], shape)


def _sample(tensor: Any, shape: Iterable[int]) -> bytes:
    """Returns windows along a tensor's last axis, floats in bf16, with its shape: equal for every float type."""
    *leading, last = shape
    windows = []
    for number in range(WINDOWS):
        along = number / (WINDOWS - 1)
        first = int(max(0, last - WIDTH) * along)
        starts = [int((size - 1) * along) for size in leading]
        place = (*(slice(start, start + 1) for start in starts), slice(first, first + WIDTH))
        windows.append(tensor[place].reshape(-1))
    sample = torch.cat(windows).cpu()
    sample = sample.to(torch.bfloat16) if sample.is_floating_point() else sample
    return f"{[*leading, last]}".encode() + sample.contiguous().view(torch.uint8).numpy().tobytes()


def _digest(samples: Iterable[bytes]) -> str:
    """Returns one digest of all samples, whatever the tensors' names, order and ties are."""
    each = {hashlib.sha256(sample).digest() for sample in samples}
    return hashlib.sha256(b"".join(sorted(each))).hexdigest()[:16]
