"""Runs passes while the system refuses the native library memory; `refusing_library` builds what does so.

Run with LD_PRELOAD=LIBRARY, prints how many passes were refused, and whether the last one is right.
"""

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

from medusa_cli.native.build import compiler

SOURCE = """
#include <atomic>
#include <cstdlib>
#include <new>
static std::atomic<long> left{-1};
extern "C" void refuse_after(long count) { left = count; }
void* operator new(std::size_t size) {
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  return std::malloc(size ? size : 1);
}
void* operator new[](std::size_t size) { return operator new(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
"""


def refusing_library(folder: Path) -> Path:
    """Returns a library whose `refuse_after(n)` lets the n-th next allocation in C++ fail."""
    source, target = folder / "refusing.cpp", folder / "refusing.so"
    source.write_text(SOURCE)
    command = compiler()
    assert command is not None
    subprocess.run([*command, "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    return target


def main(path: str) -> None:
    import torch

    from medusa_cli.native import library
    from tests.helpers import forward
    from tests.test_native import backbone_of, text_of

    refuse_after = ctypes.CDLL(path).refuse_after
    native = library()
    native.threads(2)
    backbone, text = backbone_of(), text_of(300)

    def refusing(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            refuse_after(1)
            try:
                return function(*arguments)
            finally:
                refuse_after(-1)

        return staticmethod(call)

    # Only these calls are refused memory, not torch.
    calls = {name: getattr(native, name) for name in ("embed", "run", "logits")}
    for name, call in calls.items():
        setattr(type(native), name, refusing(call))
    refused = 0
    while True:
        try:
            logits = forward(backbone, text).logits.clone()
        except MemoryError:
            refused += 1
        else:
            break
    for name, call in calls.items():
        setattr(type(native), name, staticmethod(call))
    print(refused, torch.equal(logits, forward(backbone, text).logits))


if __name__ == "__main__":
    main(sys.argv[1])
