"""Imports point one way and in no circle, the core prints nothing and names no flags, and --help stays light."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers import python

PACKAGE = Path(__file__).parent.parent / "medusa_cli"
# A module may import from its own layer's folder, from the layers after it, and from the leaves.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"options"},
    {"serve", "export", "doctor", "tune"},
    {"distill", "train", "bench"},
    {"api"},
    {"loading"},
    {"decode"},
    {"data"},
    {"drafters"},
    {"tree"},
    {"engine"},
    {"model"},
    {"native"},
    {"device"},
]
LEAVES = {"runs", "files", "progress", "errors"}
SPOKEN = {"__main__", "cli", "commands", "options", "console"}  # the command line's own
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


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


TREES = {
    name_of(path): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
}
MODULES = pytest.mark.parametrize("name", TREES)


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Yields the dotted names that import statements bring in; `from a import b` gives a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run at import: all but function bodies and `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from at_import(node)


def ours(names: Iterator[str]) -> set[str]:
    """Returns the top-level names within the package."""
    return {name.split(".")[1] for name in names if name.startswith("medusa_cli.")} - {
        "__version__"
    }


def allowed(top: str) -> set[str]:
    """Returns the top-level names that a module may import."""
    if top in LEAVES | {"console"}:
        return LEAVES if top not in ("errors", "progress") else set()
    layer = next(i for i, tops in enumerate(LAYERS) if top in tops)
    return (
        set().union(*LAYERS[layer + 1 :])
        | LEAVES
        | {top}
        | ({"console"} if top in SPOKEN else set())
    )


@MODULES
def test_imports(name: str) -> None:
    """Checks direction, stars, private names, weight at start, and that only the console prints."""
    top, nodes = name.split(".")[0], list(ast.walk(TREES[name]))
    names, first = list(imports(iter(nodes))), list(imports(at_import(TREES[name])))
    if top == "__init__":  # its exports are imported on use
        assert not ours(iter(first))
        return
    assert ours(iter(names)) <= allowed(top)
    for imported in names:
        assert not imported.endswith(".*")
        assert not imported.startswith("medusa_cli.") or "._" not in imported.replace("__", ""), (
            imported
        )
    if top in SPOKEN | LEAVES:
        assert not {imported.split(".")[0] for imported in first} & HEAVY
        assert not ours(iter(first)) & set().union(*LAYERS[4:])
    for node in nodes:
        assert not isinstance(node, ast.ExceptHandler) or node.type is not None, (
            f"line {node.lineno}: bare except"
        )
        called = (
            node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        )
        # The build of the library is no part of the program.
        speaks = top in ("console", "options") or name == "native.build"
        assert called != "print" or speaks, f"line {node.lineno}: print"


def test_no_imports_go_in_a_circle() -> None:
    """Checks imports at import, for types and within functions."""
    known = {name.removesuffix(".__init__"): tree for name, tree in TREES.items() if "." in name}

    def module(imported: str) -> str | None:
        imported = imported.removeprefix("medusa_cli.")
        return next(
            (name for name in (imported, imported.rpartition(".")[0]) if name in known), None
        )

    used = {
        name: {module(other) for other in imports(ast.walk(tree))} - {None, name}
        for name, tree in known.items()
    }
    TopologicalSorter(used).prepare()  # names the circle


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = "import sys; sys.argv[1:] = ['--help']; import medusa_cli.cli as cli\ntry: cli.main()\nfinally: "
    code += "print(*sys.modules, file=sys.stderr)"
    done = python(code, check=True)
    loaded = done.stderr.split()
    assert "Commands:" in done.stdout
    assert not {name.split(".")[0] for name in loaded} & (HEAVY | {"rich"})
    assert not [name for name in loaded if name.startswith("medusa_cli.commands")]
