"""Optional packages: the extra of pyproject.toml that brings each, and errors that name a missing one."""

from importlib.util import find_spec

from medusa_cli.errors import UserError

# Packages of each extra, by the name that is imported.
EXTRAS = {
    "train": ("datasets", "requests", "matplotlib", "bitsandbytes"),
    "plot": ("matplotlib",),
    "quant": ("bitsandbytes",),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
}


def has(package: str) -> bool:
    """Returns True if a package can be imported."""
    return find_spec(package) is not None


def need(extra: str, user: str) -> None:
    """Raises UserError, naming `user` and what it lacks, unless all packages of an extra are installed."""
    missing = [package for package in EXTRAS[extra] if not has(package)]
    if missing:
        raise UserError(
            f"{user} needs {' and '.join(missing)}, not installed here", f"pip install 'medusa-cli[{extra}]'"
        )


def named(package: str | None) -> str | None:
    """Returns the message for a failed import, naming the smallest extra that brings the package; None if none does."""
    extras = [extra for extra, packages in EXTRAS.items() if package and package.partition(".")[0] in packages]
    if not extras:
        return None
    extra = min(extras, key=lambda name: len(EXTRAS[name]))
    return f"this needs {package}, not installed here; pip install 'medusa-cli[{extra}]'"
