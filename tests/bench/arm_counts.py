"""Prints the instructions of NEON and of plain C++ per unit of weights, and NEON's cycles: tables of docs/engines.md.

They are counted under emulation, in the library that `make test-arm` compiles. $LLVM is the ending of LLVM's programs,
such as -22. With it, llvm-mca calculates the cycles of some cores for these instructions, with all data in the first
cache, and the time of a pass over the default model's matrices.
"""

import math
import os
import re
import subprocess
from pathlib import Path

from medusa_cli.files import catalogue, fetch
from medusa_cli.files.gguf_header import read_header

FORMATS = {"Q4_K": 8, "Q5_0": 5, "Q6_K": 10, "Q8_0": 7}
ROWS = (1, 4, 8)
# A unit is 32 inputs in 16 channels.
CHANNELS, INPUTS = 16, 32
N, K = 512, 512
# The cycles of the rounding of rows are left out: they are those of two sizes that differ by some channels.
FEW, MANY = 32, 64
# Each core's name in LLVM and its clock in GHz: Graviton 2, 3 and 4, and an Apple M1.
CORES = {
    "N1": ("neoverse-n1", 2.5),
    "V1": ("neoverse-v1", 2.6),
    "V2": ("neoverse-v2", 2.8),
    "M1": ("apple-m1", 3.2),
}
THREADS = 4
HERE = Path(__file__).parent / "arm"
NATIVE = Path(__file__).parents[2] / "medusa_cli" / "native"
BUILD = Path("build/arm")


def main() -> None:
    """Compiles the plugin and the program, and prints the tables."""
    compiler = os.environ.get("ARM_CXX", "aarch64-linux-gnu-g++").split()
    library = BUILD / "libmedusa.so"
    words = ["-std=c++17", "-O2", "-DNDEBUG", f"-I{NATIVE}", HERE / "multiply.cpp", library]
    place = f"-Wl,-rpath,{BUILD.resolve()}"
    subprocess.run([*compiler, *words, place, "-o", BUILD / "multiply"], check=True)
    plugin = [HERE / "plugin.c", "-o", BUILD / "plugin.so"]
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *plugin], check=True)

    print_counts()
    if llvm := os.environ.get("LLVM"):
        cycles = {
            name: [cycles_per_unit(llvm, number, rows) for rows in ROWS]
            for name, number in FORMATS.items()
        }
        print_cycles(cycles)
        print_times(cycles, units_of(fetch.named_file(catalogue.MODELS[catalogue.DEFAULT_MODEL])))


def print_counts() -> None:
    """Prints the instructions per unit of NEON / plain C++, with the rounding of rows, by weights and rows."""
    units = N // CHANNELS * K // INPUTS
    shares = list[float]()
    print_head("weights")
    for name, number in FORMATS.items():
        cells = []
        for rows in ROWS:
            neon, plain = (
                len(executed(kind, number, N, rows)) / units for kind in ("neon", "generic")
            )
            shares.append(neon / plain)
            cells.append(f"{neon:,.0f} / {plain:,.0f}")
        print_row(name, *cells)
    print(f"NEON takes {min(shares):.2f} to {max(shares):.2f} of the instructions of plain C++")


def print_cycles(cycles: dict[str, list[dict[str, float]]]) -> None:
    """Prints the calculated cycles per unit of all cores, by weights and rows."""
    print_head(f"weights: {' / '.join(CORES)}")
    for name, of_rows in cycles.items():
        print_row(name, *(" / ".join(f"{own[core]:.0f}" for core in CORES) for own in of_rows))


def print_times(cycles: dict[str, list[dict[str, float]]], units: dict[str, float]) -> None:
    """Prints the calculated milliseconds of a pass over matrices with so many units of each type, by core and rows."""
    print_head(f"{THREADS} cores")
    for core, (_, clock) in CORES.items():
        totals = (
            sum(count * cycles[name][i][core] for name, count in units.items())
            for i in range(len(ROWS))
        )
        print_row(core, *(f"{total / THREADS / clock / 1e6:.1f}" for total in totals))


def print_head(first: str) -> None:
    print_row(first, "1 row", *(f"{rows} rows" for rows in ROWS[1:]))
    print("|---" * (1 + len(ROWS)) + "|")


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


def units_of(path: Path) -> dict[str, float]:
    """Returns the number of units by number type in the matrices that a pass over a GGUF file multiplies."""
    tensors = read_header(path).tensors
    units: dict[str, float] = {}
    for name, tensor in tensors.items():
        is_looked_up = name == "token_embd.weight" and "output.weight" in tensors
        if len(tensor.shape) > 1 and not is_looked_up:
            own = math.prod(tensor.shape) / (CHANNELS * INPUTS)
            units[tensor.type] = units.get(tensor.type, 0.0) + own
    return units


def executed(kind: str, number: int, channels: int, rows: int) -> list[bytes]:
    """Returns the instructions of a multiplication with an instruction set."""
    emulator = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max"]
    words = map(str, (kind, number, channels, K, rows))
    command = [*emulator, "-plugin", BUILD / "plugin.so", BUILD / "multiply", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return [done[start : start + 4] for start in range(0, len(done), 4)]


def cycles_per_unit(llvm: str, number: int, rows: int) -> dict[str, float]:
    """Returns NEON's cycles per unit on each core, without the rounding of rows."""
    few, many = (
        assembly(llvm, executed("neon", number, channels, rows)) for channels in (FEW, MANY)
    )
    units = (MANY - FEW) // CHANNELS * K // INPUTS
    return {
        core: (cycles_of(llvm, many, cpu) - cycles_of(llvm, few, cpu)) / units
        for core, (cpu, _) in CORES.items()
    }


def assembly(llvm: str, instructions: list[bytes]) -> str:
    """Returns instructions as text."""
    given = "\n".join(" ".join(f"{byte:#x}" for byte in word) for word in instructions)
    words = [f"llvm-mc{llvm}", "--disassemble", "-triple=aarch64", "-mcpu=neoverse-v2"]
    return subprocess.run(words, input=given, check=True, stdout=subprocess.PIPE, text=True).stdout


def cycles_of(llvm: str, text: str, cpu: str) -> int:
    """Returns the cycles that a core takes for instructions, one after another as they were executed."""
    words = [f"llvm-mca{llvm}", "-mtriple=aarch64", f"-mcpu={cpu}", "-iterations=1"]
    quiet = ["-instruction-info=0", "-resource-pressure=0"]
    done = subprocess.run(
        [*words, *quiet], input=text, check=True, capture_output=True, text=True
    ).stdout
    match = re.search(r"Total Cycles: +(\d+)", done)
    assert match is not None, done
    return int(match[1])


if __name__ == "__main__":
    main()
