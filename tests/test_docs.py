"""The documents: every command is accepted, every file, function, target and page that they name is there."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from medusa_cli import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
NAMED = re.compile(r"`(medusa_cli/[\w/]+\.py):(\w+)`")


def blocks(page: Path) -> list[str]:
    """The lines of a page's shell blocks."""
    found = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in found for line in block.splitlines()]


COMMANDS = [(page.name, line) for page in PAGES for line in blocks(page) if line.startswith("medusa ")]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_every_command_is_accepted(page: str, line: str) -> None:
    name, *words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(cli.app)
    assert isinstance(group, cli.Boundary)
    group.commands[name].make_context(name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for recipe in re.findall(r"\brecipes/[\w.+-]+\.(?:yaml|jinja)", text):
        assert (ROOT / recipe).is_file(), recipe
    targets = set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for target in re.findall(r"^make ([a-z0-9-]+)|`make ([a-z0-9-]+)[` ]", text, re.MULTILINE):
        assert set(target) & targets, target
    for path, name in NAMED.findall(text):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        kinds = ast.FunctionDef | ast.ClassDef
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, kinds)}, f"{path} has no {name}"


def test_every_rule_names_its_function() -> None:
    rows = (ROOT / "docs/rules.md").read_text(encoding="utf-8").split("\n## ")[0].splitlines()[4:]
    assert len(rows) > 10 and all(NAMED.search(row) for row in rows if row.startswith("|"))


def test_every_page_is_in_the_contents() -> None:
    listed = re.findall(r"[\w-]+\.md", yaml.dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == [page.name for page in PAGES]


@pytest.mark.skipif(shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None, reason="needs mkdocs")
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/tutorial/index.html").is_file()
