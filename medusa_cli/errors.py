"""Errors a user can act on: what was wrong, where, and what to do."""


class UserError(Exception):
    """Something the user can mend; shown as one line, without a traceback, and ending with exit code 1."""

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy


class UsageError(UserError):
    """A flag, key or value that cannot be; exit code 2."""

    exit_code = 2
