"""The packages of each extra, and messages about missing packages."""

import json
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from medusa_cli.errors import UserError

# The packages of each extra, by import name.
EXTRAS = {
    "train": ("datasets", "requests", "matplotlib", "bitsandbytes"),
    "plot": ("matplotlib",),
    "quant": ("bitsandbytes",),
    "grammar": ("llguidance",),
    "serve": ("fastapi", "uvicorn", "prometheus_client"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}


def has_package(package: str) -> bool:
    """Returns True if a package can be imported."""
    return find_spec(package) is not None


def need_extra(extra: str, user: str) -> None:
    """Raises UserError, which names `user` and the missing packages, unless all packages of an extra are installed."""
    missing = [package for package in EXTRAS[extra] if not has_package(package)]
    if missing:
        fault = f"{user} needs {' and '.join(missing)}, not installed here"
        raise UserError(fault, install_line(extra))


def install_line(extra: str) -> str:
    """Returns the command that installs an extra in this environment, which uv, pipx or pip created.

    If this package came from a folder or a wheel, the command installs it from there again.
    """
    source, editable = installed_from()
    named = shlex.quote(f"{source}[{extra}]")
    if Path(sys.prefix, "uv-receipt.toml").is_file():
        return f"uv tool install {named}"
    if Path(sys.prefix, "pipx_metadata.json").is_file():
        return f"pipx install --force {named}"
    return f"pip install -e {named}" if editable else f"pip install {named}"


def installed_from() -> tuple[str, bool]:
    """Returns the folder or wheel that this package was installed from, and True for an editable install.

    If the package came from elsewhere, or the folder or wheel is gone, returns the package's name on an index. PEP 610
    defines the record that is read.
    """
    from importlib import metadata

    name = "medusa-cli"
    try:
        record = metadata.distribution(name).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return name, False
    origin = json.loads(record or "{}")
    url = urlsplit(origin.get("url", ""))
    path = url2pathname(url.path)
    if url.scheme != "file" or not Path(path).exists():
        return name, False
    return path, origin.get("dir_info", {}).get("editable", False)


def missing_package(package: str | None) -> str | None:
    """Returns the message for a failed import, naming the smallest extra with the package; None if no extra has it."""
    top = (package or "").partition(".")[0]
    extras = [extra for extra, packages in EXTRAS.items() if top in packages]
    if not extras:
        return None
    extra = min(extras, key=lambda name: len(EXTRAS[name]))
    return f"this needs {package}, not installed here; {install_line(extra)}"
