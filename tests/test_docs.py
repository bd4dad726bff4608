"""Checks the documents: commands parse, links resolve, named files, functions and targets exist."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_cli import cli
from tests import helppage, recipepage

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def shell_lines(page: Path) -> list[str]:
    """Returns the lines of a page's shell blocks that call medusa."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("medusa ")]


@pytest.mark.parametrize(("page", "line"), [(page.name, line) for page in PAGES for line in shell_lines(page)])
def test_documented_command_parses(page: str, line: str) -> None:
    name, *words = shlex.split(line, comments=True)[1:]
    cli.load_command(name).make_context(name, words)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as mkdocs and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"
    for name in re.findall(r"\brecipes/[\w.+-]+\.(?:yaml|jinja)", text):
        assert (ROOT / name).is_file(), name
    for first, second in re.findall(r"^make ([a-z0-9-]+)|`make ([a-z0-9-]+)[` ]", text, re.MULTILINE):
        assert (first or second) in TARGETS


def test_modules_and_functions_of_structure_exist() -> None:
    text = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/[\w/]+\.py|[a-z_]+\.py)(?::(\w+))?`", text)
    assert len(named) > 50
    for path, name in named:
        tree = ast.parse((ROOT / "medusa_cli" / path).read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert not name or name in defined, f"{path} has no {name}"


def test_recipe_keys_of_the_docs_are_current() -> None:
    assert recipepage.PAGE.read_text(encoding="utf-8") == recipepage.page(), "run `make help-page`"


def test_help_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HOME", "")  # the page unsets it: put back at the end
    assert (ROOT / "docs/commands.md").read_text(encoding="utf-8") == helppage.page(), "run `make help-page`"


@pytest.mark.skipif(shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None, reason="needs mkdocs")
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
