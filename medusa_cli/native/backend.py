"""The build backend: setuptools, which also requires a compiler from PyPI if the system has no compiler."""

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(settings), *_compiler()]


def get_requires_for_build_editable(settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(settings), *_compiler()]


def _compiler() -> list[str]:
    from build import compiler  # next to this file, in the backend's path

    return [] if compiler() else ["ziglang"]
