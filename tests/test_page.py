"""The page at / in a browser: it streams, stops, shows calls of tools and code, and keeps conversations."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from medusa_cli.api import Medusa
from tests.browser import CHROMIUM, Browser
from tests.helpers import byte_tokenizer, save_model, save_run
from tests.serving import Served, serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("page")
    model = save_model(folder / "model", vocab=320, positions=4096)
    byte_tokenizer().save_pretrained(model)
    run = save_run(folder / "run", model)
    with serving(
        Medusa.from_pretrained(drafter=run.path, tree="static", dtype="fp32"), max_new_tokens=2000
    ) as server:
        yield server


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def page(chromium: Browser, served: Served) -> Browser:
    chromium.open(f"{served.url}/")
    return chromium


def ask(page: Browser, text: str, **fields: Any) -> None:
    for name, value in {"text": text, **fields}.items():
        page.run(f"document.getElementById({name!r}).value = {json.dumps(str(value))}")
    page.run("document.getElementById('send').click()")


def test_the_answer_is_streamed_and_the_conversation_goes_on(page: Browser, served: Served) -> None:
    ask(page, "Ada", limit=60)
    page.until("running === null && messages.length === 2")
    ask(page, "and then?", limit=20)
    page.until("running === null && messages.length === 4")
    sent = page.run("messages")
    assert [message["role"] for message in sent] == ["user", "assistant"] * 2
    alone = served.server._scheduler._medusa.generate(sent[:3], max_new_tokens=20)
    assert sent[3]["content"] == alone.text
    assert page.run("[...document.querySelectorAll('.assistant')].at(-1).textContent") == alone.text


def test_stop_ends_the_answer_and_keeps_its_beginning(
    page: Browser, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(served.server._scheduler._medusa.backbone.__dict__, "eos_ids", frozenset())
    ask(page, "Ada", limit=2000)
    # Long before its end.
    page.until("document.querySelector('.assistant')?.textContent.length > 20")
    assert page.run("document.getElementById('send').textContent") == "Stop"
    page.run("document.getElementById('send').click()")
    page.until("running === null")
    served.until("medusa_requests_running", 0)
    assert 20 < page.run("messages[1].content.length") < 1900
    assert page.run("document.getElementById('send').textContent") == "Send"


def test_calls_of_tools_are_shown_and_their_results_given(page: Browser) -> None:
    tools = [
        {"name": "weather", "parameters": CITY},
        {"type": "function", "function": {"name": "now"}},
    ]
    ask(page, "Ada", limit=200, tools=json.dumps(tools), choice="required")
    page.until("running === null && messages.length === 2")
    [call] = page.run("messages[1].tool_calls")
    shown = page.run("document.querySelector('.call pre').textContent")
    assert shown == f"{call['function']['name']} {call['function']['arguments']}"
    assert call["function"]["name"] in ("weather", "now")
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    page.run("document.querySelector('.call input').value = 'rain'")
    page.run("document.querySelector('.call button').click()")
    page.until("running === null && messages.length === 4")
    result = page.run("messages[2]")
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": "rain"}


def test_lines_between_fences_are_shown_as_code_and_keep_their_colors(page: Browser) -> None:
    pieces = [
        ["So:\n`", False],
        ["``py\nx =", True],
        [" 1\n``", False],
        ["`\nand", True],
        ["so on", False],
    ]
    page.run("var box = turn('assistant'), write = writer(box)")
    for piece in pieces:
        page.run(f"write({json.dumps(piece)})")
    assert page.run("box.textContent") == "".join(text for text, _ in pieces)
    assert page.run("[...box.querySelectorAll('.code')].map(code => code.textContent)") == [
        "```py\nx = 1\n```\n"
    ]
    drafted = page.run("[...box.querySelectorAll('.drafted')].map(span => span.textContent)")
    assert "".join(drafted) == "``py\nx =`\nand"


def test_conversations_are_kept_until_they_are_deleted(page: Browser, served: Served) -> None:
    ask(page, "Ada", limit=20)
    page.until("running === null && messages.length === 2")
    page.run("document.getElementById('new').click()")
    assert page.run("messages.length") == 0
    ask(page, "Bob", limit=20)
    page.until("running === null && messages.length === 2")
    assert "prompt tokens cached" in page.run("document.getElementById('speed').textContent")
    shown = page.run("document.getElementById('log').innerHTML")
    page.open(f"{served.url}/")
    titles = page.run("[...document.getElementById('talks').options].map(option => option.text)")
    assert titles[1:3] == ["Bob", "Ada"]
    page.run(
        "var talks = document.getElementById('talks'); talks.selectedIndex = 1; talks.onchange()"
    )
    assert page.run("document.getElementById('log').innerHTML") == shown
    page.run("document.getElementById('clear').click()")
    titles = page.run("[...document.getElementById('talks').options].map(option => option.text)")
    assert "Bob" not in titles
    assert "Ada" in titles


def test_an_error_is_shown(page: Browser) -> None:
    ask(page, "Ada", tools='[{"name": "no name"}]')
    page.until("document.querySelector('.error')")
    assert "tools" in page.run("document.querySelector('.error').textContent")
    assert page.run("messages.length") == 0
