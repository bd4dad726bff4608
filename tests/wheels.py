"""Builds the wheel of each platform with zig, and checks it as far as this machine can.

    python -m tests.wheels FOLDER ZIG [--today]

ZIG: a Python with the package ziglang. $ARM_RUN runs programs for ARM, if it is installed. --today: only this
machine's wheel and one other, each day another one.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from medusa_cli.native.library import SIGNATURES
from tests.shared_library import read_library

ROOT = Path(__file__).parent.parent
LIBRARY = "medusa_cli/native/libmedusa.so"
INSTALL_NAME = "@rpath/libmedusa.so"
_MAC = f"-Wl,-install_name,{INSTALL_NAME}"
# The flags with which zig compiles for the platform of a wheel's tag. Without the versions, it would ask for
# recent systems.
PLATFORMS = {
    "manylinux_2_17_x86_64": "-target x86_64-linux-gnu.2.17",
    "macosx_11_0_x86_64": f"-target x86_64-macos.11.0 {_MAC}",
    "manylinux_2_17_aarch64": "-target aarch64-linux-gnu.2.17",
    "macosx_11_0_arm64": f"-target aarch64-macos.11.0 {_MAC}",
}


def copy_source(folder: Path, *without: str) -> None:
    """Copies what a wheel is made of, except for files whose names match a pattern."""
    ignored = shutil.ignore_patterns("__pycache__", *without)
    for part in ("medusa_cli", "recipes"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, folder / part)


def library_faults(data: bytes, tag: str) -> list[str]:
    """Returns what keeps a library from the platform of a wheel's tag."""
    match = re.fullmatch(r"(manylinux|macosx)_(\d+)_(\d+)_(\w+)", tag)
    assert match is not None, tag
    try:
        library = read_library(data)
    except ValueError as reason:
        return [str(reason)]
    faults = []
    if (library.system, library.machine) != (match[1], match[4]):
        faults.append(f"it is for {library.system} on {library.machine}")
    if library.needs > (int(match[2]), int(match[3])):
        faults.append(f"it needs version {'.'.join(map(str, library.needs))} of the system")
    if library.system == "macosx" and library.name != INSTALL_NAME:
        faults.append(f"its install name is {library.name!r}")
    # No Mac with an ARM CPU loads code without a signature, be it one without a name.
    if library.machine == "arm64" and not library.signed:
        faults.append("it is not signed")
    wanted = {f"medusa_{name}" for name in SIGNATURES}
    exports = {name for name in library.exports if name.startswith("medusa_")}
    if exports != wanted:
        faults.append(f"its functions differ from library.py's in {sorted(exports ^ wanted)}")
    return faults


def wheel_faults(path: Path, tag: str) -> list[str]:
    """Returns what is wrong in a wheel for a platform."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        [about] = [name for name in names if name.endswith(".dist-info/WHEEL")]
        tags = re.findall(r"^Tag: (.*?)\r?$", wheel.read(about).decode(), re.M)
        faults = [] if tags == [f"py3-none-{tag}"] else [f"its tags are {tags}"]
        if not path.name.endswith(f"-py3-none-{tag}.whl"):
            faults.append("its name has another tag")
        libraries = [name for name in names if name.endswith((".so", ".dylib"))]
        if libraries != [LIBRARY]:
            return [*faults, f"its libraries are {libraries}"]
        return faults + library_faults(wheel.read(LIBRARY), tag)


def build_wheel(tag: str, folder: Path, zig: Path) -> Path:
    """Builds a wheel from a copy of the sources, without the library of this machine."""
    source = folder / tag
    copy_source(source, "*.so")
    words = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), "."]
    log = folder / f"{tag}.log"
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", *words, "-v"],
            cwd=source,
            env=os.environ | {"CXX": _compiler(tag, zig), "MEDUSA_PLATFORM": tag},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    wheels = list(folder.glob(f"*-{tag}.whl"))
    if done.returncode or len(wheels) != 1:
        sys.exit(f"error: no wheel for {tag}; see {log}")
    return wheels[0]


def _compiler(tag: str, zig: Path) -> str:
    return f"{zig.absolute()} -m ziglang c++ {PLATFORMS[tag]}"


def run_selftest(wheel: Path, tag: str, zig: Path) -> str | None:
    """Runs the self-test with a wheel's library; returns what it prints, None if this machine cannot run it."""
    machine = tag.removeprefix("manylinux_2_17_")
    if machine == platform.machine():
        runner = []
    elif machine == "aarch64":
        runner = shlex.split(os.environ.get("ARM_RUN", ""))
    else:
        return None
    if runner and shutil.which(runner[0]) is None:
        return None
    folder = wheel.parent / f"{tag}.selftest"
    with zipfile.ZipFile(wheel) as files:
        library = Path(files.extract(LIBRARY, folder)).resolve()
    build = ROOT / "medusa_cli/native/build.py"
    subprocess.run(
        [sys.executable, str(build), "selftest", str(folder / "selftest"), str(library)],
        env=os.environ | {"CXX": _compiler(tag, zig)},
        check=True,
    )
    words = [*runner, str(folder / "selftest")]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def tags_of(day: int) -> list[str]:
    """Returns the platforms of this machine's wheel and of a day's other wheel."""
    own = [tag for tag in PLATFORMS if tag.endswith(f"linux_2_17_{platform.machine()}")]
    others = [tag for tag in PLATFORMS if tag not in own]
    return [*own, others[day % len(others)]]


def main(folder: Path, zig: Path, tags: list[str]) -> None:
    """Builds and checks the wheels of platforms, two at a time; ends with 1 if one has a fault."""
    folder = folder.resolve()
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        wheels = list(pool.map(lambda tag: build_wheel(tag, folder, zig), tags))
    is_right = True
    digests = set[str]()
    for tag, wheel in zip(tags, wheels, strict=True):
        faults = wheel_faults(wheel, tag)
        is_right &= not faults
        print(f"{wheel.name}: {'; '.join(faults) or 'tag, format and symbols are right'}")
        printed = None if faults else run_selftest(wheel, tag, zig)
        print(
            "  self-test:", "not run here" if printed is None else ", ".join(printed.splitlines())
        )
        digests |= {line.split()[1] for line in (printed or "").splitlines()}
    if len(digests) > 1:
        is_right = False
        print("the digests differ")
    sys.exit(not is_right)


if __name__ == "__main__":
    today = int(time.time() // 86400)
    named, zig, *flags = sys.argv[1:]
    main(Path(named), Path(zig), tags_of(today) if flags == ["--today"] else list(PLATFORMS))
