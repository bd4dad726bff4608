"""A backbone's identity: digests of its weights that agree however it is loaded, and differ for a fine-tune."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_cli.assets import RANDOM, model_dir
from medusa_cli.model_files import checkpoint_files, opened

# A sample of a tensor: this many windows of this many numbers, from its beginning to its end.
WINDOWS, WIDTH = 4, 64
# Tensors sampled of a checkpoint: experts may be many thousands.
MAX_TENSORS = 2000


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
    if model.startswith(RANDOM):
        return hashlib.sha256(model.encode()).hexdigest()[:16]
    files = checkpoint_files(model_dir(model))
    return _digest(_samples(files)) if files else None


def quantization_of(network: Any) -> str | None:
    """Returns how bitsandbytes quantizes a network's weights, as `LoadOptions.quantize`; None if it does not."""
    settings = getattr(network.config, "quantization_config", None)
    if getattr(settings, "load_in_4bit", False):
        return "bnb.nf4"
    return "bnb.int8" if getattr(settings, "load_in_8bit", False) else None


def _samples(files: Sequence[Path]) -> Iterator[bytes]:
    """Yields samples of the tensors in a checkpoint's files, reading nothing else."""
    with opened(files, "pt") as slices:
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
