"""The programs of docs/integrations.md run as written, packages that are not installed being stand-ins."""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_cli import Medusa
from medusa_cli.runs import resolve
from medusa_cli.runs.run import Run
from tests.helpers import save_model, save_run
from tests.serving import Served, serving

PAGE = Path(__file__).parent.parent / "docs" / "integrations.md"
PROGRAMS = {
    title: program
    for title, program in re.findall(
        r"^## (.*?)$.*?```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a tiny model the default one, with a drafter that ships."""
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"), calibrated=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(resolve, "DEFAULT_MODEL", str(tmp_path / "model"))
    monkeypatch.setattr(Run, "pretrained", lambda model: run)


def program(title: str) -> dict[str, Any]:
    """Runs the program under the title that begins so; returns its names."""
    [text] = [text for name, text in PROGRAMS.items() if name.startswith(title)]
    names: dict[str, Any] = {}
    exec(compile(text.replace(":8000/", f":{Port.number}/"), str(PAGE), "exec"), names)
    return names


class Port:
    number = 8000


def test_there_are_five() -> None:
    assert len(PROGRAMS) == 5


@pytest.mark.slow
def test_gradio(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    interface = lambda answer: SimpleNamespace(launch=lambda: shown.append(answer))  # noqa: E731
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(ChatInterface=interface))
    names = program("A page with gradio")
    turns = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": [{"type": "text", "text": "w2"}]},
    ]
    *_, last = shown[0]("w3", turns)
    messages = [turns[0], {"role": "assistant", "content": "w2"}, {"role": "user", "content": "w3"}]
    assert last == names["medusa"].generate(messages, max_new_tokens=200).text


@pytest.mark.slow
def test_fastapi() -> None:
    names = program("An endpoint")

    async def read() -> str:
        response = await names["answer"]("w1 w2")
        return "".join([piece async for piece in response.body_iterator])

    assert asyncio.run(read()) == names["medusa"].generate("w1 w2", max_new_tokens=200).text
    assert "/answer" in {route.path for route in names["app"].routes}


class ChatOpenAI:
    """Stand-in for LangChain's: asks by OpenAI's client."""

    def __init__(self, model: str, base_url: str, api_key: str, max_tokens: int) -> None:
        from openai import OpenAI

        self.chat = OpenAI(base_url=base_url, api_key=api_key).chat.completions
        self.body = {"model": model, "max_tokens": max_tokens}

    def invoke(self, text: str) -> SimpleNamespace:
        messages = [{"role": "user", "content": text}]
        return SimpleNamespace(
            content=self.chat.create(messages=messages, **self.body).choices[0].message.content
        )

    def stream(self, text: str) -> Iterator[SimpleNamespace]:
        messages = [{"role": "user", "content": text}]
        for chunk in self.chat.create(messages=messages, stream=True, **self.body):
            yield SimpleNamespace(content=chunk.choices[0].delta.content or "")


@pytest.mark.slow
def test_langchain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        import langchain_openai  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "langchain_openai", SimpleNamespace(ChatOpenAI=ChatOpenAI))
    medusa = Medusa.from_pretrained(dtype="fp32")
    with serving(medusa, names=("qwen2.5-coder-0.5b",)) as server:
        monkeypatch.setattr(Port, "number", Served(server.port).port)
        program("LangChain")
    answers = [
        medusa.generate(f"Name {name}.", max_new_tokens=60).text
        for name in ("a mythical animal", "another one")
    ]
    assert capsys.readouterr().out == "\n".join(answers)


@pytest.mark.slow
def test_batch_job(tmp_path: Path) -> None:
    prompts = [f"w{number} w9" for number in range(10)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    answers = tmp_path / "answers.jsonl"
    program("A batch job")
    whole = answers.read_text()
    assert [json.loads(line)["prompt"] for line in whole.splitlines()] == prompts
    answers.write_text("".join(whole.splitlines(keepends=True)[:3]))
    program("A batch job")
    assert answers.read_text() == whole


@pytest.mark.slow
def test_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    rows = program("A notebook")["rows"]
    assert [row["method"] for row in rows] == ["plain"] * 2 + ["drafted"] * 2
