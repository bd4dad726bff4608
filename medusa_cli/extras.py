"""Packages that an installation may lack: the extra that brings each, and the one line that says so."""

from importlib.util import find_spec

from medusa_cli.errors import UserError

# What each extra in pyproject.toml brings, by the name that is imported.
EXTRAS = {
    "train": ("datasets", "ijson", "requests", "matplotlib", "bitsandbytes"),
    "plot": ("matplotlib",),
    "quant": ("bitsandbytes",),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
}


def has(package: str) -> bool:
    """Whether a package can be imported."""
    return find_spec(package) is not None


def need(extra: str, what: str) -> None:
    """UserError, naming what lacks and how to get it, unless all of an extra's packages are there."""
    lacking = [package for package in EXTRAS[extra] if not has(package)]
    if lacking:
        raise UserError(
            f"{what} needs {' and '.join(lacking)}, not installed here", f"pip install 'medusa-cli[{extra}]'"
        )


def named(package: str | None) -> str | None:
    """What to tell of an import that failed: the smallest extra that brings the package; None for any other package."""
    bring = [extra for extra, packages in EXTRAS.items() if package and package.partition(".")[0] in packages]
    if not bring:
        return None
    extra = min(bring, key=lambda one: len(EXTRAS[one]))
    return f"this needs {package}, not installed here; pip install 'medusa-cli[{extra}]'"
