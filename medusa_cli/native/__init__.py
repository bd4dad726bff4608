"""The native library: a decoder's forward pass in C++, behind a plain C interface.

pool.h: threads. formats.h: weights in tiles. simd.h: vectors of an instruction set. amx.h: products by AMX. matmul.h,
attention.h, short_conv.h, delta_net.h, experts.h, ops.h and rows.h: the parts of a layer. kv_cache.h: keys and values.
head.h: logits, embeddings. step.cpp: one pass. structures.def: the structures that Python fills. library.cpp: the C
interface. `library.py` loads the library, `matrix.py` packs matrices, and `pages.py` allocates memory.
"""

from medusa_cli.native.library import (
    Unavailable,
    cpu_count,
    instruction_set,
    instructions,
    is_available,
    library,
    why_unavailable,
)
from medusa_cli.native.matrix import Format, PackedMatrix, RawMatrix, drafting_matrix

__all__ = [
    "Format",
    "PackedMatrix",
    "RawMatrix",
    "Unavailable",
    "cpu_count",
    "drafting_matrix",
    "instruction_set",
    "instructions",
    "is_available",
    "library",
    "why_unavailable",
]
