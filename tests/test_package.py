"""The wheel holds every module, recipe and data file of the package."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the names of all files in a wheel, built from a copy of the tree."""
    source = tmp_path_factory.mktemp("source")
    for part in ("medusa_cli", "recipes"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    [path] = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path).namelist()


def test_every_file_of_the_package_is_in_the_wheel(wheel: list[str]) -> None:
    files = {path for path in (ROOT / "medusa_cli").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {str(path.relative_to(ROOT)) for path in files} <= set(wheel)


def test_every_recipe_is_in_the_wheel(wheel: list[str]) -> None:
    names = {Path(name).name for name in wheel if "share/medusa-cli/recipes/" in name}
    assert names == {path.name for path in (ROOT / "recipes").iterdir()} and "vicuna.jinja" in names
