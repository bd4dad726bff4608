"""The wheel holds every file of the package; decoding runs without extras, and each command names what it misses."""

import ast
import importlib.metadata
import json
import platform
import re
import shlex
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from medusa_cli import cli
from medusa_cli.files import extras, fetch
from medusa_cli.files.extras import EXTRAS, install_line
from medusa_cli.native.build import RECENT, X86, instructions_of
from medusa_cli.native.library import LIBRARY as COMPILED
from medusa_cli.native.library import SIGNATURES
from tests.helpers import medusa, python, save_model, save_run
from tests.shared_library import read_library
from tests.wheels import (
    INSTALL_NAME,
    LIBRARY,
    PLATFORMS,
    copy_source,
    library_faults,
    tags_of,
    wheel_faults,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the names of all files in a wheel, built from a copy of the tree."""
    source = tmp_path_factory.mktemp("source")
    copy_source(source)
    for weights in source.rglob("*.safetensors"):
        weights.write_bytes(b"")  # its name is enough, and quick to compress
    # The library of the tree is there; to compile it again would take a minute.
    build = "import os; os.environ['CXX'] = 'false'; from setuptools import build_meta; build_meta.build_wheel('dist')"
    python(build, cwd=source, check=True)
    [path] = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path).namelist()


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(wheel: list[str]) -> None:
    files = {
        path
        for path in (ROOT / "medusa_cli").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {str(path.relative_to(ROOT)) for path in files} <= set(wheel)


def test_every_recipe_is_in_the_wheel(wheel: list[str]) -> None:
    names = {Path(name).name for name in wheel if "share/medusa-cli/recipes/" in name}
    assert names == {path.name for path in (ROOT / "recipes").iterdir()}
    assert "vicuna.jinja" in names


def test_this_machines_wheel_is_built_each_day_and_each_other_one_on_some_day() -> None:
    days = [tags_of(day) for day in range(len(PLATFORMS))]
    assert {tag for tags in days for tag in tags} == set(PLATFORMS)
    assert all(any(platform.machine() in tag for tag in tags) for tags in days)
    assert all(len(tags) < len(PLATFORMS) for tags in days)


FUNCTIONS = [f"medusa_{name}" for name in SIGNATURES]


def strings(names: list[str]) -> tuple[bytes, list[int]]:
    """Returns a table of names that end with a zero byte, and where each begins."""
    table = b"\0"
    starts = []
    for name in names:
        starts.append(len(table))
        table += name.encode() + b"\0"
    return table, starts


def elf(machine: int = 62, glibc: str = "2.17", names: list[str] = FUNCTIONS) -> bytes:
    """Returns a library for Linux that consists of a header, symbols, their names, and the table of these sections."""
    table, starts = strings([*names, f"GLIBC_{glibc}", "GLIBC_2.2.5"])
    symbols = bytes(24)
    for start in starts[: len(names)]:
        symbols += struct.pack("<IBBHQQ", start, 0x12, 0, 1, 0, 0)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<H", header, 18, machine)
    struct.pack_into("<Q", header, 40, 64 + len(symbols) + len(table))
    struct.pack_into("<HH", header, 58, 64, 3)
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 0, 11, 0, 0, 64, len(symbols), 2, 0, 8, 24)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64 + len(symbols), len(table), 0, 0, 1, 0)
    return bytes(header) + symbols + table + sections


def mach_o(
    machine: int = 0x0100000C,
    version: int = 11 << 16,
    name: str = INSTALL_NAME,
    signed: bool = True,
    names: list[str] = FUNCTIONS,
) -> bytes:
    """Returns a library for macOS that consists of a header, commands, symbols and their names."""
    table, starts = strings([f"_{text}" for text in names])
    text = name.encode() + b"\0" * (8 - len(name) % 8)
    commands = struct.pack("<IIIIII", 0xD, 24 + len(text), 24, 0, 0, 0) + text
    commands += struct.pack("<IIIIII", 0x32, 24, 1, version, 0, 0)
    if signed:
        commands += struct.pack("<IIII", 0x1D, 16, 0, 0)
    start = 32 + len(commands) + 24
    symbols = b"".join(struct.pack("<IBBHQ", at, 0x0F, 1, 0, 0) for at in starts)
    commands += struct.pack("<IIIIII", 2, 24, start, len(starts), start + len(symbols), len(table))
    header = struct.pack("<IIIIIIII", 0xFEEDFACF, machine, 0, 6, 3 + signed, len(commands), 0, 0)
    return header + commands + symbols + table


@pytest.mark.parametrize(
    ("data", "tag", "faults"),
    [
        (elf(), "manylinux_2_17_x86_64", 0),
        (elf(183), "manylinux_2_17_aarch64", 0),
        (mach_o(), "macosx_11_0_arm64", 0),
        (mach_o(0x01000007, signed=False), "macosx_11_0_x86_64", 0),
        (elf(), "manylinux_2_17_aarch64", 1),
        (elf(), "macosx_11_0_x86_64", 1),
        (elf(glibc="2.28"), "manylinux_2_17_x86_64", 1),
        (elf(names=FUNCTIONS[1:]), "manylinux_2_17_x86_64", 1),
        (elf(names=[*FUNCTIONS, "medusa_other"]), "manylinux_2_17_x86_64", 1),
        (mach_o(0x01000007), "macosx_11_0_arm64", 1),
        (mach_o(version=15 << 16), "macosx_11_0_arm64", 1),
        (mach_o(name="/build/libmedusa.so.part"), "macosx_11_0_arm64", 1),
        (mach_o(signed=False), "macosx_11_0_arm64", 1),
        (mach_o(names=FUNCTIONS[:-1]), "macosx_11_0_arm64", 1),
        (b"MZ of Windows", "macosx_11_0_arm64", 1),
    ],
)
def test_a_library_must_fit_the_platform_of_its_wheel(data: bytes, tag: str, faults: int) -> None:
    assert len(library_faults(data, tag)) == faults, library_faults(data, tag)


def test_the_library_of_this_machine_has_the_functions_that_are_bound() -> None:
    compiled = read_library(COMPILED.read_bytes())
    assert compiled.exports >= {*FUNCTIONS}
    assert compiled.machine == platform.machine()


@pytest.mark.parametrize(
    ("named", "tagged", "files", "faults"),
    [
        ("macosx_11_0_arm64", "macosx_11_0_arm64", [LIBRARY], 0),
        ("linux_x86_64", "macosx_11_0_arm64", [LIBRARY], 1),
        ("macosx_11_0_arm64", "linux_x86_64", [LIBRARY], 1),
        ("macosx_11_0_arm64", "macosx_11_0_arm64", [], 1),
        ("macosx_11_0_arm64", "macosx_11_0_arm64", [LIBRARY, "medusa_cli/other.so"], 1),
    ],
)
def test_a_wheel_is_named_and_tagged_for_its_platform(
    tmp_path: Path, named: str, tagged: str, files: list[str], faults: int
) -> None:
    path = tmp_path / f"medusa_cli-1.0-py3-none-{named}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("medusa_cli-1.0.dist-info/WHEEL", f"Tag: py3-none-{tagged}\n")
        for file in files:
            wheel.writestr(file, mach_o())
    assert len(wheel_faults(path, "macosx_11_0_arm64")) == faults


PACKAGE = Path(cli.__file__).parent
# Names of packages by the name that is imported.
PACKAGES = {"yaml": "pyyaml", "pydantic": "fastapi", "starlette": "fastapi", "pyarrow": "datasets"}
PACKAGES["urllib3"] = "requests"
OPTIONAL = {"xllamacpp", "triton"}  # used if they are installed
INDIRECT = {"tensorboard"}  # torch imports it
BUILDING = {"build", "setuptools"}  # what native/backend.py and native/build.py import


def declared(section: str) -> set[str]:
    """Returns the packages of a list in pyproject.toml."""
    text = re.search(
        rf"^{section} = \[\n?(.*?)\]$", (PACKAGE.parent / "pyproject.toml").read_text(), re.S | re.M
    )
    assert text is not None, section
    return {re.match(r"[A-Za-z0-9_-]+", name)[0] for name in re.findall(r'"([^"]+)"', text[1])}


def imported() -> set[str]:
    """Returns all packages that the package imports, apart from Python's own."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add((node.module or "").partition(".")[0])
    return {PACKAGES.get(name, name) for name in names - sys.stdlib_module_names - {"medusa_cli"}}


def test_every_import_is_declared_and_every_dependency_is_used() -> None:
    for extra, packages in EXTRAS.items():
        assert declared(extra) == set(packages)
    known = declared("dependencies").union(*EXTRAS.values())
    assert imported() - OPTIONAL - BUILDING == known - INDIRECT


@pytest.mark.slow
def test_chat_runs_without_any_extra(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"))
    missing = sorted({package for packages in EXTRAS.values() for package in packages})
    words = [
        "chat",
        "--run",
        f"{run.path}/",
        "--prompt",
        "w1 w2",
        "--max-new-tokens",
        "6",
        "--json",
    ]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r})); sys.argv[1:] = {words!r}\n"
        "from medusa_cli.cli import main; main()"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert '"tokens": 6' in done.stdout, done.stderr


@pytest.mark.quick("uvicorn-serve-words4")
@pytest.mark.parametrize(
    ("package", "extra", "words"),
    [
        ("requests", "train", ["distill"]),
        ("datasets", "train", ["train"]),
        ("bitsandbytes", "quant", ["chat", "--quantize", "bnb.nf4"]),
        ("matplotlib", "plot", ["report", "x.json"]),
        ("uvicorn", "serve", ["serve", "--port", "0"]),
    ],
)
def test_a_command_names_the_extra_it_misses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, extra: str, words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    if words[0] == "chat":
        model = save_model(tmp_path / "model")
        words = [
            *words,
            "--model",
            model,
            "--run",
            f"{save_run(tmp_path / 'run', model).path}/",
            "--prompt",
            "w1",
        ]
    message = " ".join(medusa(*words, exit_code=1).stderr.split())
    assert package in message
    assert message.endswith(install_line(extra))


@pytest.mark.parametrize(
    ("marker", "program"),
    [("uv-receipt.toml", "uv"), ("pipx_metadata.json", "pipx"), ("pyvenv.cfg", "pip")],
)
def test_an_extra_is_added_by_the_program_that_made_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, marker: str, program: str
) -> None:
    (tmp_path / marker).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(extras, "installed_from", lambda: ("medusa-cli", False))
    line = install_line("serve")
    assert line.split()[0] == program
    assert line.endswith("'medusa-cli[serve]'")


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (None, "medusa-cli[serve]"),
        ({"url": "FOLDER/a%20b", "dir_info": {"editable": True}}, "PATH/a b[serve]"),
        ({"url": "FOLDER/a%20b", "dir_info": {}}, "PATH/a b[serve]"),
        ({"url": "FOLDER/m.whl", "archive_info": {}}, "PATH/m.whl[serve]"),
        ({"url": "FOLDER/gone", "dir_info": {"editable": True}}, "medusa-cli[serve]"),
        ({"url": "https://host/a.git", "vcs_info": {"vcs": "git"}}, "medusa-cli[serve]"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came_from(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    origin: dict[str, object] | None,
    source: str,
) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "m.whl").touch()
    record = None if origin is None else json.dumps(origin).replace("FOLDER", tmp_path.as_uri())

    class Installed:
        def read_text(self, name: str) -> str | None:
            return record if name == "direct_url.json" else None

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    *command, named = shlex.split(install_line("serve"))
    editable = record is not None and "editable" in record and "gone" not in record
    assert command == ["pip", "install", *(["-e"] if editable else [])]
    assert named == source.replace("PATH", str(tmp_path))


def test_a_python_without_ensurepip_fetches_by_a_wheel_of_the_system_or_its_own_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "has_package", lambda name: False)
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch, "PYTHON_WHEELS", tmp_path)
    assert fetch._pip() == [sys.executable, "-m", "pip"]
    (tmp_path / "pip-24.0-py3-none-any.whl").touch()
    assert fetch._pip()[1] == str(tmp_path / "pip-24.0-py3-none-any.whl" / "pip")


@pytest.mark.slow
def test_an_environment_without_pip_fetches_by_the_one_that_comes_with_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch, "has_package", lambda name: False)
    command = fetch._pip()
    if "-m" in command:
        pytest.skip("this Python brings no pip")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pip ")


def test_an_import_that_fails_later_is_one_line_too() -> None:
    assert cli.explain(ModuleNotFoundError("no", name="matplotlib.figure"))[0].endswith(
        install_line("plot")
    )
    assert "internal error" in cli.explain(ModuleNotFoundError("no", name="medusa_cli.nothing"))[0]


def test_a_tree_is_saved_without_its_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"), tree=None, calibrated=True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    medusa("tree", "--run", f"{run.path}/", "--budget", "5")
    assert run.tree_path.is_file()
    assert not run.tree_path.with_suffix(".png").exists()


@pytest.mark.parametrize(
    ("refused", "kept"),
    [
        ("none", {*X86, *RECENT}),
        ("-mamx-tile", {*X86}),
        ("-mavx2", {"neon"}),
        ("-mavx2|-march=armv8", {"neon"}),
        ("-c", set()),
    ],
)
def test_an_instruction_set_that_a_compiler_lacks_is_left_out(
    tmp_path: Path, refused: str, kept: set[str]
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n! echo \"$*\" | grep -Eqe '{refused}'\n")
    compiler.chmod(0o755)
    assert instructions_of([str(compiler)]).keys() == kept
