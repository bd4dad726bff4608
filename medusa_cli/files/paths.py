"""Paths that users give, and the cache's folder."""

import atexit
import errno
import logging
import os
import tempfile
from functools import cache
from pathlib import Path

from medusa_cli.errors import UserError

log = logging.getLogger(__name__)
# Errors of a cache that cannot be written.
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def expanded(name: str) -> Path:
    """Returns a path with a leading ~ replaced; raises UserError for the home of an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as reason:
        fault = f"{name!r} begins with the home folder of a user that does not exist"
        raise UserError(fault, "give the whole path") from reason


def home() -> Path:
    """Returns the cache folder: MEDUSA_HOME, else medusa-cli under XDG_CACHE_HOME, else under ~/.cache."""
    if folder := os.environ.get("MEDUSA_HOME"):
        return expanded(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medusa-cli"


@cache
def temporary_home() -> Path:
    """Returns a folder for this process, to use if the cache cannot be written; the folder is removed at exit."""
    log.warning(f"the cache {home()} cannot be written: each start reads the model's files anew")
    folder = tempfile.TemporaryDirectory(prefix="medusa-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
