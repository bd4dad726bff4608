"""Errors that a user can act on; each states the fault, the value and the remedy.

Messages write a setting as @name, such as @max_new_tokens. The command line shows it as a flag, Python as an argument,
and the server as a field.
"""

import errno
import re
import reprlib
import signal
from collections.abc import Callable, Sequence
from typing import Any

# Exit codes are 1 for errors, 2 for a wrong command line, and the shell's codes for signals.
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
OUT_OF_MEMORY = "out of memory; use a smaller batch, a smaller model, or @quantize bnb.nf4"
LISTED = 8  # maximum number of names in a message
LONGEST = 600  # maximum characters of a message, values and paths included: five lines of 120
# Matches @name only as a separate word or after a bracket, so that addresses, paths and quoted text
# stay unchanged.
_SETTING = re.compile(r"(?<![^\s(\[])@([a-z]\w*)(?!\w|[/@]|[.-]\w)")
_REPR = reprlib.Repr()
_REPR.maxlevel = 2
_REPR.maxstring = 80
_REPR.maxother = 80
_REPR.maxlong = 40


def shown(value: Any) -> str:
    """Returns a value's repr, cut if it is long."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python does not print integers of more than 4,300 digits
        return "a number of thousands of digits"


def cut(text: str, longest: int = LONGEST) -> str:
    """Returns a text, without its middle if it exceeds `longest` characters; the end holds the remedy."""
    return (
        text if len(text) <= longest else f"{text[: longest // 2]} ... {text[5 - longest // 2 :]}"
    )


def listed(names: Sequence[str]) -> str:
    """Returns the first few names, and the number of the others."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def first_line(reason: BaseException) -> str:
    """Returns the first line of a library's exception, or its type if it has no text."""
    return next(iter(str(reason).strip().splitlines()), type(reason).__name__)


def in_words(text: str, word: Callable[[str], str] = str) -> str:
    """Returns a text in which `word(name)` replaces each setting's @name."""
    return _SETTING.sub(lambda match: word(match[1]), text)


def in_flags(text: str) -> str:
    """Returns a text in which settings are written as command-line flags."""
    return in_words(text, lambda setting: "--" + setting.replace("_", "-"))


def is_out_of_memory(reason: BaseException) -> bool:
    """Returns True if an error reports that the system or a device is out of memory."""
    # torch has two such types besides Python's own type, but must not be imported here.
    names = {kind.__name__ for kind in type(reason).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(reason)


# The remedy for a model that cannot run the extra rows of FIRP.
OTHER_THAN_FIRP = "use a drafter other than firp, such as drafter=hydra"


class UserError(Exception):
    """Reports an error that the user can fix, on one line without a traceback; exit code 1."""

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message = cut(message)
        self.remedy = remedy
        self.text = cut(f"{message}; {remedy}" if remedy else message)
        super().__init__(in_words(self.text))

    @property
    def setting(self) -> str | None:
        """Returns the first setting that the message mentions, if any."""
        match = _SETTING.search(self.message)
        return match and match[1]


class UsageError(UserError):
    """Reports an invalid setting or value; exit code 2."""

    exit_code = 2


def of_system(reason: OSError) -> UserError:
    """Returns the UserError for an error that the operating system reports for a file."""
    # filename2 is the target that a temporary file replaces.
    path = str(reason.filename2 or reason.filename or "")
    match reason.errno:
        # EFBIG: the file would exceed a quota, a ulimit or the file system's limit.
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            fault = f"no disk space left to write {path}".rstrip()
            return UserError(fault, "free some space or choose another @run")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            fault = f"no permission to use {path}".rstrip()
            return UserError(fault, "change its permissions or give another path")
        case errno.ENOMEM:
            return UserError(*OUT_OF_MEMORY.split("; "))
        case errno.ENOENT | errno.ENOTDIR | errno.EISDIR | errno.EEXIST if path:
            fault = f"{path}: {(reason.strerror or 'cannot be used').lower()}"
            return UserError(fault, "check the path")
    return UserError(f"{path or type(reason).__name__}: {reason.strerror or reason}")
