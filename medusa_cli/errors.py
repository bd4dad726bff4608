"""Errors a user can act on: what was wrong, where, and what to do."""

import errno
import reprlib
import signal
from typing import Any

# Exit codes: 1 for what could not be done, 2 for a command line that cannot be; these are the shell's own.
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

OUT_OF_MEMORY = "out of memory; use a smaller batch, a smaller model, or --load-in-4bit"


# Characters of a message: five lines of 120, whatever values and paths it names.
LONGEST = 600
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 2, 80, 80, 40


def shown(value: Any) -> str:
    """A value as an error names it: its repr, cut where it is long."""
    return _REPR.repr(value)


def cut(text: str) -> str:
    """A text of at most LONGEST characters, its middle left out where it is longer."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


class UserError(Exception):
    """Something the user can mend; shown as one line, without a traceback, and ending with exit code 1."""

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        message = cut(message)
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message = message


class UsageError(UserError):
    """A flag, key or value that cannot be; exit code 2."""

    exit_code = 2


def explain_os(reason: OSError) -> str:
    """What to tell the user about a file that the system would not give or take."""
    # Of a file that was to take another's place, the place: the file itself has a name for the time being.
    where = str(reason.filename2 or reason.filename or "")
    place = f" {where}" if where else ""
    match reason.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"no disk space left to write{place}; free some space or choose another --run, then run again"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"no permission to use{place}; change its permissions or give a path that can be written"
        case errno.ENOMEM:
            return OUT_OF_MEMORY
        case errno.ENOENT | errno.ENOTDIR | errno.EISDIR | errno.EEXIST if where:
            return f"{where}: {(reason.strerror or 'cannot be used').lower()}; check the path"
    return f"{where or type(reason).__name__}: {reason.strerror or reason}"
