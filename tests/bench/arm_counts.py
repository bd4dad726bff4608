"""Prints how many instructions NEON and plain C++ take per unit of weights: the table of docs/engines.md.

They are counted under emulation, in the library that `make test-arm` compiles.
"""

import os
import subprocess
from pathlib import Path

FORMATS = {"Q4_K": 8, "Q5_0": 5, "Q6_K": 10, "Q8_0": 7}
ROWS = (1, 4, 8)
N, K = 512, 512
UNITS = N // 16 * K // 32
TIMES = 5
HERE = Path(__file__).parent / "arm"
NATIVE = Path(__file__).parents[2] / "medusa_cli" / "native"


def main() -> None:
    """Compiles the plugin and the program, counts, and prints the counts of NEON / plain C++."""
    build = Path("build/arm")
    compiler = os.environ.get("ARM_CXX", "aarch64-linux-gnu-g++").split()
    library = build / "libmedusa.so"
    words = ["-std=c++17", "-O2", "-DNDEBUG", f"-I{NATIVE}", HERE / "multiply.cpp", library]
    place = f"-Wl,-rpath,{build.resolve()}"
    subprocess.run([*compiler, *words, place, "-o", build / "multiply"], check=True)
    plugin = [HERE / "plugin.c", "-o", build / "plugin.so"]
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *plugin], check=True)

    print("| weights | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |")
    print("|---|" + "---|" * len(ROWS))
    shares = list[float]()
    for name, number in FORMATS.items():
        counts = [
            (per_unit(build, "neon", number, rows), per_unit(build, "generic", number, rows))
            for rows in ROWS
        ]
        shares += [neon / plain for neon, plain in counts]
        print(
            f"| {name} | "
            + " | ".join(f"{neon:,.0f} / {plain:,.0f}" for neon, plain in counts)
            + " |"
        )
    print(f"NEON takes {min(shares):.2f} to {max(shares):.2f} of the instructions of plain C++")


def per_unit(build: Path, name: str, number: int, rows: int) -> float:
    """Returns the instructions per unit of 32 inputs in 16 channels for some rows, which are rounded, too."""
    few, many = (executed(build, name, number, N, K, rows, times) for times in (1, TIMES))
    return (many - few) / (TIMES - 1) / UNITS


def executed(build: Path, *words: object) -> int:
    """Returns how many instructions the program executes in all."""
    emulator = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max"]
    command = [*emulator, "-plugin", build / "plugin.so", build / "multiply", *map(str, words)]
    done = subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
    return int(done.stderr.split()[-1])


if __name__ == "__main__":
    main()
