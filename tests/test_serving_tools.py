"""Answers by a form over HTTP: JSON, tools and their calls, whole and streamed; OpenAI's client is the reference."""

import itertools
import json
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from tokenizers import AddedToken

from medusa_cli.decode import LogitsOptions, Sampling
from medusa_cli.decode.grammar import Grammar
from medusa_cli.decode.lazy_grammar import LazyGrammar, LazyGrammarProcessor, Trigger
from medusa_cli.decode.policy import StaticTreePolicy
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.serve.calls import MARKERS, CallReader, read_calls
from medusa_cli.serve.responses import ResponsesFormat, ResponsesRequest
from medusa_cli.serve.tools import (
    MAX_CALLS,
    calls_grammar,
    describe_tools,
    free_calls,
    marker_ids,
)
from tests.helpers import (
    END_ID,
    FASTEST,
    PROMPT,
    SPARSE,
    byte_backbone,
    generate,
    generate_plain,
    medusa_drafter,
    tiny_backbone,
    tokens_of,
)
from tests.schemas import PERSON
from tests.serving import MODEL, Served, serving_bytes

jsonschema = pytest.importorskip("jsonschema_rs")
pytest.importorskip("llguidance")
pytest.importorskip("openai")
ASK = [{"role": "user", "content": "Ada"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "weather", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "now"}},
]
NO_CALL = {"function": {"name": "f", "arguments": 5}}
BAD_CALL = {"function": {"name": "f", "arguments": "["}}
DEEP_CALL = {"function": {"name": "f", "arguments": "[" * 100_000}}
NAMES = ("get_weather", "now")


class Place(BaseModel):
    capital: bool
    level: int | None = None


class City(BaseModel):
    kind: bool
    places: list[Place]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Returns a server of a tiny random model that writes bytes."""
    with serving_bytes(tmp_path_factory.mktemp("bytes")) as server:
        yield server


def chat(served: Served, **fields: Any) -> dict[str, Any]:
    """Returns the choice that answers ASK."""
    status, _, body = served.post(
        {"model": MODEL, "messages": ASK, **fields}, "/v1/chat/completions"
    )
    assert status == 200, body
    [choice] = body["choices"]
    return choice


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": schema, "strict": True},
    }


@pytest.mark.quick("/v1/completions-0")
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
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["medusa"]["acceptance_length"] > 1.2


def test_other_forms_are_followed(served: Served) -> None:
    def text(**fields: Any) -> str:
        return chat(served, **fields)["message"]["content"]

    assert text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert text(structured_outputs={"regex": "[a-c]{3}"}).strip("abc") == ""
    assert text(structured_outputs={"grammar": 'root ::= "x" | "y"'}) in ("x", "y")
    assert text(response_format={"type": "json_object"}, max_tokens=8).startswith("{")
    assert text(structured_outputs={"regex": "[a-c]{3}"}, tools=TOOLS).strip("abc") == ""


@pytest.mark.slow
def test_openai_parses_pydantic_models(served: Served) -> None:
    client = served.openai()
    for seed in range(3):
        rules: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 400}
        done = client.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=City, **rules
        )
        assert isinstance(done.choices[0].message.parsed, City)
    done = client.responses.parse(model=MODEL, input="Ada", text_format=City, max_output_tokens=300)
    assert isinstance(done.output_parsed, City)
    assert done.status == "completed"


def check_call(call: Any) -> None:
    """Asserts that a call of OpenAI's client is one of TOOLS."""
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(
        WEATHER if call.function.name == "get_weather" else {"maxProperties": 0}, arguments
    )
    assert call.id
    assert call.type == "function"
    assert call.function.name in NAMES


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_required_tools_are_called(served: Served, choice: Any) -> None:
    client = served.openai()
    for seed in range(4):
        rules = {
            "temperature": 1.0,
            "seed": seed,
            "tools": TOOLS,
            "tool_choice": choice,
            "max_tokens": 200,
        }
        [done] = client.chat.completions.create(model=MODEL, messages=ASK, **rules).choices
        assert done.finish_reason == "tool_calls"
        assert done.message.content is None
        [call] = done.message.tool_calls
        check_call(call)
        assert choice == "required" or call.function.name == "get_weather"

        chunks = client.chat.completions.create(model=MODEL, messages=ASK, stream=True, **rules)
        deltas = [(c.delta, c.finish_reason) for chunk in chunks for c in chunk.choices]
        parts = [part for delta, _ in deltas for part in delta.tool_calls or ()]
        assert [part.function.name for part in parts if part.function.name] == [call.function.name]
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
        assert len(parts) > 1 or call.function.name == "now"
        assert deltas[-1][1] == "tool_calls"
        assert not any(delta.content for delta, _ in deltas)


def test_openais_stream_collects_calls(served: Served) -> None:
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    with served.openai().chat.completions.stream(
        model=MODEL, messages=ASK, tools=tools, tool_choice="required", max_tokens=200
    ) as stream:
        events = [event.type for event in stream]
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    check_call(call)
    assert "tool_calls.function.arguments.delta" in events
    assert "tool_calls.function.arguments.done" in events


def test_several_calls_are_read(served: Served) -> None:
    fields = {
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "logit_bias": {END_ID: -100},
    }
    choice = chat(served, temperature=1.0, max_tokens=800, **fields)
    calls = choice["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == len(calls)
    assert 2 < len(calls) <= MAX_CALLS


def test_an_answer_may_call_or_follow_a_schema(served: Served) -> None:
    for seed in range(4):
        fields = {"tools": TOOLS, "response_format": schema_format(PERSON), "seed": seed}
        choice = chat(served, temperature=1.0, max_tokens=400, **fields)
        if choice["finish_reason"] == "tool_calls":
            assert choice["message"]["tool_calls"][0]["function"]["name"] in NAMES
        else:
            jsonschema.validate(PERSON, json.loads(choice["message"]["content"]))


def test_results_of_tools_go_back_to_the_model(served: Served) -> None:
    call = {"id": "abc", "type": "function", "function": {"name": "now", "arguments": ""}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "noon"}]},
    ]
    body = {"model": MODEL, "messages": messages, "tools": TOOLS}
    for path, more in (("/tokenize", {}), ("/v1/chat/completions", {"max_tokens": 4})):
        status, _, answer = served.post({**body, **more}, path)
        assert status == 200, answer
    _, _, tokens = served.post(body, "/tokenize")
    _, _, text = served.post({"tokens": tokens["tokens"]}, "/detokenize")
    for part in ("get_weather", '{"name": "now", "arguments": {}}', "noon", "Oslo"):
        assert part in text["prompt"], part
    _, _, none = served.post(
        {**body, "tool_choice": "none", "max_tokens": 1}, "/v1/chat/completions"
    )
    assert none["usage"]["prompt_tokens"] < tokens["count"]  # the model is told of no tools


def test_a_template_with_tools_gets_them_and_past_calls_as_they_are() -> None:
    backbone = byte_backbone()
    backbone.tokenizer.chat_template = "{{ tools | tojson }}"
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": {}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert describe_tools(backbone, messages, TOOLS) == (messages, {"tools": TOOLS})
    assert describe_tools(backbone, messages, []) == (messages, {})


# Answers, and the content and calls in them.
ANSWERS: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "Hello <b> world": ("Hello <b> world", []),
    '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"", "b": {"c": 1}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>': (
        "",
        [("f", {"a": '}"', "b": {"c": 1}}), ("g", {})],
    ),
    'So. <tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call> Done.': (
        "So.  Done.",
        [("g", {"a": 1})],
    ),
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': ("", [("f", {"a": 1})]),
    "<tool_call>\nno json\n</tool_call> x": ("<tool_call>\nno json\n</tool_call> x", []),
    '<tool_call>{"name": "h", "arguments": {}}': ('<tool_call>{"name": "h", "arguments": {}}', []),
    '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1, 2]}}, {"name": "g", "arguments": {}}]': (
        "",
        [("f", {"a": [1, 2]}), ("g", {})],
    ),
    'Yes [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123[ARGS]{}': (
        "Yes ",
        [("f", {"a": 1}), ("g", {})],
    ),
    '<|python_tag|>{"name": "f", "parameters": {"x": "y"}}; {"name": "g", "parameters": {}}': (
        "",
        [("f", {"x": "y"}), ("g", {})],
    ),
    '\n{"name": "f", "parameters": {"x": 1}}': ("", [("f", {"x": 1})]),
    '{"name": "Ada", "age": 3}': ('{"name": "Ada", "age": 3}', []),
    '{"x": 1} and <tool_call>': ('{"x": 1} and ', []),
    "[1, 2] <tool_cal": ("[1, 2] <tool_cal", []),
    "": ("", []),
    # Text after calls without a marker.
    '{"name": "f", "arguments": {}}\nHello': ("\nHello", [("f", {})]),
    '{"name": "f", "arguments": {}}\n{"temp": 20}': ('\n{"temp": 20}', [("f", {})]),
    '{"name": "f", "arguments": {}, "id": 3} x': (" x", [("f", {})]),
    '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}] x': (
        " x",
        [("f", {}), ("g", {})],
    ),
    '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}} x': (
        " x",
        [("f", {}), ("g", {})],
    ),
    '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call> x': (" x", [("f", {})]),
    # A bracket too few.
    '<tool_call>{"name": "f", "arguments": {}\n</tool_call> x': (" x", [("f", {})]),
    # Calls in code fences.
    '```json\n{"name": "f", "arguments": {"a": 1}}\n```': ("", [("f", {"a": 1})]),
    '```\n{"name": "f", "arguments": {}}\n```\nSo.': ("\nSo.", [("f", {})]),
    '```tool_call\n{\n  "name": "f",\n  "arguments": {\n    "a": 1\n  }\n}\n```': (
        "",
        [("f", {"a": 1})],
    ),
    '```json {"name": "f", "arguments": {}} ```\n\n```json {"name": "g", "arguments": {}} ```': (
        "",
        [("f", {}), ("g", {})],
    ),
    '```json\n[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]\n```': (
        "",
        [("f", {}), ("g", {})],
    ),
    '```json\n{"name": "Ada"}\n``` <b>': ('```json\n{"name": "Ada"}\n``` <b>', []),
    "```python\nprint(1)\n```": ("```python\nprint(1)\n```", []),
    "```json": ("```json", []),
    # Other orders of keys, and arguments as a text.
    '{"type": "function", "name": "f", "parameters": {"a": 1}}': ("", [("f", {"a": 1})]),
    '{"arguments": {"a": 1}, "name": "g"}': ("", [("g", {"a": 1})]),
    '{"name": "f", "arguments": "{\\"a\\": 1}"}': ("", [("f", {"a": 1})]),
    '{"name": "g", "arguments": null}': ("", [("g", {})]),
    '{"type": "function", "name": "Ada"}': ('{"type": "function", "name": "Ada"}', []),
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("text", ANSWERS)
def test_calls_are_read_as_they_come(text: str, size: int) -> None:
    reader, content, calls = CallReader(("f", "g")), "", list[list[str]]()
    for start in range(0, len(text) + size, size):
        delta = reader.feed(text[start : start + size], last=start >= len(text))
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append([part["function"]["name"], ""])
            calls[part["index"]][1] += part["function"]["arguments"]
    assert (content, [(name, json.loads(arguments)) for name, arguments in calls]) == ANSWERS[text]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("text", ANSWERS)
def test_responses_hold_the_same_calls(text: str, size: int) -> None:
    tools = [{"type": "function", "name": name} for name in ("f", "g")]
    body = ResponsesRequest.model_validate({"model": MODEL, "input": "x", "tools": tools})
    answer = SimpleNamespace(finish_reason="stop")
    ticket: Any = SimpleNamespace(answer=answer)
    responses = ResponsesFormat(body, body.chat(), ticket)
    for start in range(0, len(text) + size, size):
        responses._add(text[start : start + size], last=start >= len(text))
    calls = [item for item in responses._items if item["type"] == "function_call"]
    named = [(call["name"], json.loads(call["arguments"])) for call in calls]
    messages = [item for item in responses._items if item["type"] == "message"]
    content = "".join(item["content"][0]["text"] for item in messages)
    assert (content, named) == ANSWERS[text]


PIECES = [
    *ANSWERS,
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "f[ARGS]{}", "[", "]", ", ", "; ", "\n", "}"),
    *("```", "```json\n", "\n```", "Hello", "f", "<", '{"name": "f", "arguments": {"a": "b'),
]


@pytest.mark.slow
def test_streams_hold_what_whole_answers_hold() -> None:
    """Any split of any mixture of calls, text and parts of them is read as the whole text is."""
    chance = random.Random(1)
    for _ in range(3000):
        text = "".join(chance.choices(PIECES, k=chance.randint(1, 5)))
        places = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.choice([2, 40]))))
        reader, content, calls = CallReader(("f", "g")), "", list[list[str]]()
        for start, end in itertools.pairwise([0, *places, len(text)]):
            delta = reader.feed(text[start:end])
            content += delta.get("content", "")
            for part in delta.get("tool_calls", ()):
                if part["index"] == len(calls):
                    calls.append([part["function"]["name"], ""])
                calls[part["index"]][1] += part["function"]["arguments"]
        count = len(calls)
        delta = reader.feed("", last=True)
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            calls[count:] += [[part["function"]["name"], part["function"]["arguments"]]]
        # The client already has a part of a call that the end cuts off.
        whole = read_calls(text, ("f", "g"), True, sent=count)
        assert (content, [tuple(call) for call in calls]) == whole, text


CALL = '{"name": "now", "arguments": {}}'
CALLS = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    "llama": f"<|python_tag|>{CALL}; {CALL}",
    "mistral": f"[TOOL_CALLS] [{CALL}, {CALL}]",
    "mistral-11": "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}",
    "bare": f"{CALL}\n{CALL}\n{CALL} and so on",
    "fence": f"```json\n{CALL}\n```\n```json\n{CALL}\n```",
    "text": f"Let me see. <tool_call>{CALL}</tool_call> <tool_call>{CALL}</tool_call>",
}


@pytest.mark.quick("True-mistral")
@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("speculative", [True, False])
def test_an_answer_ends_after_its_only_call(served: Served, text: str, speculative: bool) -> None:
    """The answer would go on with more calls, which a grammar forces here."""
    fields: dict[str, Any] = {"tools": TOOLS, "speculative": speculative}
    fields["structured_outputs"] = {"regex": re.escape(text).replace("\\\n", "\\n")}
    several = chat(served, **fields, max_tokens=300)
    assert len(several["message"]["tool_calls"]) > 1
    fields["parallel_tool_calls"] = False
    alone = chat(served, **fields, max_tokens=300)
    [call] = alone["message"]["tool_calls"]
    assert (alone["finish_reason"], call["function"]["name"]) == ("tool_calls", "now")
    assert alone["message"]["content"] == ("Let me see. " if text.startswith("Let") else None)

    body = {"model": MODEL, "messages": ASK, "max_tokens": 300, **fields, "stream": True}
    _, _, lines = served.request("POST", "/v1/chat/completions", body)
    chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    parts = [part for c in chunks for part in c["choices"][0]["delta"].get("tool_calls", ())]
    assert {part["index"] for part in parts} == {0}
    assert "".join(part["function"]["arguments"] for part in parts) == "{}"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_responses_say_how_many_calls_they_may_hold(served: Served) -> None:
    body = {"model": MODEL, "input": "Ada", "tools": FUNCTIONS, "max_output_tokens": 2}
    for fields, several in [
        ({}, True),
        ({"tool_choice": "required"}, False),
        ({"parallel_tool_calls": False}, False),
        ({"tool_choice": "required", "parallel_tool_calls": True}, True),
    ]:
        _, _, answer = served.post({**body, **fields}, "/v1/responses")
        assert answer["parallel_tool_calls"] is several, fields


def test_some_of_the_tools_may_be_allowed(served: Served) -> None:
    chosen = {"type": "function", "function": {"name": "now"}}
    subset = {"mode": "required", "tools": [chosen]}
    fields = {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": subset}}
    for seed in range(3):
        choice = chat(served, **fields, temperature=1.0, seed=seed)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    # Calls of other tools are text.
    other = '{"name": "get_weather", "arguments": {}}'
    fields["tool_choice"]["allowed_tools"]["mode"] = "auto"
    choice = chat(served, **fields, structured_outputs={"regex": re.escape(other)})
    assert choice["message"]["content"] == other
    assert "tool_calls" not in choice["message"]

    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function"}]}
    flat["tools"][0]["name"] = "now"
    body = {"model": MODEL, "input": "Ada", "tools": FUNCTIONS, "tool_choice": flat}
    _, _, answer = served.post(body, "/v1/responses")
    assert [item["name"] for item in answer["output"]] == ["now"]
    assert answer["tool_choice"] == flat
    flat["tools"][0]["name"] = "other"
    status, _, answer = served.post(body, "/v1/responses")
    assert status == 400
    assert "other" in answer["error"]["message"]


def test_streams_that_may_call_begin_without_a_text(served: Served) -> None:
    body = {"model": MODEL, "messages": ASK, "max_tokens": 3, "stream": True}
    for fields, content in [({}, ""), ({"tools": TOOLS}, None)]:
        _, _, lines = served.request("POST", "/v1/chat/completions", {**body, **fields})
        first = json.loads(lines.splitlines()[0].removeprefix("data: "))
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": "object", "description": "none", "title": "now"},
        {"type": "object", "required": []},
        {"type": ["object", "null"], "$defs": {}},
    ],
    ids=str,
)
def test_a_tool_without_parameters_gets_none(served: Served, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    choice = chat(served, tools=[tool], tool_choice="required", max_tokens=50)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


def marked_backbone(template: str, special: bool | None) -> Backbone:
    """Returns a tiny model whose markers are text (None), special tokens, or added tokens that are not special."""
    backbone = byte_backbone(layers=4)
    if special is not None:
        tokenizer = backbone.tokenizer
        tokenizer.add_tokens(
            [AddedToken(marker, special=special, normalized=False) for marker in MARKERS]
        )
        backbone = tiny_backbone(vocab=len(tokenizer), positions=2048, layers=4, engine=FASTEST)
        backbone.tokenizer = tokenizer
    backbone.tokenizer.chat_template = template
    return backbone


@pytest.mark.quick
@pytest.mark.parametrize("template", ["tools <tool_call>", "<|python_tag|>", "[TOOL_CALLS]"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling("exact", 1.0, seed=3)], ids=str)
@pytest.mark.parametrize("drafted", ["heads", "n-grams"])
def test_calls_after_a_marker_follow_their_schema(
    template: str, sampling: Sampling, drafted: str
) -> None:
    """The model writes a marker wherever it may; drafts do not change the answer."""
    backbone = marked_backbone(template, True)
    grammar = free_calls(backbone, TOOLS)
    [marker] = [trigger.token for trigger in grammar.triggers if trigger.token is not None]
    options = LogitsOptions(grammar=grammar, logit_bias={marker: 100})
    rules = {"max_new_tokens": 250, "sampling": sampling, "logits_options": options}
    tokens = tokens_of(generate_plain(backbone, PROMPT, **rules))
    text = backbone.decode(tokens, tuple(marker_ids(backbone).values()))
    _, calls = read_calls(text, NAMES, last=True)
    assert len(calls) > 1
    for name, arguments in calls:
        schema = {"maxProperties": 0} if name == "now" else WEATHER
        jsonschema.validate(schema, json.loads(arguments))
    policy = StaticTreePolicy(SPARSE, ngrams=drafted == "n-grams")
    steps = list(generate(backbone, medusa_drafter(backbone), policy, PROMPT, **rules))
    assert tokens_of(steps) == tokens
    assert len(steps) < 0.8 * len(tokens)


@pytest.mark.quick("False-tools <tool_call>", "None-tools <tool_call>")
@pytest.mark.parametrize("template", ["tools <tool_call>", "[TOOL_CALLS] [ARGS]"])
@pytest.mark.parametrize("special", [None, True, False])
def test_parts_that_follow_a_grammar_are_taken_back_with_a_draft(
    template: str, special: bool | None
) -> None:
    """A processor that has read other texts allows what a new one allows."""
    backbone = marked_backbone(template, special)
    grammar = free_calls(backbone, TOOLS)
    processor = LazyGrammarProcessor(backbone, grammar, 1)
    chance = random.Random(1)
    texts = [
        '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n',
        '```json\n{\n  "name": "now",\n  "arguments": {}\n}\n```',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 1}',
        '{"name": "Ada", "age": 3}',
    ]
    scores = torch.zeros(1, len(backbone.tokenizer))
    constrained = 0
    for _ in range(150):
        text = "".join(chance.choices(texts, k=2))[: chance.randint(1, 200)]
        ids = torch.tensor([[0, *backbone.tokenizer.encode(text, add_special_tokens=False)]])
        fresh = LazyGrammarProcessor(backbone, grammar, 1)
        allowed = fresh(ids, scores)
        assert torch.equal(processor(ids, scores), allowed), text
        assert processor.forced(ids) == fresh.forced(ids)
        constrained += bool(allowed.isinf().any())
    assert constrained > 10


@pytest.mark.parametrize("limit", ["max_tokens=3", 'stop="7"'])
def test_a_part_whose_grammar_cannot_go_back_is_taken_back(limit: str) -> None:
    """llguidance takes no token back of a grammar whose rules count tokens or end by a text."""
    backbone = byte_backbone()
    source = f'%llguidance {{}}\nstart: n "." m\nn[{limit}]: /[0-9]+/\nm: /[a-f]{{9}}/'
    grammar = LazyGrammar((Trigger(Grammar.of(grammar=source), pattern="<"),))
    processor = LazyGrammarProcessor(backbone, grammar, 0)
    scores = torch.zeros(1, len(backbone.tokenizer))
    for text in [
        "so <12",
        "so <127.ab",
        "so <127.",
        "so <1",
        "so <137.abc",
        "so <",
        "no",
        "so <127.af",
    ]:
        ids = torch.tensor([backbone.tokenizer.encode(text, add_special_tokens=False)])
        expected = LazyGrammarProcessor(backbone, grammar, 0)(ids, scores)
        assert torch.equal(processor(ids, scores), expected), text


# What a model writes by itself, the texts that may follow, and some that may not.
LAZY: dict[str, tuple[list[str], list[str]]] = {
    '{"name": "get_weather", "arguments":': ([' {"'], [' {"x', " 3", "x"]),
    '{"name": "get_weather", "arguments": {"city": "': (["Oslo", "Rome"], ["Bonn"]),
    '```json\n{"name": "now", "parameters": ': (["{}"], ['{"']),
    '{"name": "now", "arguments": {}}': (["\n", "x", "}"], []),
    '{"name": "Ada", "arguments": ': (["{}", "3"], []),
    'I say: {"name": "now", "arguments": ': (["{}", "3"], []),
    "<tool_call>": (["\n"], ["x", "{"]),
    '<tool_call>\n{"name": "': (["get", "now"], ["other"]),
    "So. <tool_call>": (["\n"], ["x"]),
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>': (["\n", "x"], []),
    "Hello": ([" world", "{"], []),
}


@pytest.mark.parametrize("text", LAZY)
@pytest.mark.parametrize("special", [None, False])
def test_only_calls_are_constrained(text: str, special: bool | None) -> None:
    backbone = marked_backbone("tools <tool_call>", special)

    def encode(text: str) -> list[int]:
        return backbone.tokenizer.encode(text, add_special_tokens=False)

    processor = LazyGrammarProcessor(backbone, free_calls(backbone, TOOLS), 0)
    scores = torch.zeros(1, len(backbone.tokenizer))

    def follows(more: str) -> bool:
        tokens = encode(text)
        for token in encode(more):
            if bool(processor(torch.tensor([tokens]), scores)[0, token].isinf()):
                return False
            tokens.append(token)
        return True

    allowed, others = LAZY[text]
    assert [more for more in allowed if not follows(more)] == []
    assert [more for more in others if follows(more)] == []


def test_a_tool_that_cannot_be_followed_is_free(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {"type": "object", "properties": {"when": {"type": "string", "pattern": "(?=x)y"}}}
    tool = {"type": "function", "function": {"name": "schedule_event", "parameters": bad}}
    for _ in range(2):
        choice = chat(served, tools=[tool, TOOLS[1]], max_tokens=4)
        assert choice["message"]["content"]
    assert caplog.text.count("schedule_event") == 1


@pytest.mark.quick("[TOOL_CALLS] [ARGS]-NAME")
@pytest.mark.parametrize("name", ["ARGUMENTS", "BARE_METAL", "NAME", "x_BARE_NAME_ARGUMENTS"])
@pytest.mark.parametrize("template", ["tools <tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS] [ARGS]"])
def test_a_tool_may_have_any_name(template: str, name: str) -> None:
    backbone = byte_backbone()
    backbone.tokenizer.chat_template = template
    tools = [{"function": {"name": name, "parameters": {"properties": {}}}}]
    grammar = calls_grammar(backbone, tools, several=False)
    rules = {"max_new_tokens": 200, "logits_options": LogitsOptions(grammar=grammar)}
    text = backbone.decode(tokens_of(generate_plain(backbone, PROMPT, **rules)), ())
    [call] = CallReader([name]).feed(text, last=True)["tool_calls"]
    assert call["function"]["name"] == name


def test_a_tool_whose_schema_is_too_deep_is_refused() -> None:
    # A chain of definitions, longer than a recursive parser can follow.
    chain = {
        "$ref": "#/$defs/0",
        "$defs": {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(9999)},
    }
    for parameters in (chain, json.loads('{"items":' * 150 + "{}" + "}" * 150)):
        with pytest.raises(UsageError):
            calls_grammar(
                byte_backbone(),
                [{"function": {"name": "f", "parameters": parameters}}],
                several=False,
            )


CUT = '<tool_call>{"name": "f", "arguments": {"city": "'


def test_a_call_that_the_end_cuts_is_content() -> None:
    assert CallReader(["f"]).feed(CUT, last=True) == {"content": CUT}
    whole = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    delta = CallReader(["f"]).feed(whole + CUT, last=True)
    assert len(delta["tool_calls"]) == 1
    assert delta["content"].endswith(CUT.removeprefix("<tool_call>"))
    reader = CallReader(["f"])  # of a stream, which has sent a part of it
    [call] = reader.feed(CUT)["tool_calls"]
    assert reader.feed("", last=True) == {}
    assert call["function"]["arguments"] == '{"city": "'


@pytest.mark.quick("None-hermes")
@pytest.mark.parametrize(
    "template",
    ["tools <tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[TOOL_CALLS] [ARGS]"],
    ids=["hermes", "llama", "mistral", "mistral-11"],
)
@pytest.mark.parametrize("special", [None, True, False])
def test_calls_by_grammar_are_in_the_models_style(template: str, special: bool | None) -> None:
    """Calls come back from what a model of any style writes by the grammar.

    Its markers are text, special tokens, or as Qwen's `<tool_call>` added tokens that are not special.
    """
    backbone = byte_backbone()
    if special is not None:
        tokenizer = backbone.tokenizer
        tokenizer.add_tokens(
            [AddedToken(marker, special=special, normalized=False) for marker in MARKERS]
        )
        backbone = tiny_backbone(vocab=len(tokenizer), positions=2048, engine=FASTEST)
        backbone.tokenizer = tokenizer
    backbone.tokenizer.chat_template = template
    keep = tuple(marker_ids(backbone).values())
    assert len(keep) == (0 if special is None else len(MARKERS))
    grammar = calls_grammar(backbone, TOOLS, several=True)
    for seed in range(3):
        rules = {"max_new_tokens": 600, "sampling": Sampling("exact", 1.0, seed=seed)}
        tokens = tokens_of(
            generate_plain(backbone, PROMPT, logits_options=LogitsOptions(grammar=grammar), **rules)
        )
        text = backbone.decode(tokens, keep)
        delta = CallReader(NAMES).feed(text, last=True)
        assert tokens[-1] == END_ID, text
        assert "content" not in delta, text
        assert special is None or template == "<|python_tag|>" or tokens[0] in keep
        for call in delta["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            assert call["function"]["name"] == "now" or jsonschema.is_valid(WEATHER, arguments)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tools": [{**TOOLS[0], "function": {"name": "f", "parameters": {"type": "objekt"}}}]},
            "tools",
        ),
        (
            {
                "tools": [
                    {**TOOLS[0], "function": {"name": "f", "parameters": {"$ref": "#/$defs/none"}}}
                ]
            },
            "tools",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, None),
        (
            {"messages": [{"role": "assistant", "tool_calls": [NO_CALL]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"response_format": schema_format({"type": "objekt"})}, "response_format"),
        ({"response_format": schema_format({"not": {"pattern": "a"}})}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ],
)
def test_bad_forms_are_refused_by_name(served: Served, fields: dict[str, Any], param: str) -> None:
    more = (
        {"tools": TOOLS, "tool_choice": "required"}
        if "tool_choice" in fields or param == "tools"
        else {}
    )
    status, _, answer = served.post(
        {"model": MODEL, "messages": ASK, **more, **fields}, "/v1/chat/completions"
    )
    assert status == 400
    assert answer["error"]["param"] == param
    assert "@" not in answer["error"]["message"]


def test_refusals_name_the_tool_the_property_and_the_keyword(served: Served) -> None:
    bad = {"o": {"type": "object", "properties": {"when": {"type": "string", "pattern": "(?=x)y"}}}}
    schema = {"type": "object", "properties": bad}
    tool = {"type": "function", "function": {"name": "schedule_event", "parameters": schema}}
    good = schema_format(PERSON)

    def refusal(**fields: Any) -> dict[str, Any]:
        body = {"model": MODEL, "messages": ASK, **fields}
        status, _, answer = served.post(body, "/v1/chat/completions")
        assert status == 400, answer
        return answer["error"]

    for fields in ({"tool_choice": "required"}, {"response_format": good}):
        error = refusal(tools=[TOOLS[0], tool], **fields)
        text = "tools: tool schedule_event, o.when: pattern (?=x)y: look-ahead cannot be followed"
        assert (error["message"].split(";")[0], error["param"]) == (text, "tools")
    error = refusal(tools=TOOLS, response_format=schema_format(schema))
    text = "response_format, o.when: pattern (?=x)y: look-ahead cannot be followed"
    assert (error["message"].split(";")[0], error["param"]) == (text, "response_format")


# Tools in the form of /v1/responses.
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.mark.slow
def test_openai_creates_and_streams_responses(served: Served) -> None:
    client = served.openai()
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Ada"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yes"}],
        },
        {"role": "user", "content": "and now?"},
    ]
    for given in ("Ada", items):
        rules: dict[str, Any] = {
            "input": given,
            "instructions": "short",
            "max_output_tokens": 9,
            "temperature": 0,
        }
        done = client.responses.create(model=MODEL, **rules)
        assert done.status == "incomplete"
        assert done.incomplete_details.reason == "max_output_tokens"
        assert done.output_text
        assert done.usage.output_tokens == 9
        with client.responses.stream(model=MODEL, **rules) as stream:
            events = list(stream)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (
            "".join(event.delta for event in events if event.type == "response.output_text.delta")
            == done.output_text
        )
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == done.output_text
    chat_body = {"messages": [{"role": "system", "content": "short"}, *ASK], "max_tokens": 9}
    choice = chat(served, **chat_body)
    assert (
        choice["message"]["content"]
        == client.responses.create(model=MODEL, **{**rules, "input": "Ada"}).output_text
    )


def test_responses_call_tools_and_take_results(served: Served) -> None:
    client = served.openai()
    rules: dict[str, Any] = {"tools": FUNCTIONS, "tool_choice": "required", "temperature": 1.0}
    done = client.responses.create(model=MODEL, input="Ada", **rules)
    [call] = done.output
    assert call.type == "function_call"
    assert call.name in NAMES
    assert json.loads(call.arguments) is not None
    with client.responses.stream(model=MODEL, input="Ada", **rules) as stream:
        names = {event.type for event in stream}
        [streamed] = stream.get_final_response().output
    assert streamed.name in NAMES
    assert "response.function_call_arguments.done" in names
    items = [{"role": "user", "content": "Ada"}, call.model_dump(exclude_none=True)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "noon"})
    last = client.responses.create(model=MODEL, input=items, tools=FUNCTIONS, max_output_tokens=5)
    assert last.usage.input_tokens > done.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"type": "unheard_of"}]}, "input"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "middle"}, "truncation"),
        ({"input": [{"role": "user", "content": "half \ud83d"}]}, "input.0.content"),
        ({"instructions": "half \ud83d"}, "instructions"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": []}]},
            "input.0.arguments",
        ),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, None),
        (
            {
                "text": {
                    "format": {"type": "json_schema", "name": "a", "schema": {"type": "objekt"}}
                }
            },
            "text",
        ),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"temperature": 1000}, "temperature"),
    ],
)
def test_other_responses_are_refused_by_name(
    served: Served, fields: dict[str, Any], param: str | None
) -> None:
    status, _, answer = served.post({"model": MODEL, "input": "Ada", **fields}, "/v1/responses")
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer


def test_a_response_cut_by_its_limit_is_that_of_its_stream(served: Served) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": "Ada", "tools": tools, "tool_choice": "required", "parallel_tool_calls": True}
    for limit in (15, 60, 120):
        given = {**body, "max_output_tokens": limit}
        status, _, whole = served.post(given, "/v1/responses")
        assert status == 200
        assert whole["status"] == "incomplete" or limit > 15
        _, _, text = served.request("POST", "/v1/responses", {**given, "stream": True})
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        items = [events[-1]["response"]["output"], whole["output"]]
        for item in itertools.chain(*items):
            item.pop("id")
            item.pop("call_id", None)
        assert items[0] == items[1]
        for item in items[0]:
            if item["type"] == "function_call" and item["status"] == "completed":
                json.loads(item["arguments"])
        assert all(item["status"] == "completed" for item in items[0][:-1])


def test_functions_of_a_namespace_are_called_by_their_namespace(served: Served) -> None:
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    spaces = [{"type": "namespace", "name": "weather", "description": "w", "tools": functions}]
    body = {"input": "Ada", "tools": spaces, "tool_choice": "required", "max_output_tokens": 200}
    status, _, answer = served.post(body, "/v1/responses")
    assert status == 200, answer
    call = answer["output"][0]
    assert call["namespace"] == "weather"
    assert call["name"] in NAMES
    past = [{"role": "user", "content": "Ada"}, call]
    past.append({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"})
    again = {"input": past, "tools": spaces, "max_output_tokens": 4}
    assert served.post(again, "/v1/responses")[0] == 200


GRAMMAR = 'start: "a" | "b"'
SAME_FORMS: list[dict[str, Any]] = [
    {"structured_outputs": {"grammar": GRAMMAR}, "guided_grammar": GRAMMAR, "grammar": GRAMMAR + "\n"},
    {"structured_outputs": {"regex": "[ab]"}, "guided_regex": "[ab]", "regex": "[ab]"},
    {"structured_outputs": {"choice": ["a", "b"]}, "guided_choice": ["a", "b"], "ebnf": GRAMMAR},
    {"structured_outputs": {"json": WEATHER}, "guided_json": json.dumps(WEATHER), "json_schema": WEATHER,
     "response_format": schema_format(WEATHER)},
    {"structured_outputs": {"json_object": True}, "guided_json": {"type": "object"},
     "response_format": {"type": "json_object"}},
]  # fmt: skip


@pytest.mark.quick("fields0", "fields1")
@pytest.mark.parametrize("fields", SAME_FORMS)
def test_equal_constraints_are_one(served: Served, fields: dict[str, Any]) -> None:
    answers = [chat(served, **{name: form}, max_tokens=40) for name, form in fields.items()]
    answers.append(chat(served, **fields, max_tokens=40))
    assert len({answer["message"]["content"] for answer in answers}) == 1


def test_different_constraints_are_refused(served: Served) -> None:
    for name, form in (("guided_grammar", 'start: "c"'), ("regex", "[ab]"), ("json_schema", {})):
        body = {"messages": ASK, "structured_outputs": {"grammar": GRAMMAR}, name: form}
        status, _, answer = served.post(body, "/v1/chat/completions")
        assert status == 400
        assert name in answer["error"]["message"]
