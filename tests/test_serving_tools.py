"""Answers by a form over HTTP: JSON, tools and their calls, whole and streamed; OpenAI's client is the reference."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from medusa_cli.api import Medusa
from tests.helpers import byte_tokenizer, save_model, save_run
from tests.schemas import PERSON
from tests.serving import MODEL, Served, serving

jsonschema = pytest.importorskip("jsonschema_rs")
pytest.importorskip("llguidance")
ASK = [{"role": "user", "content": "Ada"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Returns a server of a tiny random model that writes bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    model = save_model(folder / "model", vocab=320, positions=2048)
    byte_tokenizer().save_pretrained(model)
    run = save_run(folder / "run", model)
    with serving(Medusa.from_pretrained(drafter=run.path, tree="static", dtype="fp32", lookup=True)) as server:
        yield server


def chat(served: Served, **fields: Any) -> dict[str, Any]:
    """Returns the answer to ASK."""
    status, _, body = served.post({"model": MODEL, "messages": ASK, **fields}, "/v1/chat/completions")
    assert status == 200, body
    return body


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_answers_follow_a_schema(served: Served, path: str, temperature: float) -> None:
    body = {"model": MODEL, "temperature": temperature, "seed": 1, "max_tokens": 400}
    if path == "/v1/completions":
        body |= {"prompt": "Ada", "structured_outputs": {"json": PERSON}}
    else:
        body |= {"messages": ASK, "response_format": schema_format(PERSON)}
    status, _, answer = served.post(body, path)
    assert status == 200, answer
    [choice] = answer["choices"]
    text = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
    jsonschema.validate(PERSON, json.loads(text))
    assert choice["finish_reason"] == "stop" and answer["usage"]["medusa"]["acceptance_length"] > 1.2


def test_other_forms_are_followed(served: Served) -> None:
    def text(**fields: Any) -> str:
        return chat(served, **fields)["choices"][0]["message"]["content"]

    assert text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert text(structured_outputs={"regex": "[a-c]{3}"}).strip("abc") == ""
    assert text(structured_outputs={"grammar": 'root ::= "x" | "y"'}) in ("x", "y")
    assert text(response_format={"type": "json_object"}, max_tokens=8).startswith("{")


def test_openai_parses_pydantic_models(served: Served) -> None:
    openai = pytest.importorskip("openai")
    from pydantic import BaseModel

    class Place(BaseModel):
        capital: bool
        level: int | None = None

    class City(BaseModel):
        kind: bool
        places: list[Place]

    del openai
    client = served.openai()
    for seed in range(3):
        rules: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 400}
        done = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=City, **rules)
        assert isinstance(done.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"type": "objekt"})}, "response_format"),
        ({"response_format": schema_format({"not": {"type": "string"}})}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ],
)
def test_bad_forms_are_refused_by_name(served: Served, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": ASK, **fields}
    status, _, answer = served.post(body, "/v1/chat/completions")
    assert status == 400 and answer["error"]["param"] == param and "@" not in answer["error"]["message"]
