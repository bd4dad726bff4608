"""Errors a user can act on: what was wrong, where, and what to do.

A text names a setting as @max_new_tokens; whoever shows it does so in its own words (see `worded`): the command line
with a flag, Python with a keyword, a server with a field.
"""

import errno
import re
import reprlib
import signal
from collections.abc import Callable
from typing import Any

# Exit codes: 1 for what could not be done, 2 for a command line that cannot be; these are the shell's own.
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

OUT_OF_MEMORY = "out of memory; use a smaller batch, a smaller model, or @load_in_4bit"


# Characters of a message: five lines of 120, whatever values and paths it names.
LONGEST = 600
# A word of its own, so that addresses, paths and what is quoted stay as they are.
_SETTING = re.compile(r"(?<!\S)@([a-z]\w*)(?!\w|[/@]|[.-]\w)")
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 2, 80, 80, 40


def shown(value: Any) -> str:
    """A value as an error names it: its repr, cut where it is long."""
    return _REPR.repr(value)


def cut(text: str) -> str:
    """A text of at most LONGEST characters: of a longer one the middle is left out, as its end says what to do."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[5 - LONGEST // 2 :]}"


def first_line(reason: BaseException) -> str:
    """What a library's exception says, without the lines that follow; its type where it says nothing."""
    return next(iter(str(reason).strip().splitlines()), type(reason).__name__)


def worded(text: str, word: Callable[[str], str] = str) -> str:
    """A text with its settings named by `word`: by themselves, as Python does, or for example as flags."""
    return _SETTING.sub(lambda found: word(found[1]), text)


def in_flags(reason: "str | UserError | OSError") -> str:
    """A text, or what there is to say of an error, as the command line says it."""
    text = reason if isinstance(reason, str) else reason.text if isinstance(reason, UserError) else explain_os(reason)
    return worded(text, lambda setting: "--" + setting.replace("_", "-"))


class UserError(Exception):
    """Something the user can mend; shown as one line, without a traceback, and ending with exit code 1."""

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message, self.remedy = cut(message), remedy
        self.text = cut(f"{message}; {remedy}" if remedy else message)
        super().__init__(worded(self.text))

    @property
    def about(self) -> str | None:
        """The setting that is wrong, where it is one."""
        found = _SETTING.search(self.message)
        return found and found[1]


class UsageError(UserError):
    """A setting or value that cannot be; exit code 2."""

    exit_code = 2


def explain_os(reason: OSError) -> str:
    """What to tell the user about a file that the system would not give or take."""
    # Of a file that was to take another's place, the place: the file itself has a name for the time being.
    where = str(reason.filename2 or reason.filename or "")
    place = f" {where}" if where else ""
    match reason.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"no disk space left to write{place}; free some space or choose another @run, then run again"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"no permission to use{place}; change its permissions or give a path that can be written"
        case errno.ENOMEM:
            return OUT_OF_MEMORY
        case errno.ENOENT | errno.ENOTDIR | errno.EISDIR | errno.EEXIST if where:
            return f"{where}: {(reason.strerror or 'cannot be used').lower()}; check the path"
    return f"{where or type(reason).__name__}: {reason.strerror or reason}"
