"""Memory in pages: huge pages for weights, and zeros that take memory only once they are written."""

import ctypes
import math
import mmap
import sys
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]

HUGE_PAGE = 2 << 20
HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")
# A mapping may be larger than the free memory, as most of its pages are never written.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


def aligned(size: int) -> Bytes:
    """Returns `size` zero bytes that begin at a multiple of 64 bytes, on huge pages if the system has them.

    With small pages, looking up addresses takes a tenth of the time of a pass.
    """
    if size < HUGE_PAGE or not HAS_HUGE_PAGES:
        return _from_multiple(np.zeros(size + 64, np.uint8), 64, size)
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel may have been built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _from_multiple(np.frombuffer(memory, np.uint8), HUGE_PAGE, size)


def _from_multiple(memory: Bytes, multiple: int, size: int) -> Bytes:
    start = -memory.ctypes.data % multiple
    return memory[start : start + size]


def lazy_zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns zeros that take memory only once they are written; raises MemoryError if address space is refused."""
    size = dtype.itemsize * math.prod(shape)
    if not size:
        return torch.zeros(shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as reason:
        raise MemoryError(f"no address space of {size / 1e9:.1f} GB") from reason
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # With huge pages, the first row of each head would take 2 MB.
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def drop_pages(part: Tensor) -> None:
    """Gives the memory of a contiguous part of `lazy_zeros` back to the system; the part's numbers may become 0."""
    # On systems other than Linux, MADV_DONTNEED keeps the memory.
    advice = mmap.MADV_DONTNEED if sys.platform == "linux" else mmap.MADV_FREE
    page = mmap.PAGESIZE
    start = -(-part.data_ptr() // page) * page
    end = (part.data_ptr() + part.nbytes) // page * page
    if end > start:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


_libc = ctypes.CDLL(None)
