"""The compilation of the native library when the package is built or installed. This module needs only setuptools.

The compiler is $CXX, else the system's, else that of the `ziglang` package, which `backend.py` requires if there is no
other compiler. Without a compiler, the package is built without the library and runs on the eager engine.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCES = Path(__file__).parent
LIBRARY = "libmedusa.so"
# Compilers must not fuse multiplications with additions: the bits of a row would depend on which ones they fuse.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-g0", "-Wall"]
# Without asserts. `make sanitize` turns them on again with -UNDEBUG.
FLAGS += ["-DNDEBUG"]
# GCC 12 warns that its own AVX-512 header reads uninitialized values.
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
COMMON = ("pool", "formats", "library")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512VNNI = [*AVX512, "-mavx512vnni"]
AVXVNNI = [*AVX2, "-mavxvnni"]
AMX = [*AVX512VNNI, "-mamx-tile", "-mamx-int8"]
# step.cpp is compiled once per instruction set.
X86 = {"avx2": AVX2, "avx512": AVX512, "avx512vnni": AVX512VNNI}
RECENT = {"avxvnni": AVXVNNI, "amx": AMX}
# Clang defines the macros of dot products on every Mac, so the set is selected by a macro of its own.
# zig knows only the second form of the flag, and GCC's intrinsics need the first form.
NEON = (["-march=armv8.2-a+dotprod", "-DMEDUSA_NEON"], ["-mcpu=generic+dotprod", "-DMEDUSA_NEON"])


def compiler() -> list[str] | None:
    """Returns the command of a C++ compiler, or None if there is no compiler."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if (path := shutil.which(name)) and _runs(path):
            return [path]
    # Without -mcpu, zig compiles for the CPU of this machine, and the wheel would fail on older
    # CPUs.
    zig = [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]
    return zig if find_spec("ziglang") else None


def _runs(path: str) -> bool:
    """Returns True if a compiler runs; on a Mac without developer tools, c++ only offers to install them."""
    return subprocess.run([path, "--version"], capture_output=True).returncode == 0


# Code that a compiler must accept to be used for a group of instruction sets.
X86_PROBE = """#include <immintrin.h>
__m256i product(__m256i a, __m256i b) { return _mm256_maddubs_epi16(a, b); }
"""
# GCC before 11 lacks the options of both recent sets, and binutils before 2.36 lacks an instruction.
RECENT_PROBE = """#include <immintrin.h>
__m256i product(__m256i a, __m256i b) {
  asm volatile("tilezero %tmm0");
  return _mm256_dpbusd_avx_epi32(a, a, b);
}
"""
NEON_PROBE = """#include <arm_neon.h>
int32x4_t product(int32x4_t a, int8x16_t b) { return vdotq_laneq_s32(a, b, b, 3); }
"""


def instructions_of(command: list[str]) -> dict[str, list[str]]:
    """Returns the instruction sets for which a compiler makes code, with their flags."""
    sets = dict[str, list[str]]()
    if _compiles(command, X86_PROBE, AVX512VNNI):
        sets |= X86
        if _compiles(command, RECENT_PROBE, [*AVXVNNI, *AMX]):
            sets |= RECENT
        return sets
    neon = next((flags for flags in NEON if _compiles(command, NEON_PROBE, flags)), None)
    return sets if neon is None else {"neon": neon}


def _compiles(command: list[str], text: str, flags: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(text)
        words = [*command, *flags, "-c", str(source), "-o", str(Path(folder) / "probe.o")]
        return subprocess.run(words, capture_output=True).returncode == 0


def compile_library(target: Path, flags: list[str] | None = None) -> None:
    """Compiles the library into `target`, with additional compiler flags.

    Raises CalledProcessError if the compiler fails, and FileNotFoundError if there is no compiler.
    """
    command = compiler()
    if command is None:
        raise FileNotFoundError("no C++ compiler")
    options = [*FLAGS, *QUIET, *(flags or [])]
    with tempfile.TemporaryDirectory() as folder:
        isas = instructions_of(command)
        options += [f"-DMEDUSA_HAS_{isa.upper()}" for isa in isas]
        # The longest jobs come first.
        jobs = [("step", "generic", ["-DISA=generic"])]
        jobs += [("step", isa, [f"-DISA={isa}", *named]) for isa, named in isas.items()]
        jobs += [(name, name, list[str]()) for name in COMMON]

        def compile_one(job: tuple[str, str, list[str]]) -> str:
            source, name, own = job
            output = str(Path(folder) / f"{name}.o")
            subprocess.run(
                [*command, *options, *own, "-c", str(SOURCES / f"{source}.cpp"), "-o", output],
                check=True,
            )
            return output

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, jobs))
        part = target.with_name(target.name + ".part")
        subprocess.run(
            [*command, *(flags or []), "-shared", "-s", *objects, "-o", str(part), "-lpthread"],
            check=True,
        )
        part.replace(target)


def compile_selftest(target: Path, library: Path, flags: list[str] | None = None) -> None:
    """Compiles the program that compares the instruction sets of a library (selftest.cpp)."""
    command = compiler()
    if command is None:
        raise FileNotFoundError("no C++ compiler")
    words = [*command, *FLAGS, *(flags or []), str(SOURCES / "selftest.cpp"), str(library)]
    where = f"-Wl,-rpath,{library.resolve().parent}"
    subprocess.run([*words, where, "-o", str(target), "-lpthread"], check=True)


class BuildPy(build_py):
    """Copies the package and compiles the library into the copy, or in place for an editable install."""

    def run(self) -> None:
        super().run()
        folder = SOURCES if self.editable_mode else Path(self.build_lib) / "medusa_cli" / "native"
        try:
            compile_library(folder / LIBRARY)
        except (FileNotFoundError, subprocess.CalledProcessError) as reason:
            print(f"medusa-cli: the native library was not compiled: {reason}", file=sys.stderr)


class BdistWheel(bdist_wheel):
    """Makes a wheel for any Python 3 on one platform."""

    def finalize_options(self) -> None:
        # The files are for one platform, so they belong in the root of the wheel.
        self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform_tag = super().get_tag()
        return "py3", "none", os.environ.get("MEDUSA_PLATFORM", platform_tag)


if __name__ == "__main__":
    # python build.py [TARGET] [FLAG ..], or python build.py selftest TARGET LIBRARY [FLAG ..]
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    flags = [word for word in sys.argv[1:] if word.startswith("-")]
    if words[:1] == ["selftest"]:
        compile_selftest(Path(words[1]), Path(words[2]), flags)
    else:
        compile_library(Path(words[0]) if words else SOURCES / LIBRARY, flags)
