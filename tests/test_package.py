"""What the wheel holds: whatever a user of the installed package is told of."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of all files in a wheel built of a copy of the tree, so that no build is left in it."""
    source = tmp_path_factory.mktemp("source")
    for part in ("medusa_cli", "recipes"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    build = "import setuptools.build_meta as one; print(one.build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (made,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(made).namelist()


def test_every_recipe_and_what_it_names_is_in_the_wheel(wheel: list[str]) -> None:
    held = {Path(name).name for name in wheel if "share/medusa-cli/recipes/" in name}
    assert held == {path.name for path in (ROOT / "recipes").iterdir()}
    assert "vicuna.jinja" in held


def test_every_module_and_the_drafter_that_ships_are_in_the_wheel(wheel: list[str]) -> None:
    package = ROOT / "medusa_cli"
    files = [*package.rglob("*.py"), *(one for one in (package / "pretrained").rglob("*") if one.is_file())]
    assert {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts} <= set(wheel)
