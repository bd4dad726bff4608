"""The server speaks the APIs of Anthropic, llama.cpp and Ollama: each answer is that of the equivalent chat."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from medusa_cli.api import Medusa
from medusa_cli.decode.decoder import Decoder
from medusa_cli.loading import LoadedModel
from medusa_cli.serve import handler
from medusa_cli.serve.completions import CompletionRequest
from medusa_cli.serve.infill import FILE_TOKENS, TOKENS, File, infill_ids
from medusa_cli.serve.messages import MessagesRequest
from medusa_cli.serve.ollama import OllamaChat, OllamaGenerate
from tests.helpers import byte_backbone, tiny_backbone
from tests.serving import MODEL, Served, serving, serving_bytes

pytest.importorskip("llguidance")
ASK = [{"role": "user", "content": "Ada"}]
MESSAGE = {"model": MODEL, "max_tokens": 24, "messages": ASK}
OLLAMA = {"model": MODEL, "messages": ASK, "options": {"num_predict": 24}}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL = {"name": "weather", "input_schema": CITY, "cache_control": {"type": "ephemeral"}}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Returns a server of a tiny random model that writes bytes."""
    with serving_bytes(tmp_path_factory.mktemp("apis")) as running:
        yield running


@pytest.fixture(scope="module")
def filling() -> Iterator[Served]:
    """Returns a server of a tiny model with tokens to fill in the middle."""
    tokenizer = byte_backbone().tokenizer
    names = (*TOKENS[0], *FILE_TOKENS[0])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in names])
    backbone = tiny_backbone(vocab=len(tokenizer), positions=2048)
    backbone.tokenizer = tokenizer
    with serving(Medusa(LoadedModel(backbone)), context=256) as running:
        yield running


def answer(server: Served, path: str, body: Any) -> Any:
    status, _, answered = server.post(body, path)
    assert status == 200, answered
    return answered


def plain_text(server: Served, **fields: Any) -> str:
    body = {"model": MODEL, "messages": ASK, "max_tokens": 24, **fields}
    return str(answer(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"])


def events_of(server: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, headers, text = server.request("POST", path, {**body, "stream": True})
    assert status == 200, text
    assert headers["content-type"].startswith("text/event-stream"), text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def lines_of(server: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, headers, text = server.request("POST", path, body)
    assert status == 200, text
    assert headers["content-type"].startswith("application/x-ndjson"), text
    return [json.loads(line) for line in text.splitlines()]


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a stream's events make, after checking their order."""
    events = [event for event in events if event["type"] != "ping"]
    first, *parts, delta, last = events
    kinds = (first["type"], delta["type"], last["type"])
    assert kinds == ("message_start", "message_delta", "message_stop")
    blocks: list[dict[str, Any]] = []
    opened = False
    for event in parts:
        if event["type"] == "content_block_start":
            assert not opened
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert opened
            assert event["index"] == len(blocks) - 1
            blocks[-1]["json"] += event["delta"].get("partial_json", "")
            if "text" in event["delta"]:
                blocks[-1]["text"] += event["delta"]["text"]
        else:
            assert opened
            assert event["type"] == "content_block_stop"
        opened = event["type"] != "content_block_stop"
    assert not opened
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return {**first["message"], **delta["delta"], "usage": delta["usage"], "content": blocks}


@pytest.mark.slow
def test_a_message_is_the_answer_of_the_chat_and_that_of_its_stream(server: Served) -> None:
    whole = answer(server, "/v1/messages", MESSAGE)
    assert whole["content"] == [{"type": "text", "text": plain_text(server)}]
    assert (whole["stop_reason"], whole["role"]) == ("max_tokens", "assistant")
    assert whole["usage"]["output_tokens"] == 24
    streamed = message_of(events_of(server, "/v1/messages", MESSAGE))
    assert streamed["content"] == whole["content"]
    assert streamed["stop_reason"] == whole["stop_reason"]
    usage = streamed["usage"]
    counted = answer(server, "/v1/messages/count_tokens", {"messages": ASK})["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools_are_called_in_messages(server: Served, choice: Any) -> None:
    body = {**MESSAGE, "max_tokens": 200, "tools": [TOOL], "tool_choice": choice}
    whole = answer(server, "/v1/messages", body)
    streamed = message_of(events_of(server, "/v1/messages", body))
    for message in (whole, streamed):
        assert message["stop_reason"] == "tool_use"
        [block] = message["content"]
        assert (block["type"], block["name"]) == ("tool_use", "weather")
        assert block["input"]["city"] in ("Oslo", "Rome")


def test_a_stop_sequence_is_named(server: Served) -> None:
    text = plain_text(server)
    stop = next(letter for letter in text[2:] if letter.isascii() and letter.isprintable())
    whole = answer(server, "/v1/messages", {**MESSAGE, "stop_sequences": ["no such", stop]})
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert whole["content"][0]["text"] == text[: text.index(stop)]


def test_messages_follow_a_schema(server: Served) -> None:
    config = {"effort": "low", "format": {"type": "json_schema", "schema": CITY}}
    whole = answer(server, "/v1/messages", {**MESSAGE, "max_tokens": 200, "output_config": config})
    assert json.loads(whole["content"][0]["text"])["city"] in ("Oslo", "Rome")


def test_messages_become_chats() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True}
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    foreign = {"type": "web_search_tool_result", "tool_use_id": "x", "content": []}
    turns = [
        {"role": "user", "content": texts},
        {"role": "assistant", "content": [thought, foreign, texts[0], call]},
        {"role": "user", "content": [{**result, "content": texts}, texts[1]]},
        {"role": "assistant", "content": "So"},
    ]
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    request = MessagesRequest(
        **{"messages": turns, "system": texts, "tools": tools, "tool_choice": choice, "top_k": 5}
    )
    chat = request.chat()
    assert [message.plain for message in chat.messages] == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "a",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Oslo"}},
                }
            ],
        },
        {"role": "tool", "content": "ab", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "So"},
    ]
    assert [tool["function"]["name"] for tool in chat.offered] == ["weather"]
    assert (chat.parallel_tool_calls, chat.top_k) == (False, 5)
    assert chat.continue_final_message
    assert chat.template["enable_thinking"] is False


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "document"),
    ({"messages": []}, 400, "messages"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"mirostat": 2}, 400, "mirostat"),
    ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
    ({"stop_sequences": ["x" * 1025]}, 400, "stop_sequences"),
    ({"model": "claude"}, 404, "claude"),
]


@pytest.mark.parametrize(("fields", "status", "name"), REFUSED)
def test_messages_are_refused_in_anthropics_form(
    server: Served, fields: dict[str, Any], status: int, name: str
) -> None:
    answered, headers, body = server.post({**MESSAGE, **fields}, "/v1/messages")
    kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert (answered, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert name in body["error"]["message"]
    assert headers["request-id"]


@pytest.mark.slow
def test_keys_are_refused_in_the_form_of_each_api() -> None:
    model = tiny_backbone()
    with serving(Medusa(LoadedModel(model)), api_keys=("k",)) as closed:
        status, _, body = closed.post(MESSAGE, "/v1/messages", **{"x-api-key": "wrong"})
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert closed.post(MESSAGE, "/v1/messages", **{"x-api-key": "k"})[0] != 401
        assert isinstance(closed.post(OLLAMA, "/api/chat")[2]["error"], str)
        assert closed.post({"prompt": "a"}, "/completion")[2]["error"]["code"] == "invalid_api_key"


def test_llamas_completions_are_those_of_openais_api(server: Served) -> None:
    body = {"prompt": "Ada", "n_predict": 20, "t_max_predict_ms": 500, "return_tokens": True}
    text = answer(server, "/v1/completions", {"prompt": "Ada", "max_tokens": 20})["choices"][0]
    whole = answer(server, "/completion", body)
    assert (whole["content"], whole["stop_type"], whole["stop"]) == (text["text"], "limit", True)
    assert whole["tokens_predicted"] == len(whole["tokens"]) == whole["timings"]["predicted_n"]
    *parts, last = events_of(server, "/completion", body)
    assert "".join(part["content"] for part in parts) == text["text"]
    assert not last["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["stop"] for part in parts] == [False] * len(parts)
    assert last["stop"]
    stop = next(letter for letter in text["text"][2:] if letter.isascii())
    stopped = answer(server, "/completion", {**body, "stop": [stop]})
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", stop)
    ids = server.post({"content": "Ada"}, "/tokenize")[2]["tokens"]
    assert answer(server, "/completion", {**body, "prompt": ids})["content"] == text["text"]
    fields = ["content", "timings/prompt_n", "none"]
    some = answer(server, "/completion", {**body, "response_fields": fields})
    assert [*some] == fields[:2]


def test_the_middle_is_filled_in_for_editors(filling: Served) -> None:
    # As llama.vim sends it.
    body: dict[str, Any] = {
        "id_slot": 0,
        "input_prefix": "def f():\n",
        "input_suffix": "\n",
        "input_extra": [{"text": "x = 1", "time": [1, 2], "filename": "a.py"}],
        "prompt": "    return",
        "n_predict": 12,
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.99,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
    }
    whole = answer(filling, "/infill", body)
    assert 0 < whole["tokens_predicted"] <= 12
    plain = {"prompt": "def f():\n    return", "suffix": "\n", "max_tokens": 12}
    without = answer(filling, "/infill", {**body, "input_extra": []})
    expected = answer(filling, "/v1/completions", plain)
    assert without["content"] == expected["choices"][0]["text"]
    assert without["tokens_evaluated"] == expected["usage"]["prompt_tokens"]
    # Warms the cache, and is larger than the context.
    large = {"input_prefix": "a" * 900, "input_suffix": "b" * 900, "input_extra": []}
    warm = answer(filling, "/infill", {**body, **large, "n_predict": 0})
    assert (warm["content"], warm["tokens_predicted"]) == ("", 0)


def test_a_long_prompt_keeps_the_text_around_the_middle() -> None:
    tokenizer = byte_backbone().tokenizer
    names = (*TOKENS[0], *FILE_TOKENS[0])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in names])
    backbone = tiny_backbone(vocab=len(tokenizer), positions=2048)
    backbone.tokenizer = tokenizer
    files = [File("a.py", "1" * 40), File("b.py", "2" * 40)]
    before, after, middle = TOKENS[0]
    repository, separator = FILE_TOKENS[0]
    whole = backbone.tokenizer.decode(infill_ids(backbone, "ab", "cd", files))
    first = f"{repository}myproject\n{separator}a.py\n{'1' * 40}{separator}b.py\n"
    assert whole.startswith(first)
    assert whole.endswith(f"{before}ab{after}cd{middle}")
    cut = infill_ids(backbone, "x" * 300 + "ab", "cd" + "y" * 300, files, room=60)
    text = backbone.tokenizer.decode(cut)
    assert len(cut) == 60
    assert f"ab{after}cd" in text
    assert repository not in text


def test_progress_of_a_prompt_is_told_if_asked_for(server: Served) -> None:
    asked = {"return_progress": True, "n_predict": 4, "prompt": "progress " * 40}
    for path in ("/completion", "/v1/completions"):
        status, _, text = server.request("POST", path, {**asked, "stream": True})
        assert status == 200
        data = [line.removeprefix("data: ") for line in text.splitlines() if line]
        chunks = [json.loads(line) for line in data if line != "[DONE]"]
        told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert [chunk for chunk in chunks[: len(told)] if "prompt_progress" not in chunk] == []
        assert told[0]["processed"] == told[0]["cache"]
        assert told[-1]["processed"] == told[-1]["total"]
        counts = [progress["processed"] for progress in told]
        assert counts == sorted(counts)


def test_silent_streams_are_kept_alive(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "KEEP_ALIVE_S", 0.0001)
    # Steps that are slow on any machine leave time for several signs of life.
    step = Decoder.step

    def slow(self: Decoder) -> Any:
        time.sleep(0.01)
        return step(self)

    monkeypatch.setattr(Decoder, "step", slow)
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        body = {**MESSAGE, "input": "Ada", "stream": True}
        text = server.request("POST", path, body)[2]
        assert text.count("event: ping" if "messages" in path else ": keep-alive") > 1
    assert message_of(events_of(server, "/v1/messages", MESSAGE))["content"]
    assert lines_of(server, "/api/chat", OLLAMA)[-1]["done"]


def test_ollamas_answers_are_those_of_chats(server: Served) -> None:
    text = plain_text(server)
    whole = answer(server, "/api/chat", {**OLLAMA, "stream": False})
    assert whole["message"] == {"role": "assistant", "content": text}
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "length", 24)
    *parts, last = lines_of(server, "/api/chat", OLLAMA)
    assert "".join(part["message"]["content"] for part in [*parts, last]) == text
    assert not any(part["done"] for part in parts)
    assert last["done_reason"] == "length"
    asked = {"model": f"{MODEL}:latest", "prompt": "Ada", "options": {"num_predict": 24}}
    assert "".join(part["response"] for part in lines_of(server, "/api/generate", asked)) == text
    raw = answer(server, "/api/generate", {**asked, "raw": True, "stream": False})["response"]
    body = {"prompt": "Ada", "max_tokens": 24}
    assert raw == answer(server, "/v1/completions", body)["choices"][0]["text"]
    form = {"format": CITY, "options": {"num_predict": 200}, "stream": False}
    content = answer(server, "/api/chat", {**OLLAMA, **form})["message"]["content"]
    assert json.loads(content)["city"] in ("Oslo", "Rome")
    loaded = answer(server, "/api/chat", {"model": MODEL})
    assert (loaded["done_reason"], loaded["message"]["content"]) == ("load", "")


def test_ollamas_requests_become_chats_and_completions() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "5"},
    ]
    options = {"num_predict": 9, "num_ctx": 4096, "repeat_penalty": 1.1, "stop": ["x"]}
    chat = OllamaChat(
        **{"messages": messages, "tools": [FUNCTION], "options": options}
    ).translated()
    assert [message.plain["role"] for message in chat.messages] == ["user", "assistant", "tool"]
    assert chat.messages[1].plain["tool_calls"][0]["function"] == call["function"]
    assert (chat.limit, chat.repetition_penalty, chat.stop) == (9, 1.1, ["x"])
    assert chat.stream
    assert [tool["function"]["name"] for tool in chat.offered] == ["weather"]
    filled = OllamaGenerate(prompt="a", suffix="b", stream=False).translated()
    assert isinstance(filled, CompletionRequest)
    assert (filled.suffix, filled.limit) == ("b", None)


def test_ollamas_clients_see_the_model(server: Served) -> None:
    [model] = json.loads(server.request("GET", "/api/tags")[2])["models"]
    assert (model["name"], model["details"]["family"]) == (MODEL, "llama")
    shown = answer(server, "/api/show", {"model": f"{MODEL}:latest"})
    assert shown["model_info"]["llama.context_length"] == 2048
    assert "insert" not in shown["capabilities"]
    assert "completion" in shown["capabilities"]
    status, _, body = server.post({"model": "other"}, "/api/show")
    assert status == 404
    assert "other" in body["error"]
    image = {**OLLAMA, "messages": [{**ASK[0], "images": ["aGk="]}]}
    status, _, body = server.post(image, "/api/chat")
    assert status == 400
    assert "images" in body["error"]
    assert "version" in json.loads(server.request("GET", "/api/version")[2])
