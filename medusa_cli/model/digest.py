"""The digest of a model's weights, which drafters and data record so that other weights are refused."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from medusa_cli.files.model_source import ModelSource
from medusa_cli.files.safetensors_files import opened
from medusa_cli.model.weights import gguf_slices

# A tensor's sample has WINDOWS windows of WIDTH numbers, spread from the tensor's beginning to its end.
WINDOWS = 4
WIDTH = 64
# Maximum number of tensors sampled from a checkpoint, which may have many thousands of experts.
MAX_TENSORS = 2000


def weights_of(model: ModelSource) -> str | None:
    """Returns the digest of the weights in a model's files, based on samples of its tensors; None without files.

    A random model's digest is that of its name, because its weights differ at every load.
    """
    if model.kind == "random":
        return hashlib.sha256(model.name.encode()).hexdigest()[:16]
    if model.weights_in_gguf:
        return _digest(_samples(gguf_slices(model)))
    if not model.checkpoint:
        return None
    with opened(model.checkpoint, "pt") as slices:
        return _digest(_samples(slices))


def _samples(slices: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields samples of a checkpoint's tensors, without reading anything else."""
    # inv_freq: rotary embeddings in old files, which are not weights.
    names = sorted(name for name in slices if not name.endswith("inv_freq"))
    for name in names[:: -(-len(names) // MAX_TENSORS)]:
        if shape := slices[name].get_shape():
            yield _sample(slices[name], shape)


def _sample(tensor: Any, shape: Iterable[int]) -> bytes:
    """Returns the bytes of a tensor's shape and of windows along its last axis.

    Floats are converted to bf16, so that the bytes are equal for every float type.
    """
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
    """Returns one digest of all samples. Names, order and repetitions of tensors do not matter."""
    each = {hashlib.sha256(sample).digest() for sample in samples}
    return hashlib.sha256(b"".join(sorted(each))).hexdigest()[:16]
