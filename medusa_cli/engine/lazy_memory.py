"""Tensors of zeros whose pages take memory only from the time when they are written, and can be given back."""

import ctypes
import math
import mmap
import sys

import torch
from torch import Tensor

# A mapping larger than the free memory is no fault, as most of its pages are never written.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


def lazy_zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns zeros; raises MemoryError if the system refuses the address space."""
    size = dtype.itemsize * math.prod(shape)
    if not size:
        return torch.zeros(shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as reason:
        raise MemoryError(f"no address space of {size / 1e9:.1f} GB") from reason
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A huge page takes 2 MB for the first row of a head.
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def drop_pages(part: Tensor) -> None:
    """Gives the memory of a contiguous part of `lazy_zeros` back to the system; its numbers may become 0."""
    # On other systems, MADV_DONTNEED keeps the memory.
    advice = mmap.MADV_DONTNEED if sys.platform == "linux" else mmap.MADV_FREE
    page = mmap.PAGESIZE
    start = -(-part.data_ptr() // page) * page
    end = (part.data_ptr() + part.nbytes) // page * page
    if end > start:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


_libc = ctypes.CDLL(None)
