"""A chat that reaches the end of the model's context: the oldest turns give way, and that is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from medusa_cli.errors import UserError
from medusa_cli.model.chat_template import fit
from tests.helpers import medusa, save_model

QUESTION = {"role": "user", "content": "q"}


def encode(messages: list[dict[str, str]]) -> list[int]:
    """One token a message and one a character."""
    return [0 for one in messages for _ in one["content"] + "|"]


def turns(count: int, length: int = 4, system: str = "") -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system else []
    words = ["x" * (length - 1)] * count
    return head + [one for word in words for one in (said("user", word), said("assistant", word))]


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_everything_is_told_while_it_fits() -> None:
    assert fit(encode, turns(3), QUESTION, context=34, answer=8) == ([0] * 26, 0)


def test_the_oldest_turns_give_way_and_leave_room_for_two_answers() -> None:
    tokens, forgotten = fit(encode, turns(3), QUESTION, context=33, answer=8)
    assert (len(tokens), forgotten) == (10, 4)  # 18 would leave room for one


def test_what_was_forgotten_stays_so() -> None:
    tokens, forgotten = fit(encode, turns(3), QUESTION, context=1000, answer=8, forgotten=2)
    assert (len(tokens), forgotten) == (18, 2)


def test_the_system_prompt_stays() -> None:
    seen: list[Any] = []

    def keep(messages: list[dict[str, str]]) -> list[int]:
        seen.append(messages)
        return encode(messages)

    fit(keep, turns(5, system="be kind"), QUESTION, context=40, answer=8)
    assert seen[-1][0] == said("system", "be kind") and len(seen[-1]) < 12 and seen[-1][-1] == QUESTION


def test_a_question_that_fills_the_context_is_refused() -> None:
    long = said("user", "x" * 40)
    with pytest.raises(UserError, match="the question with the system prompt has 44 tokens.*context of 40.*shorter"):
        fit(encode, turns(2, system="s") and [said("system", "ab"), *turns(2)], long, context=40, answer=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("short") / "model", positions=64)


def chat(model: str, *words: str, input: str) -> Result:
    common = ["--model", model, "--baseline", "--dtype", "fp32", "--max-new-tokens", "8"]
    return medusa("chat", *common, *words, input=input)


def test_every_turn_of_a_long_chat_is_answered(model: str, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    lines = [f"w{number} w9" for number in range(30)]
    shown = chat(model, input="\n".join([*lines, f"/save {saved}"]) + "\n")
    assert shown.exit_code == 0 and "error" not in shown.stderr, shown.stderr
    assert shown.stderr.count("tokens a step") == 30
    assert shown.stderr.count("context of 64 tokens is full: it is not told the oldest") >= 2
    messages = json.loads(saved.read_text())["messages"]
    assert [one["content"] for one in messages[::2]] == lines


def test_a_line_too_long_costs_that_line_and_a_piped_session_its_code(model: str) -> None:
    shown = chat(model, input="w1\n" + "w2 " * 80 + "\nw3\n")
    assert shown.exit_code == 1
    assert shown.stderr.count("error:") == 1 and "context of 64; ask something shorter" in shown.stderr
    assert shown.stderr.count("tokens a step") == 2
    assert "is full" not in shown.stderr  # nothing was forgotten for it


def test_a_system_prompt_that_fills_the_context_is_refused_once(model: str) -> None:
    shown = chat(model, "--system", "w1 " * 80, input="w1\nw2\n")
    assert shown.exit_code == 1 and shown.stderr.count("error:") == 1 and "the system prompt has" in shown.stderr
    assert shown.stdout == ""
    shown = chat(model, "--system", "w5", input="/system " + "w1 " * 80 + "\nw2\n")
    assert shown.exit_code == 1 and shown.stderr.count("tokens a step") == 1  # the earlier one is in force
