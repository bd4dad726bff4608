"""One writer a run: a second one is refused at once, and a killed one holds nothing."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from medusa_cli.errors import UserError
from medusa_cli.runs.files import sweep

NAME = ".lock"


@contextmanager
def sole_writer(folder: Path, what: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Hold the run's lock as the command `what`; UserError, naming the one that holds it, where another does.

    The system frees the lock of a process that was killed. `warn` is told where a file system knows no locks.
    """
    from filelock import FileLock, Timeout

    path = folder / NAME
    # Without locks it would fall back to one that a killed process leaves behind.
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as reason:
        raise UserError(
            f"the run {folder} is being written by {_holder(path)}", "wait until that has ended, or use another @run"
        ) from reason
    except PermissionError:
        raise
    except OSError as reason:
        warn(f"{folder} cannot be locked ({reason.strerror}): let no second command write this run")
        yield
        return
    try:
        path.write_text(f"{os.getpid()}\n{what}\n{time.time()}\n", encoding="utf-8")
        sweep(folder)
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    """The process that holds a lock, and for how long, as it said itself."""
    try:
        pid, what, since = path.read_text(encoding="utf-8").split("\n")[:3]
        return f"`{what}` (process {int(pid)}, for {_duration(time.time() - float(since))})"
    except (OSError, ValueError):  # it has the lock, but has not said so yet
        return "another process"


def _duration(seconds: float) -> str:
    """Seconds in words: 40 s, 12 min, 3.5 h."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 120 else f"{whole // 60} min" if whole < 7200 else f"{whole / 3600:.1f} h"
