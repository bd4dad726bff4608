"""`medusa assets`: fetches named models and data ahead of time."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import console
from medusa_cli.errors import UsageError
from medusa_cli.files import catalogue, fetch
from medusa_cli.files.paths import home
from medusa_cli.options import OutputFlags

_FETCH: dict[str, Callable[[], str | Path | None]] = {
    **{name: partial(fetch.named_file, file) for name, file in catalogue.MODELS.items()},
    "sharegpt": fetch.sharegpt_path,
    "mt-bench": fetch.mt_bench_path,
}
_NAMES = f"What to fetch: {', '.join(_FETCH)}. [default: {catalogue.DEFAULT_MODEL} and the data]"


def assets(
    *,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help=_NAMES, show_default=False)
    ] = None,
    printing: OutputFlags,
) -> None:
    """Fetch named models and data into the cache, so that later commands need no network.

    The cache is ~/.cache/medusa-cli; the environment variable MEDUSA_HOME moves it. An interrupted fetch
    resumes: run the same command again.
    """
    printing.configure()
    others = catalogue.MODELS.keys() - {catalogue.DEFAULT_MODEL}
    wanted = list(dict.fromkeys(names or (name for name in _FETCH if name not in others)))
    for name in wanted:
        if name not in _FETCH:
            raise UsageError(f"{name!r} is not an asset", f"use one of {', '.join(_FETCH)}")
    console.info(f"{', '.join(wanted)} -> {home()}")
    paths: dict[str, str] = {}
    for name in wanted:
        paths[name] = str(_FETCH[name]())
        console.result(f"{name}: {paths[name]}")
    if printing.json:
        console.emit_json(paths)
