"""Paths that users give."""

from pathlib import Path

from medusa_cli.errors import UserError


def expanded(name: str) -> Path:
    """Returns a path with a leading ~ replaced; raises UserError for the home of an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as reason:
        raise UserError(f"{name!r} names the home of an unknown user", "check the path") from reason
