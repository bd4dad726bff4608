"""Errors name settings; each way of using the program says them in its own words."""

import pytest

from medusa_cli.errors import UsageError, UserError, in_flags
from medusa_cli.serve.errors import refusal_for

ERROR = UsageError("@max_new_tokens 0 is too small", "use 1 or more, or another @run")


def test_a_setting_is_a_flag_a_keyword_or_a_field() -> None:
    assert in_flags(ERROR) == "--max-new-tokens 0 is too small; use 1 or more, or another --run"
    assert str(ERROR) == "max_new_tokens 0 is too small; use 1 or more, or another run"
    refusal = refusal_for(ERROR, "prompt")
    assert (refusal.param, refusal.code) == ("max_tokens", "invalid_value")
    assert str(refusal).startswith("max_tokens 0 is too small")


def test_an_error_that_names_no_setting_is_about_the_prompt() -> None:
    refusal = refusal_for(UserError("it is too long", "give another @model"), "prompt")
    assert refusal.param == "prompt" and str(refusal).startswith("prompt: it is too long")


@pytest.mark.parametrize("text", ["me@example.org", "the file '@run' is none", "@scope/name", "@run.json (@run)"])
def test_what_only_looks_like_a_setting_stays(text: str) -> None:
    assert in_flags(UserError(text)) == str(UserError(text)) == text


def test_a_system_error_names_flags_too() -> None:
    assert "another --run" in in_flags(OSError(28, "No space left on device", "runs/a/b"))
