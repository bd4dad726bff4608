"""Moves numbers to a device without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[object] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns numbers of the host as a tensor on a device.

    A copy from pageable memory waits for all earlier work of a GPU; one from pinned memory does
    not.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
