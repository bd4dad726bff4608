"""The wheel holds every file of the package; decoding runs without extras, and each command names what it misses."""

import ast
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from medusa_cli import cli
from medusa_cli.files import extras, fetch
from medusa_cli.files.extras import EXTRAS, install_line
from medusa_cli.native.build import RECENT, X86, instructions_of
from tests.helpers import medusa, python, save_model, save_run

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the names of all files in a wheel, built from a copy of the tree."""
    source = tmp_path_factory.mktemp("source")
    for part in ("medusa_cli", "recipes"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    # The library of the tree is there; to compile it again would take a minute.
    build = "import os; os.environ['CXX'] = 'false'; from setuptools import build_meta; build_meta.build_wheel('dist')"
    python(build, cwd=source, check=True)
    [path] = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path).namelist()


def test_every_file_of_the_package_is_in_the_wheel(wheel: list[str]) -> None:
    files = {
        path
        for path in (ROOT / "medusa_cli").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {str(path.relative_to(ROOT)) for path in files} <= set(wheel)


def test_every_recipe_is_in_the_wheel(wheel: list[str]) -> None:
    names = {Path(name).name for name in wheel if "share/medusa-cli/recipes/" in name}
    assert names == {path.name for path in (ROOT / "recipes").iterdir()} and "vicuna.jinja" in names


PACKAGE = Path(cli.__file__).parent
# Names of packages by the name that is imported.
PACKAGES = {"yaml": "pyyaml", "pydantic": "fastapi", "starlette": "fastapi", "pyarrow": "datasets"}
PACKAGES["urllib3"] = "requests"
OPTIONAL = {"xllamacpp", "openvino", "openvino_genai"}  # used if it is installed
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
    assert done.returncode == 0 and '"tokens": 6' in done.stdout, done.stderr


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
    assert package in message and message.endswith(install_line(extra))


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
    assert line.split()[0] == program and line.endswith("'medusa-cli[serve]'")


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
    assert run.tree_path.is_file() and not run.tree_path.with_suffix(".png").exists()


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
