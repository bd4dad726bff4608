"""Imports point one way, nothing is imported by star, and what the command line starts with stays light."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import typer

from medusa_cli.errors import in_flags

PACKAGE = Path(__file__).parent.parent / "medusa_cli"
# What is exported beside a model is no part of the package: transformers alone runs it.
APART = {"pretrained", "custom_generate"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if not APART & set(path.parts))

# A module may import from its own layer's folder, from the layers after it, and from the leaves.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"options"},
    {"serve", "export", "doctor"},
    {"distill", "train", "bench"},
    {"api"},
    {"decode"},
    {"data"},
    {"drafters"},  # drafters fill a tree; a tree knows no drafter
    {"tree"},
    {"engine"},
    {"model"},
]
LEAVES = {"runs", "assets", "errors", "extras"}
# Storage of hidden states: a leaf too, but one of torch, so no command may start with it.
TORCH_LEAVES: set[str] = set()
SCREEN = {"console"}
HEAVY = {
    "torch",
    "transformers",
    "matplotlib",
    "numpy",
    "datasets",
    "peft",
    "bitsandbytes",
    "huggingface_hub",
}


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(PACKAGE).with_suffix("").parts


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """The dotted names that import statements bring in; of `from a import b` both a and a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def level(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run at import: all but function bodies and `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from level(node)


def ours(names: Iterator[str]) -> set[str]:
    """The top-level names within the package that are imported."""
    return {name.split(".")[1] for name in names if name.startswith("medusa_cli.")} - {"__version__"}


def allowed(top: str) -> set[str]:
    if top == "errors":
        return set()
    if top in LEAVES | TORCH_LEAVES:
        # A leaf may build on the leaves below it, never on a layer.
        return LEAVES
    if top in SCREEN:
        return LEAVES | SCREEN - {top}
    place = next(i for i, layer in enumerate(LAYERS) if top in layer)
    below = set().union(*LAYERS[place + 1 :])
    return below | LEAVES | TORCH_LEAVES | {top} | (SCREEN if place <= 3 else set())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: ".".join(parts(path)))
def test_imports_point_one_way(path: Path) -> None:
    top = parts(path)[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if top == "__init__":  # what it offers comes when it is asked for
        assert not ours(imports(level(tree)))
        return
    used = ours(imports(ast.walk(tree)))
    assert used <= allowed(top), f"{top} must not import {', '.join(sorted(used - allowed(top)))}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: ".".join(parts(path)))
def test_no_star_import_and_no_bare_except(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), f"line {node.lineno}: star import"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: ".".join(parts(path)))
def test_only_the_screen_prints(path: Path) -> None:
    if parts(path)[0] in SCREEN | {"options"}:
        return
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    printed = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
    assert not printed, f"print() in lines {printed}: return it, or use console"


# Lines for other programs hold their flags; so do commands that are started, pip's too, and a style sheet's variables.
LAUNCHED = ("vllm serve", "python -m sglang.launch_server", "python convert_hf_to_gguf.py")
FOREIGN = {"assets", "bench.report"}
SPOKEN = {"cli", "commands", "options", "console"}
CORE = [path for path in MODULES if parts(path)[0] not in SPOKEN and ".".join(parts(path)) not in FOREIGN]


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each string of a module, what an f-string fills in left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "...".join(one.value for one in node.values if isinstance(one, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        yield from texts(node) if not isinstance(node, ast.JoinedStr) else ()


def test_the_core_names_settings_and_no_flags() -> None:
    """A command to type stands in backticks; what else says --word would be wrong in Python and over HTTP."""
    for path in CORE:
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8"))):
            if not any(one in text for one in LAUNCHED):
                said = re.search(r"(?<![\w-])--[a-z]", re.sub(r"`[^`]*`", "", text))
                assert not said, f"{path.name}, line {line}: {text}"


def test_every_setting_that_an_error_names_is_one() -> None:
    """On the command line or in Python: @max_new_tokens becomes --max-new-tokens, which must be there."""
    from medusa_cli import cli
    from medusa_cli.api import Medusa

    commands = typer.main.get_command(cli.app).commands.values()
    known = {flag for one in commands for option in one.params for flag in option.opts + option.secondary_opts}
    known |= {in_flags(f"@{name}") for name in inspect.signature(Medusa.request).parameters}
    for path in MODULES:
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8"))):
            named = re.findall(r"(?<!\S)@[a-z]\w*(?![\w/@-])", re.sub(r"`[^`]*`", "", text))
            assert {in_flags(name) for name in named if not name.endswith("_")} <= known, f"{path.name}, line {line}"


FIRST = [path for path in MODULES if parts(path)[0] in {"cli", "__main__", "commands", "options"} | SCREEN | LEAVES]


@pytest.mark.parametrize("path", FIRST, ids=lambda path: ".".join(parts(path)))
def test_what_starts_first_imports_nothing_heavy(path: Path) -> None:
    names = set(imports(level(ast.parse(path.read_text(encoding="utf-8")))))
    assert not {name.split(".")[0] for name in names} & HEAVY
    # Of the package, only what is light itself: the layers with torch come in the command's body.
    layers = set().union(*LAYERS[4:]) | TORCH_LEAVES
    assert not ours(iter(names)) & layers


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, medusa_cli.cli; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & HEAVY


def test_help_imports_no_command_and_no_rich() -> None:
    code = "import sys; sys.argv[1:] = ['--help']; import medusa_cli.cli as cli\ntry: cli.main()\nfinally: "
    code += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Commands:" in done.stdout
    assert not [name for name in done.stderr.split() if name.startswith(("medusa_cli.commands", "rich"))]


def test_no_imports_go_in_a_circle() -> None:
    known = {".".join(parts(path)).removesuffix(".__init__"): path for path in MODULES if path.parent != PACKAGE}

    def module(name: str) -> str | None:
        name = name.removeprefix("medusa_cli.")
        return next((one for one in (name, name.rpartition(".")[0]) if one in known), None)

    used = {}
    for name, path in known.items():
        found = {module(one) for one in imports(level(ast.parse(path.read_text(encoding="utf-8"))))}
        used[name] = found - {None, name}
    TopologicalSorter(used).prepare()  # names the circle where there is one


def test_no_file_uses_the_private_names_of_another() -> None:
    for path in MODULES:
        for name in imports(ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
            assert not name.startswith("medusa_cli.") or "._" not in name.replace("__", ""), f"{path}: {name}"
