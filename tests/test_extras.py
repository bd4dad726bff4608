"""What an installation may lack: decoding does without it, and each command says in one line what it misses."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_cli import cli
from medusa_cli.extras import EXTRAS
from tests.helpers import medusa, save_model, save_run

PACKAGE = Path(cli.__file__).parent
PROJECT = PACKAGE.parent / "pyproject.toml"
# By the name that is imported; most of these come with the package that is made of them.
PACKAGES = {"yaml": "pyyaml", "pydantic": "fastapi", "starlette": "fastapi", "pyarrow": "datasets"}
PACKAGES["urllib3"] = "requests"
OPTIONAL = {"llama_cpp", "tensorboard"}  # used where they are there, never asked for


def declared(section: str) -> set[str]:
    """The packages of a list in pyproject.toml."""
    text = re.search(rf"^{section} = \[\n?(.*?)\]$", PROJECT.read_text(), flags=re.S | re.M)
    assert text is not None, section
    return {re.match(r"[A-Za-z0-9_-]+", one)[0] for one in re.findall(r'"([^"]+)"', text[1])}


def test_every_extra_brings_what_the_code_says() -> None:
    for extra, packages in EXTRAS.items():
        assert declared(extra) == set(packages)
        assert not declared("dependencies") & set(packages)
    assert "medusa-cli" in declared("dev")  # what make installs


def test_everything_that_is_imported_is_declared() -> None:
    known = declared("dependencies") | {one for packages in EXTRAS.values() for one in packages} | OPTIONAL
    for path in PACKAGE.rglob("*.py"):
        if "custom_generate" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in (one.partition(".")[0] for one in names):
                if name not in sys.stdlib_module_names | {"medusa_cli", "typing_extensions", "torch_xla"}:
                    assert PACKAGES.get(name, name) in known, f"{path}: {name}"


def test_chat_runs_without_any_extra(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run = save_run(tmp_path / "run", model)
    lacking = sorted({one for packages in EXTRAS.values() for one in packages})
    words = ["chat", "--run", f"{run.path}/", "--prompt", "w1 w2", "--max-new-tokens", "6", "--json"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({lacking!r})); sys.argv[1:] = {words!r}\n"
        "from medusa_cli.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"tokens": 6' in done.stdout


@pytest.mark.parametrize(
    ("package", "words", "said"),
    [
        ("ijson", ["distill"], "`medusa distill` needs ijson, not installed here; pip install 'medusa-cli[train]'"),
        ("datasets", ["train"], "`medusa train` needs datasets, not installed here; pip install 'medusa-cli[train]'"),
        (
            "bitsandbytes",
            ["chat", "--load-in-4bit"],
            "--load-in-4bit needs bitsandbytes, not installed here; pip install",
        ),
        ("matplotlib", ["tree", "--picture", "x.png"], "--picture needs matplotlib, not installed here; pip install"),
    ],
    ids=lambda one: one if isinstance(one, str) else one[0],
)
def test_a_command_names_the_extra_it_misses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, words: list[str], said: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    if words[0] == "chat":
        model = save_model(tmp_path / "model")
        words = [*words, "--model", model, "--run", f"{save_run(tmp_path / 'run', model).path}/", "--prompt", "w1"]
    done = medusa(*words)
    assert done.exit_code == 1
    assert said in " ".join(done.stderr.split()), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_import_that_fails_further_in_is_one_line_too() -> None:
    assert cli.explain(ModuleNotFoundError("no", name="matplotlib.figure"))[0].endswith("'medusa-cli[plot]'")
    assert "internal error" in cli.explain(ModuleNotFoundError("no", name="medusa_cli.nothing"))[0]


def test_a_tree_is_saved_without_its_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run = save_run(tmp_path / "run", model, tree=None, calibrated=True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = medusa("tree", "--run", f"{run.path}/", "--budget", "5")
    assert done.exit_code == 0, done.output
    assert run.tree_path.is_file() and not run.tree_path.with_suffix(".png").exists()


def test_what_is_declared_is_installed_for_the_developer() -> None:
    for package in declared("dependencies") | {one for packages in EXTRAS.values() for one in packages}:
        assert importlib.metadata.version(package)
