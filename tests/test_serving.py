"""The server answers as plain decoding does, in OpenAI's form; it limits sizes, time and access, and frees slots."""

import gzip
import http.client
import itertools
import json
import logging
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from medusa_cli.api import Medusa
from medusa_cli.commands.serve import fitting_limits
from medusa_cli.decode import Answer, Likelihood, Request, prefill, sequence
from medusa_cli.decode.prefill import FIRST_PIECE
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.model.vocabulary import BYTES
from medusa_cli.serve import preparation
from medusa_cli.serve.chats import ChatRequest
from medusa_cli.serve.completions import CompletionRequest
from medusa_cli.serve.metrics import Metrics
from medusa_cli.serve.openai_format import OpenAIFormat
from medusa_cli.serve.scheduler import Event, Prompt, Scheduler, Ticket
from medusa_cli.serve.server import OnceAMinute, check_certificate, listen
from tests.helpers import attach, forward, tiny_backbone, tiny_tokenizer
from tests.models import tiny_network
from tests.serving import IDS, MODEL, Served, serving, tiny_medusa

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "w1 w2"}]}
SHORT = {"model": MODEL, "prompt": IDS, "max_tokens": 1}
LONG = {"model": MODEL, "prompt": [8, 30], "max_tokens": 400}
# Fields of a chat that are refused, and the names by which they are: the field's own, or others.
WRONG: dict[str, list[Any]] = {
    "n": [0, 129], "logit_bias": [{"64": 1}], "presence_penalty": [2.5], "frequency_penalty": [-3], "min_p": [1.5],
    "repetition_penalty": [0], "min_tokens": [3], "functions": [[{"name": "f"}]], "modalities": [["audio"]],
    "top_p": [-0.1],
    "temperature": [-1, float("nan"), True], "max_tokens": [True, 0, "many"], "seed": [2**63],
    "messages": [[]], "tool_choice": ["any"],
    "continue_final_message": ["yes"],
    "response_format": [{"type": "json_object"}, {"type": "json_schema"}],  # of a tokenizer without bytes
}  # fmt: skip
WRONG_WITHIN: list[tuple[str, Any, str | None]] = [
    ("logit_bias", {"5": 101}, "logit_bias.5"),
    ("logit_bias", [[5, 101]], "logit_bias.5"),
    ("logit_bias", [[5]], "logit_bias"),
    ("tools", [{"type": "function", "function": {"name": "f g"}}], "tools.0.function.name"),
    ("tool_choice", {"type": "code_interpreter"}, "tool_choice.type"),
    ("tool_choice", "required", None),
    ("top_logprobs", 3, None),
    ("max_completion_tokens", 4, None),
    ("chat_template_kwargs", {"chat_template": "x"}, "chat_template_kwargs.chat_template"),
    ("chat_template_kwargs", {"tokenize": True}, "chat_template_kwargs.tokenize"),
    ("messages", [{"role": "tool", "content": "w1"}], "messages.0"),
    ("messages", [{"role": "narrator", "content": "w1"}], "messages.0.role"),
    ("messages", [{"role": "user"}], "messages.0"),
    ("messages", [{"role": "user", "content": 5}], "messages.0.content"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url"}]}],
        "messages.0.content.0.type",
    ),
]


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Medusa:
    return tiny_medusa(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="module")
def server(medusa: Medusa) -> Iterator[Served]:
    with serving(medusa, slots=8) as running:
        yield running


@pytest.mark.slow
def test_32_concurrent_clients_get_the_answers_of_plain_decoding(
    server: Served, medusa: Medusa
) -> None:
    prompts = [[8 + n, 9 + n % 5, 60 - n] for n in range(32)]
    client = server.openai()

    def ask(prompt: list[int]) -> tuple[list[str], str, str]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "logprobs": 0}
        if prompt[0] % 2:
            choice = client.completions.create(**body).choices[0]
            return choice.logprobs.tokens, choice.text, choice.finish_reason
        chunks = [chunk.choices[0] for chunk in client.completions.create(**body, stream=True)]
        tokens = [token for chunk in chunks for token in chunk.logprobs.tokens]
        return tokens, "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, prompts))
    for prompt, (tokens, text, reason) in zip(prompts, answers, strict=True):
        alone = medusa.generate(prompt, max_new_tokens=16)
        # The text does not show the end token, so its log probability is not listed.
        shown = alone.tokens[:-1] if alone.finish_reason == "stop" else alone.tokens
        words = [medusa.backbone.tokenizer.decode([token]) for token in shown]
        assert tokens == [*words[:1], *(f" {word}" for word in words[1:])]
        assert (text, reason) == (alone.text, alone.finish_reason)
    assert server.number("medusa_requests_running") == server.number("medusa_requests_waiting") == 0


@pytest.mark.slow
def test_streamed_chat_equals_the_whole_answer_and_counts_drafts(
    server: Served, medusa: Medusa
) -> None:
    create = server.openai().chat.completions.create
    whole = create(**CHAT, max_tokens=30)
    chunks = list(
        create(**CHAT, max_tokens=30, stream=True, stream_options={"include_usage": True})
    )
    alone = medusa.generate("w1 w2", max_new_tokens=30)
    assert whole.choices[0].message.content == alone.text
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == alone.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == alone.finish_reason
    )
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.completion_tokens == len(alone.tokens)
        assert usage.prompt_tokens == alone.prompt_tokens
        assert usage.medusa["accepted_tokens"] == alone.stats.accepted
        assert usage.medusa["drafted_tokens"] == alone.stats.drafted > 0
    pieces = [piece for chunk in chunks[1:-1] for piece in chunk.model_extra["medusa"]["pieces"]]
    assert "".join(text for text, _ in pieces) == alone.text


def test_chat_logprobs_are_the_backbones(server: Served, medusa: Medusa) -> None:
    answer = server.openai().chat.completions.create(
        **CHAT, max_tokens=12, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    alone = medusa.generate("w1 w2", max_new_tokens=12, logprobs=2)
    assert [token.logprob for token in tokens] == pytest.approx(
        [x.logprob for x in alone.likelihoods], abs=1e-4
    )
    for token in tokens:
        assert token.top_logprobs[0].token == token.token == bytes(token.bytes).decode()
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def logprobs_of(backbone, *chunks: list[Likelihood], chat: bool) -> list[dict]:
    """Returns the log probabilities of each chunk of one answer."""
    ticket = Ticket(Request((1,), 8, top=3), Answer(backbone), lambda event: None)
    body: Any = CompletionRequest(**SHORT, logprobs=3)
    if chat:
        body = ChatRequest(**CHAT, logprobs=True, top_logprobs=3)
    answer = OpenAIFormat(backbone, body, [ticket])
    events = [Event([], tuple(chunk)) for chunk in chunks]
    return [answer.chunk(0, event)["choices"][0]["logprobs"] for event in events]


@pytest.mark.slow
def test_waiting_prompts_do_not_hold_up_those_who_run(tmp_path: Path) -> None:
    """Between the prefills of two waiting requests every running one gets a step."""
    order: list[tuple[str, int]] = []
    scheduler = Scheduler(tiny_medusa(tmp_path), Metrics(), slots=3, waiting=3)
    for number in range(3):
        events: list[Event] = []

        def deliver(event: Event, number: int = number, events: list[Event] = events) -> None:
            order.append(("step" if events else "prefill", number))
            events.append(event)

        request = Request(tuple(range(5, 9 + number)), 12, stop_ids=())
        scheduler.submit([Ticket(request, Answer(scheduler._medusa.backbone), deliver)])
    scheduler.drain()
    scheduler.run()
    second, third = order.index(("prefill", 1)), order.index(("prefill", 2))
    assert ("step", 0) in order[:second]
    assert {("step", 0), ("step", 1)} <= {*order[second:third]}


@pytest.mark.slow
def test_running_requests_take_a_step_after_each_piece_of_a_long_prompt(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("medusa_cli.engine.engine.PREFILL_ROWS", 8)
    scheduler, order = Scheduler(tiny_medusa(tmp_path), Metrics(), slots=3, waiting=3), list[str]()
    tickets = []
    for name, prompt in (("short", IDS), ("long", [*range(5, 45)]), ("abandoned", [*range(6, 46)])):
        request = Request(prompt, 30, stop_ids=())
        tickets.append(
            Ticket(
                request,
                Answer(scheduler._medusa.backbone),
                lambda event, name=name: order.append(name),
            )
        )
    scheduler.submit(tickets)
    forward = scheduler._medusa.backbone.engine.forward

    def record(plan: Any, cache: Any) -> Any:
        order.append("piece" if plan.tree_mask is None and plan.tokens.shape[1] == 8 else "pass")
        tickets[2].abandoned = order.count("piece") == 7  # two pieces of its prompt are through
        return forward(plan, cache)

    monkeypatch.setattr(scheduler._medusa.backbone.engine, "forward", record)
    scheduler.drain()
    scheduler.run()
    pieces = [place for place, name in enumerate(order) if name == "piece"]
    assert len(pieces) == 7
    for before, after in itertools.pairwise(pieces):
        assert order[before:after].count("short") == 1 or "short" not in order[after:]
    assert not scheduler._running
    assert scheduler._decoder.free_slots == 3
    assert order.count("abandoned") == 1


def served_beside(
    scheduler: Scheduler, fails: Callable[[Any], bool], monkeypatch: pytest.MonkeyPatch
) -> list[list[Event]]:
    """Returns the events of two requests, the second of 20 tokens; a pass whose plan `fails` raises an error."""
    received: list[list[Event]] = [[], []]
    forward = scheduler._medusa.backbone.engine.forward

    def broken(plan: Any, cache: Any) -> Any:
        if fails(plan):
            raise RuntimeError("the machine is on fire")
        return forward(plan, cache)

    monkeypatch.setattr(scheduler._medusa.backbone.engine, "forward", broken)
    for prompt, events in zip((IDS, [*range(5, 25)]), received, strict=True):
        request = Request(prompt, 12, stop_ids=())
        scheduler.submit([Ticket(request, Answer(scheduler._medusa.backbone), events.append)])
    scheduler.drain()
    scheduler.run()
    return received


def test_failed_prompt_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(tiny_medusa(tmp_path), Metrics(), slots=2, waiting=2)
    decoder = scheduler._decoder
    rows = FIRST_PIECE
    first, second = served_beside(scheduler, lambda plan: plan.tokens.shape[1] == rows, monkeypatch)
    assert isinstance(second[-1].error, RuntimeError)
    assert len(second) == 1
    assert all(event.error is None for event in first)
    assert first[-1].last
    assert scheduler._decoder is decoder
    assert decoder.free_slots == 2


def test_old_decoder_makes_room_before_the_new_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    medusa = tiny_medusa(tmp_path)
    scheduler = Scheduler(medusa, Metrics(), slots=2, waiting=2)
    old, made, failed = weakref.ref(scheduler._decoder), medusa.decoder, []

    def make(slots: int) -> Any:
        assert old() is None
        return made(slots)

    monkeypatch.setattr(medusa, "decoder", make)

    def fails(plan: Any) -> bool:
        failed.append(plan.tokens.shape[0] == 2 and True not in failed)
        return failed[-1]

    received = served_beside(scheduler, fails, monkeypatch)
    assert True in failed
    assert [type(events[-1].error) for events in received] == [RuntimeError] * 2


def test_llama_tokens_are_decoded_in_context() -> None:
    inner = Tokenizer(
        models.BPE(
            {"<unk>": 0, "▁so": 1, "▁it": 2, "s": 3, "<0xC3>": 4, "<0xA9>": 5, "<0x73>": 6}, []
        )
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backbone = tiny_backbone()
    backbone.tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    likely = [
        Likelihood(token, -1.0, ((token, -1.0), (3, -2.0), (6, -3.0)))
        for token in (1, 2, 3, 4, 5, 2)
    ]
    words = ["so", " it", "s", "\ufffd", "\ufffd", " it"]
    (whole,), parts = (
        logprobs_of(backbone, likely, chat=False),
        logprobs_of(backbone, likely[:2], likely[2:], chat=False),
    )
    assert whole["tokens"] == words
    assert parts[0]["tokens"] + parts[1]["tokens"] == words
    assert (
        whole["text_offset"]
        == [0, 2, 5, 6, 6, 7]
        == parts[0]["text_offset"] + parts[1]["text_offset"]
    )
    assert whole["top_logprobs"][1] == {" it": -1.0, "s": -2.0}  # "s" and its byte have one text
    (chat,) = logprobs_of(backbone, likely, chat=True)
    assert [token["token"] for token in chat["content"]] == words
    assert [token["top_logprobs"][0]["token"] for token in chat["content"]] == words


@pytest.mark.slow
def test_a_seed_draws_the_same_text_in_any_company(server: Served, medusa: Medusa) -> None:
    def draw(seed: int | None) -> str:
        body = {"model": MODEL, "prompt": IDS, "max_tokens": 30, "temperature": 1.5, "seed": seed}
        return server.post(body)[2]["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(draw, [1, 2, 1, 2, 1, None, None, None]))
    assert (
        texts[0]
        == texts[2]
        == texts[4]
        == medusa.generate(IDS, max_new_tokens=30, temperature=1.5, seed=1).text
    )
    assert texts[1] == texts[3] != texts[0]
    assert len(set(texts[5:])) > 1


def test_a_stop_string_ends_the_answer_before_it(server: Served, medusa: Medusa) -> None:
    words = medusa.generate(IDS, max_new_tokens=24).text.split()
    choice = (
        server.openai()
        .completions.create(model=MODEL, prompt=IDS, max_tokens=24, stop=[words[4], "x"])
        .choices[0]
    )
    assert choice.text.split() == words[: words.index(words[4])]
    assert choice.finish_reason == "stop"


def test_the_next_turn_uses_the_prefix_cache(server: Served) -> None:
    create = server.openai().chat.completions.create
    messages = [{"role": "user", "content": " ".join(f"w{n}" for n in range(40))}]
    first = create(model=MODEL, messages=messages, max_tokens=8)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "w3"}]
    again = create(model=MODEL, messages=messages, max_tokens=8)
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


@pytest.mark.quick("fields0-rules0", "fields1-rules1")
@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({"repetition_penalty": 1.4, "min_p": 0.2}, {"repetition_penalty": 1.4, "min_p": 0.2}),
        (
            {"presence_penalty": 1.5, "frequency_penalty": 0.5},
            {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        ),
        ({"logit_bias": {"5": -100, "9": 4}}, {"logit_bias": {5: -100, 9: 4}}),
        ({"min_tokens": 12}, {"min_new_tokens": 12}),
        ({"ignore_eos": True}, {"stop_ids": ()}),
    ],
)
def test_fields_change_the_answer_as_arguments_do(
    server: Served, medusa: Medusa, fields: dict, rules: dict
) -> None:
    body = {**SHORT, "max_tokens": 16, "temperature": 1.3, "seed": 3, **fields}
    answer = server.post(body)[2]
    expected = medusa.generate(IDS, max_new_tokens=16, temperature=1.3, seed=3, **rules)
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)


def test_models_are_listed_and_others_are_not_served(server: Served) -> None:
    client = server.openai()
    assert (
        [model.id for model in client.models.list()]
        == [MODEL]
        == [client.models.retrieve(MODEL).id]
    )
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt=IDS)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [(field, value, field) for field in WRONG for value in WRONG[field]] + WRONG_WITHIN,
)
def test_invalid_field_is_refused_by_name(
    server: Served, field: str, value: object, param: str | None
) -> None:
    body = {**CHAT, "max_tokens": 2, field: value}
    status, _, answer = server.post(body, "/v1/chat/completions")
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert field in answer["error"]["message"], answer
    left_out = {**body, field: CHAT["messages"] if field == "messages" else None}
    assert server.post(left_out, "/v1/chat/completions")[0] == 200  # null is left out


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([5, -1], "prompt.1"),
        ([64], "prompt"),
        ([5, "w1"], "prompt.1"),
    ]
    + [([True], "prompt.0")],
    ids=str,
)
def test_invalid_prompt_is_refused_in_the_form_that_was_sent(
    server: Served, prompt: object, param: str
) -> None:
    status, _, answer = server.post({"model": MODEL, "prompt": prompt})
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("{", "JSON"),
        ("", "empty"),
        ("[]", "object"),
        ("\0" * 100, "JSON"),
        ("[" * 50_000, "nested"),
        (b"\xff{}", "UTF-8"),
        (gzip.compress(b"{}", mtime=0), "UTF-8"),
    ],
)
def test_malformed_body_is_refused(server: Served, body: str | bytes, fault: str) -> None:
    status, _, answer = server.post(body)
    assert status == 400, answer
    assert fault in answer["error"]["message"], answer
    assert answer["error"]["code"], answer


def test_paths_that_are_not_served_are_named(server: Served) -> None:
    for path in ("/v1/model", "/v1/embeddings"):
        status, _, text = server.request("GET", path)
        assert status == 404
        assert path in text
    status, headers, text = server.request("HEAD", "/")
    assert (status, text) == (200, "")
    assert int(headers["content-length"]) > 1000


def test_harmless_fields_are_taken(server: Served) -> None:
    unused = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "reasoning_effort": "low",
    }
    unused |= {"parallel_tool_calls": False, "prediction": {"type": "content", "content": "w1"}}
    messages = [{"role": "user", "content": "w1 w2", "name": "me"}]
    create = server.openai().chat.completions.create
    answers = [
        create(model=MODEL, messages=messages, max_tokens=4, **fields)
        for fields in ({}, {**unused, "max_completion_tokens": 4})  # two equal limits
    ]
    assert answers[0].choices == answers[1].choices


def test_the_context_is_the_models_as_far_as_memory_allows(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limits(engine: str, rows: int, context: int | None = None) -> tuple[int, int, int | None]:
        """Returns the limits of 8 slots if the memory holds this many rows."""
        backbone = tiny_backbone(engine=engine, positions=16384)
        free = rows * backbone.engine.row_bytes
        monkeypatch.setattr("medusa_cli.device.free_memory", lambda device: free)
        return fitting_limits(backbone, 8, context)

    whole = 8 * 16384
    assert limits("native", whole) == (8, 16384, None)
    assert limits("native", whole, 300) == (8, 300, None)
    assert limits("native", whole, 10**9) == (8, 16384, None)
    # One sequence may take all memory of a lazy cache.
    assert limits("native", whole // 2) == (8, 16384, 8192)
    slots, context, share = limits("native", 10_000)
    assert slots == 8
    assert 4096 < context < 10_000
    assert share == 1250
    # Every slot of another cache is as large as the largest, and has room for drafts, too.
    assert limits("eager", 2 * whole) == (8, 16384, None)
    slots, context, share = limits("eager", whole)
    assert slots == 8
    assert 8192 < context < 16384
    assert share is None
    assert limits("eager", 3 * 512, 200) == (3, 200, None)
    assert limits("eager", 0, 200) == (1, 200, None)


def test_running_states_take_memory_in_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = Backbone(tiny_network("qwen3_5_text"), tiny_tokenizer(128))
    attach(backbone, "native")
    fixed = backbone.engine.slot_bytes(256)
    row = backbone.engine.row_bytes
    assert fixed > 16 * row
    for free, slots in ((8 * fixed + 8 * 512 * row, 8), (3 * (fixed + 512 * row), 3), (0, 1)):
        monkeypatch.setattr("medusa_cli.device.free_memory", lambda device, free=free: free)
        fitting, context, share = fitting_limits(backbone, 8, None)
        assert fitting == slots
        assert context == 512
        assert share is None or slots * share * row + slots * fixed <= max(free, slots * fixed)


def test_requests_that_exceed_the_memory_together_wait(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": MODEL, "max_tokens": 60, "ignore_eos": True, "logprobs": 0}
    prompts = [[8 + n, 9, 60 - n] for n in range(6)]
    free = 100 * medusa.backbone.engine.row_bytes
    with serving(medusa, slots=4) as server, ThreadPoolExecutor(6) as pool:

        def ask(prompt: list[int]) -> Any:
            status, _, answer = server.post({**body, "prompt": prompt})
            assert status == 200
            return answer["choices"][0]["logprobs"]["tokens"]

        alone = [ask(prompt) for prompt in prompts]
        monkeypatch.setattr("medusa_cli.decode.decoder.free_memory", lambda device: free)
        assert list(pool.map(ask, prompts)) == alone
        monkeypatch.setattr("medusa_cli.decode.decoder.free_memory", lambda device: 0)
        assert server.post({**body, "prompt": [8], "max_tokens": 300})[0] == 400
        monkeypatch.undo()
        assert ask(prompts[0]) == alone[0]


def test_a_request_without_a_limit_has_the_rest_of_the_context_or_its_share(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.serve.preparation.MIN_ANSWER", 10)
    chat = {**CHAT, "ignore_eos": True, "max_tokens": None}
    path = "/v1/chat/completions"
    for share, total in ((None, 60), (40, 40)):
        with serving(medusa, context=60, share=share, max_new_tokens=None) as server:
            assert server.post(chat, path)[2]["usage"]["total_tokens"] == total
            assert server.post({**chat, "max_tokens": 9999}, path)[2]["usage"]["total_tokens"] == 60
            assert (
                server.post({**chat, "max_tokens": 3}, path)[2]["usage"]["completion_tokens"] == 3
            )
    with serving(medusa, context=60, share=1, max_new_tokens=None) as server:
        assert server.post(chat, path)[2]["usage"]["completion_tokens"] == 10


def test_one_number_is_the_context_everywhere(
    medusa: Medusa, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(medusa, context=20) as server, caplog.at_level("WARNING"):
        errors = [server.post({"prompt": [8] * count})[2]["error"] for count in (20, 21)]
        models = json.loads(server.request("GET", "/v1/models")[2])["data"]
        props = json.loads(server.request("GET", "/props")[2])["default_generation_settings"]
        slots = json.loads(server.request("GET", "/slots")[2])
        tokens = server.post({"prompt": "w1"}, "/tokenize")[2]
    given = [error["n_ctx"] for error in errors] + [slot["n_ctx"] for slot in slots]
    given += [model["max_model_len"] for model in models]
    assert {*given, props["n_ctx"], tokens["max_model_len"]} == {20}
    assert len([text for text in caplog.messages if "--context" in text]) == 1


def test_foreign_hosts_are_refused_unless_a_key_is_set(medusa: Medusa) -> None:
    own = (
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:1",
        "[::1]:8000",
        "10.0.0.7",
        "own.name",
        "A.proxy:80",
    )
    foreign = ("evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example")
    with serving(medusa, host="own.name", allowed_hosts=("a.proxy",)) as server:
        for host in own:
            assert server.request("GET", "/v1/models", headers={"Host": host})[0] == 200, host
        for host, path in itertools.product(foreign, ("/", "/v1/models")):
            status, _, text = server.request("GET", path, headers={"Host": host})
            assert status == 403
            assert host.split(":")[0] in text
    with serving(medusa, api_keys=("k",)) as server:
        for host in foreign:
            headers = {"Host": host, "Authorization": "Bearer k"}
            assert server.request("GET", "/v1/models", headers=headers)[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_choices_has_its_own_seed(
    server: Served, medusa: Medusa, stream: bool
) -> None:
    prompts = [IDS, [9, 8]]
    body = {
        "model": MODEL,
        "prompt": prompts,
        "n": 2,
        "seed": 5,
        "temperature": 1.5,
        "max_tokens": 12,
        "echo": True,
    }
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = server.openai().completions.create(**body, stream=stream, **options)
    texts, chunks = [""] * 4, list(answer) if stream else [answer]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
    rules = {"max_new_tokens": 12, "temperature": 1.5, "raw": True}
    alone = [medusa.generate(prompts[i // 2], seed=5 + i, **rules) for i in range(4)]
    assert texts == [medusa.backbone.decode(prompts[i // 2]) + alone[i].text for i in range(4)]
    assert len(set(texts)) == 4
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, sum(len(a.tokens) for a in alone))


def test_several_chats_at_the_largest_seed(server: Served) -> None:
    answer = server.openai().chat.completions.create(
        **CHAT, n=3, max_tokens=6, temperature=1, seed=2**63 - 1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_at_all_echoes_the_prompt(server: Served, stream: bool) -> None:
    body = {"model": MODEL, "prompt": ["w1 w2", "w9"], "max_tokens": 0, "echo": True}
    answer = server.openai().completions.create(**body, stream=stream)
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    assert {c.index: c.text for c in choices if c.text} == {0: "w1 w2", 1: "w9"}
    assert {c.finish_reason for c in choices} - {None} == {"length"}


def test_no_token_needs_echo(server: Served) -> None:
    status, _, answer = server.post({**SHORT, "max_tokens": 0})
    assert status == 400
    assert "echo" in answer["error"]["message"]


@pytest.mark.quick("0-True")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [0, 4])
def test_echoed_prompts_have_log_probabilities(
    server: Served, medusa: Medusa, monkeypatch: pytest.MonkeyPatch, limit: int, stream: bool
) -> None:
    monkeypatch.setattr(prefill, "PROMPT_ROWS", 3)
    body = {
        "model": MODEL,
        "prompt": "w1 w2 w3 w1 w2 w9 w8",
        "max_tokens": limit,
        "echo": True,
        "logprobs": 2,
    }
    answer = server.openai().completions.create(**body, stream=stream)
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    tokens = [token for part in parts for token in part.tokens]
    logprobs = [logprob for part in parts for logprob in part.token_logprobs]
    tops = [top for part in parts for top in part.top_logprobs]
    # Whose prompt and answer are apart by no blank.
    text = "".join(choice.text for choice in choices)
    assert "".join(tokens).replace(" ", "") == text.replace(" ", "")
    # And the token itself.
    assert logprobs[0] is tops[0] is None
    assert all(len(top) in (2, 3) for top in tops[1:])
    ids = medusa.encode(body["prompt"], raw=True)
    ids += medusa.generate(ids, max_new_tokens=4).tokens[:limit]
    with torch.inference_mode():
        own = forward(medusa.backbone, ids).logits.log_softmax(-1)
    assert len(tokens) == len(ids)
    assert logprobs[1:] == pytest.approx(
        [float(own[i, token]) for i, token in enumerate(ids[1:])], abs=1e-4
    )
    assert [offset for part in parts for offset in part.text_offset][:3] == [0, 2, 5]


def test_more_choices_than_can_ever_run_are_refused_at_once(medusa: Medusa) -> None:
    with serving(medusa, slots=2, waiting=1) as server:
        assert server.post({**SHORT, "n": 3})[0] == 200
        status, _, answer = server.post({**SHORT, "n": 4})
        assert (status, answer["error"]["param"]) == (400, "n")


@pytest.mark.slow
def test_all_names_of_the_model_are_served(medusa: Medusa) -> None:
    with serving(medusa, names=("first", "second")) as server:
        assert [model.id for model in server.openai().models.list()] == ["first", "second"]
        assert server.openai().completions.create(**{**SHORT, "model": "second"}).model == "second"
        assert server.post(SHORT)[0] == 404


def test_the_last_message_goes_on(server: Served, medusa: Medusa) -> None:
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    client = server.openai()
    body = {"model": MODEL, "messages": messages, "extra_body": {"continue_final_message": True}}
    answer = client.chat.completions.create(**body, max_tokens=6)
    text = medusa.backbone.tokenizer.apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    ids = medusa.backbone.tokenizer.encode(text, add_special_tokens=False)
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].message.content == medusa.generate(ids, max_new_tokens=6).text
    body["extra_body"]["add_generation_prompt"] = True
    with pytest.raises(openai.BadRequestError, match="add_generation_prompt"):
        client.chat.completions.create(**body)


@pytest.mark.slow
def test_template_variables_reach_the_chat_template(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %} w5{% endif %}"
    )
    monkeypatch.setattr(medusa.backbone.tokenizer, "chat_template", template)
    with serving(medusa) as server:
        for thinking, text in ((False, "w1 w2"), (True, "w1 w2 w5")):
            body = {
                "messages": CHAT["messages"],
                "chat_template_kwargs": {"enable_thinking": thinking},
            }
            _, _, answer = server.post(body, "/tokenize")
            assert server.post({"tokens": answer["tokens"]}, "/detokenize")[2]["prompt"] == text


@pytest.mark.quick("{% set n = 10 %}{{ n ** (n ** 9) }}")
@pytest.mark.parametrize(
    "fault",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = 10 %}{{ n ** (n ** 9) }}",  # which no signal would interrupt
        "{{ 'a' * 99999999999 }}",
        "{{ 'a' * 20000000 }}",
    ],
)
def test_a_hostile_template_ends_its_request_alone(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    template = f"{{% if messages[0].content == 'w9' %}}{fault}{{% else %}}w1 w2{{% endif %}}"
    monkeypatch.setattr(medusa.backbone.tokenizer, "chat_template", template)
    bad = {**CHAT, "messages": [{"role": "user", "content": "w9"}]}
    with serving(medusa, template_s=1) as server, ThreadPoolExecutor() as pool:
        refused = pool.submit(server.post, bad, "/v1/chat/completions")
        assert server.post(SHORT)[0] == 200  # meanwhile
        status, _, answer = refused.result(30)
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "template" in answer["error"]["message"]
        assert server.post({**CHAT, "max_tokens": 1}, "/v1/chat/completions")[0] == 200


@pytest.mark.quick("messages", "self")
@pytest.mark.parametrize("name", ["messages", "prompt", "model", "self"])
def test_template_variables_may_have_any_name(server: Served, name: str) -> None:
    status, _, answer = server.post(
        {**CHAT, "chat_template_kwargs": {name: 1}}, "/v1/chat/completions"
    )
    assert status in (200, 400), answer


def test_texts_are_tokenized_and_back(server: Served, medusa: Medusa) -> None:
    status, _, answer = server.post(
        {"model": MODEL, "prompt": "w1 w2", "return_token_strs": True}, "/tokenize"
    )
    ids = medusa.backbone.tokenizer.encode("w1 w2")
    assert (status, answer["count"], answer["tokens"]) == (200, len(ids), ids)
    assert answer["max_model_len"] == medusa.backbone.max_positions
    assert len(answer["token_strs"]) == len(ids)
    text = medusa.backbone.tokenizer.decode(ids)
    assert server.post({"tokens": ids}, "/detokenize")[2] == {"prompt": text, "content": text}
    assert server.request("GET", "/version")[0] == 200
    for body in (
        {"prompt": 5},
        {"prompt": "\ud800"},
        {"model": "other", "prompt": "w1"},
        {"messages": []},
        {},
    ):
        assert server.post(body, "/tokenize")[0] in (400, 404)
    for tokens in ([10**30], [64], [-1], [True], "w1"):
        status, _, refused = server.post({"tokens": tokens}, "/detokenize")
        assert status == 400
        assert refused["error"]["param"].startswith("tokens")


@pytest.mark.slow
def test_web_pages_of_an_allowed_origin_may_ask(medusa: Medusa) -> None:
    ours = "http://localhost:3000"
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    with serving(medusa, cors=(ours,), api_keys=("k",)) as server:
        for origin, allowed in ((ours, ours), ("http://evil.example", None)):
            _, headers, _ = server.request(
                "OPTIONS", "/v1/completions", headers={"Origin": origin, **preflight}
            )
            assert headers.get("access-control-allow-origin") == allowed
            status, headers, _ = server.post(SHORT, Origin=origin)
            assert (status, headers.get("access-control-allow-origin")) == (401, allowed)
    with serving(medusa, api_keys=("k",)) as server:  # pages of this machine may, without a word
        for origin, allowed in (
            (ours, ours),
            ("http://evil.example", None),
            ("http://localhost.evil.example", None),
        ):
            _, headers, _ = server.request(
                "OPTIONS", "/v1/completions", headers={"Origin": origin, **preflight}
            )
            assert headers.get("access-control-allow-origin") == allowed
        assert server.request("OPTIONS", "/v1/completions")[0] != 401


def test_https_is_served_and_a_silent_client_loses_its_connection(
    medusa: Medusa, tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(
        [*words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    check_certificate(certificate, key)
    with serving(medusa, ssl_certfile=certificate, ssl_keyfile=key, head_s=0.5) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(
            f"https://localhost:{server.port}/health", context=context
        ) as answer:
            assert answer.status == 200
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
            assert silent.recv(1) == b""


@pytest.mark.slow
def test_requests_are_logged_if_asked_for(medusa: Medusa, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "medusa_cli.serve")
    for wanted in (False, True):
        with serving(medusa, access_log=wanted) as server:
            server.post(SHORT)
            server.request("GET", "/x%1b[2J")
        lines = [
            record.getMessage()
            for record in caplog.records
            if record.name == "medusa_cli.serve.middleware"
        ]
        assert len(lines) == 2 * wanted
    assert "/v1/completions" in lines[0]
    assert "200" in lines[0]
    assert lines[1].isprintable()
    assert "404" in lines[1]


def test_requests_have_ids_in_the_answer_and_in_the_log(
    medusa: Medusa, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "medusa_cli.serve")
    with serving(medusa, access_log=True) as server:
        for path, given in (
            ("/v1/completions", "own-7"),
            ("/x", "own-8"),
            ("/v1/completions", "a b"),
            ("/x", ""),
        ):
            _, headers, _ = server.request("POST", path, SHORT, {"X-Request-Id": given})
            id = headers["x-request-id"]
            assert (id == given) == given.startswith("own")
            assert id
            assert caplog.records[-1].getMessage().endswith(id)


def test_a_unix_socket_is_served(medusa: Medusa, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with serving(medusa, path, host=""):
        connection = http.client.HTTPConnection("some.where")
        with socket.socket(socket.AF_UNIX) as connection.sock:
            connection.sock.connect(str(path))
            connection.request(
                "POST", "/v1/completions", json.dumps(SHORT), {"Content-Type": "application/json"}
            )
            assert json.load(connection.getresponse())["choices"][0]["finish_reason"] == "length"
        with pytest.raises(UsageError, match="uds"):
            listen("", 0, path)


def test_top_p_0_takes_the_likeliest_token(server: Served) -> None:
    greedy, narrow = (
        {**SHORT, "max_tokens": 12, **more} for more in ({}, {"temperature": 2, "top_p": 0})
    )
    assert (
        server.post(narrow)[2]["choices"][0]["text"] == server.post(greedy)[2]["choices"][0]["text"]
    )


def test_a_body_that_is_not_sent_as_json_is_refused_with_the_remedy(server: Served) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    status, _, text = server.request(
        "POST", "/v1/completions", {"model": MODEL, "prompt": IDS}, form
    )
    assert status == 400
    assert "Content-Type: application/json" in text


def test_events_are_ascii_because_clients_end_lines_at_other_characters(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenAIFormat, "_usage", lambda *_: {"text": "a\u2028b\u0085c"})
    body = {
        "model": MODEL,
        "prompt": IDS,
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    lines = server.request("POST", "/v1/completions", body)[2].splitlines()
    assert json.loads(lines[-4].removeprefix("data: "))["usage"] == {"text": "a\u2028b\u0085c"}


@pytest.mark.slow
def test_metrics_count_requests_and_tokens(medusa: Medusa) -> None:
    with serving(medusa) as server:
        usages = [
            server.post({"model": MODEL, "prompt": IDS, "max_tokens": 4})[2]["usage"]
            for _ in range(3)
        ]
        server.post("{")
        numbers = {
            "generated_tokens_total": sum(usage["completion_tokens"] for usage in usages),
            "prompt_tokens_total": 3 * len(IDS),
            "prompt_tokens_reused_total": 2 * (len(IDS) - 1),
            "request_seconds_count": 3,
            "first_token_seconds_count": 3,
            "queue_seconds_count": 3,
        }
        assert {name: server.number(f"medusa_{name}") for name in numbers} == numbers
        text = server.request("GET", "/metrics")[2]
        for name, field in (("draft", "drafted_tokens"), ("accepted", "accepted_tokens")):
            count = sum(usage["medusa"][field] for usage in usages)
            family = rf"vllm:spec_decode_num_{name}_tokens_total{{.*}} {float(count)}"
            assert re.search(family, text), family
        assert 'medusa_http_responses_total{code="400",path="/v1/completions"} 1.0' in text


@pytest.mark.slow
def test_metrics_count_every_route_by_its_path(medusa: Medusa) -> None:
    with serving(medusa) as server:
        paths = json.loads(server.request("GET", "/openapi.json")[2])["paths"]
        for path in paths:
            server.request("GET", path)
        text = server.request("GET", "/metrics")[2]
    fixed = [path for path in paths if "{" not in path]
    assert "/v1/responses" in fixed
    assert all(f'path="{path}"' in text for path in fixed)


def test_the_page_loads_nothing_from_elsewhere(server: Served) -> None:
    status, headers, page = server.request("GET", "/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "http://" not in page
    assert "https://" not in page
    assert "src=" not in page
    assert "@import" not in page


@pytest.fixture
def endless(medusa: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes answers as long as their limit, and steps slow."""
    monkeypatch.setitem(medusa.backbone.__dict__, "eos_ids", frozenset())
    forward = medusa.backbone.engine.forward

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return forward(*given, **named)

    monkeypatch.setattr(medusa.backbone.engine, "forward", slow)


def send(server: Served, *parts: bytes) -> socket.socket:
    """Sends raw bytes of a completion request."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    for part in parts:
        connection.sendall(part)
    return connection


def test_prompt_answer_and_body_are_limited(medusa: Medusa) -> None:
    with serving(medusa, max_body=2000, context=20, max_new_tokens=8) as server:
        status, _, answer = server.post({"model": MODEL, "prompt": [8] * 21})
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert server.post({"model": MODEL, "prompt": [8] * 20})[0] == 400
        last = server.post({"model": MODEL, "prompt": [8] * 19, "max_tokens": 9})[2]
        assert last["usage"]["completion_tokens"] == 1
        assert last["choices"][0]["finish_reason"] == "length"
        # Less than OpenAI's default of 16.
        status, _, answer = server.post({"model": MODEL, "prompt": IDS})
        assert status == 200
        assert answer["usage"]["completion_tokens"] <= 8
        answer = server.openai().completions.create(**LONG)  # a larger limit is this one
        assert answer.usage.completion_tokens == 8
        assert answer.choices[0].finish_reason == "length"
        assert server.post({"model": MODEL, "prompt": "w1 " * 1000})[0] == 413
        with send(
            server, b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n" % (3000, b" " * 3000)
        ) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_an_incomplete_body_times_out(medusa: Medusa) -> None:
    with (
        serving(medusa, body_s=0.2) as server,
        send(server, b"Content-Length: 100\r\n\r\n{") as connection,
    ):
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
        assert server.post(SHORT)[0] == 200


BUSY = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50  # more than the system buffers


@pytest.mark.quick("half a head", "unread")
@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nX-a: ", BUSY], ids=["silent", "half a head", "unread"]
)
def test_a_client_that_sends_or_reads_nothing_loses_its_connection(
    medusa: Medusa, sent: bytes
) -> None:
    with (
        serving(medusa, head_s=0.5, read_s=0.5, idle_s=60) as server,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.settimeout(0.1)
        with suppress(TimeoutError):  # a server that is not read does not read either
            connection.sendall(sent)
        assert server.server is not None
        for open in (1, 0):
            end = time.monotonic() + 10
            while server.server.connections != open:
                assert time.monotonic() < end
                time.sleep(0.01)
        assert server.post(SHORT)[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_trickling_head_does_not_move_its_deadline(medusa: Medusa, before: bytes) -> None:
    with (
        serving(medusa, head_s=0.3) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
    ):
        connection.sendall(before)
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < began + 10:
                connection.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - began < 5


@pytest.mark.usefixtures("endless")
def test_silent_connections_give_way_and_running_ones_stay(medusa: Medusa) -> None:
    with (
        serving(medusa, max_connections=3) as server,
        ThreadPoolExecutor(1) as pool,
        ExitStack() as silent,
    ):
        running = pool.submit(server.post, {**LONG, "max_tokens": 100})
        server.until("medusa_requests_running", 1)
        for _ in range(20):
            silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            assert server.request("GET", "/health")[0] == 200
        assert running.result()[2]["usage"]["completion_tokens"] == 100


def test_names_in_errors_are_cut_and_escaped(server: Served) -> None:
    for body in (
        {**SHORT, "model": "\x1b[2J" * 10_000},
        {**SHORT, "tool_choice": "a", "\x1b" * 10_000: 1, "n": 0},
    ):
        error = server.post(body)[2]["error"]
        assert len(error["param"]) <= 100
        assert len(error["message"]) < 700
        assert error["message"].isprintable()


def test_repeated_lines_are_logged_once_a_period(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("tests.repeats")
    log.addFilter(OnceAMinute(0.2))
    for _ in range(5):
        log.error("no files left\nsocket %d", 3, exc_info=OSError(24, "Too many open files"))
    time.sleep(0.2)
    log.error("no files left\nsocket %d", 4)
    log.error("another")
    assert len(caplog.messages) == 3
    assert "4 more" in caplog.messages[1]
    assert "Traceback" not in caplog.text


def test_a_wrong_key_is_refused(medusa: Medusa) -> None:
    with serving(medusa, api_keys=("söcret", "other")) as server:
        for given in (None, "Bearer secret", "Bearer ", "söcret", "Bearer Söcret"):
            # They go in UTF-8.
            headers = {} if given is None else {"Authorization": given.encode().decode("latin-1")}
            status, sent, answer = server.post(SHORT, **headers)
            assert status == 401
            assert answer["error"]["code"] == "invalid_api_key"
            assert "www-authenticate" in sent
            assert server.request("GET", "/v1/models", headers=headers)[0] == 401
            assert server.request("GET", "/health")[0] == server.request("GET", "/")[0] == 200
        with pytest.raises(openai.AuthenticationError):
            server.openai(api_key="Socret").models.list()
        for right in ("Bearer söcret", "bearer söcret", "Bearer other", "BEARER  other"):
            assert server.post(SHORT, Authorization=right.encode().decode("latin-1"))[0] == 200


@pytest.mark.quick("False")
@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(medusa: Medusa, stream: bool) -> None:
    body = json.dumps({**LONG, "stream": stream}).encode()
    request = b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    with serving(medusa, slots=1, waiting=4) as server:
        running = send(server, request)
        server.until("medusa_requests_running", 1)
        if stream:
            assert running.recv(12) == b"HTTP/1.1 200"
        waiting = send(server, request)
        server.until("medusa_requests_waiting", 1)
        waiting.close()
        server.until("medusa_requests_waiting", 0)
        assert server.number("medusa_requests_running") == 1
        running.close()
        server.until("medusa_requests_running", 0)
        assert (
            'medusa_requests_total{reason="cancelled"} 2.0' in server.request("GET", "/metrics")[2]
        )


@pytest.mark.usefixtures("endless")
def test_a_full_queue_asks_to_retry_later(medusa: Medusa) -> None:
    with serving(medusa, slots=1, waiting=1) as server, ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(server.post, {**LONG, "max_tokens": 150}) for _ in range(2)]
        server.until("medusa_requests_running", 1)
        server.until("medusa_requests_waiting", 1)
        status, headers, answer = server.post(LONG)
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert answer["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(**LONG)
        assert [answer.result()[0] for answer in busy] == [200, 200]
        assert server.post(SHORT)[0] == 200


@pytest.mark.slow
@pytest.mark.usefixtures("endless")
def test_requests_join_and_leave_a_running_batch(medusa: Medusa) -> None:
    with serving(medusa, slots=2) as server, ThreadPoolExecutor(4) as pool:
        long = pool.submit(server.post, {**LONG, "max_tokens": 120})
        server.until("medusa_requests_running", 1)
        assert server.post({**LONG, "max_tokens": 3})[0] == 200  # joins, and ends first
        assert not long.done()
        answer = long.result()[2]
        assert answer["usage"]["completion_tokens"] == 120
        assert answer["choices"][0]["text"] == medusa.generate([8, 30], max_new_tokens=120).text
        assert server.number("medusa_batch_size_count") < 120 + 3


@pytest.mark.usefixtures("endless")
def test_a_stopping_server_finishes_its_answers_and_refuses_new_ones(medusa: Medusa) -> None:
    with serving(medusa, slots=1) as server, ThreadPoolExecutor(4) as pool:
        running = pool.submit(server.openai().completions.create, **{**LONG, "max_tokens": 200})
        server.until("medusa_requests_running", 1)
        assert server.server is not None
        server.server.stop()
        status, headers, answer = server.post(LONG)
        assert (status, answer["error"]["code"]) == (503, "closing")
        assert "retry-after" in headers
        assert server.request("GET", "/health")[0] == 503
        assert running.result().usage.completion_tokens == 200


def test_a_failed_step_fails_its_requests_and_serves_the_next(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = medusa.backbone.engine.forward, []

    def broken(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the machine is on fire")
        return forward(*given, **named)

    monkeypatch.setattr(medusa.backbone.engine, "forward", broken)
    body = {**SHORT, "max_tokens": 30}
    with serving(medusa) as server:
        status, _, answer = server.post(body)
        assert status == 500
        assert "fire" not in answer["error"]["message"]
        assert (
            server.post(body)[2]["choices"][0]["text"]
            == medusa.generate(IDS, max_new_tokens=30).text
        )
        calls.clear()
        with pytest.raises(openai.APIError):
            list(server.openai().completions.create(**body, stream=True))


def scheduled(
    scheduler: Scheduler, *requests: Request, before: Callable[[Any], None] | None = None
) -> list[list[Event]]:
    """Returns the events of requests; `before` is called before each pass of the engine."""
    received: list[list[Event]] = [[] for _ in requests]
    engine = scheduler._medusa.backbone.engine
    forward = engine.forward

    def run(plan: Any, cache: Any) -> Any:
        if before is not None:
            before(plan)
        return forward(plan, cache)

    for request, events in zip(requests, received, strict=True):
        scheduler.submit([Ticket(request, Answer(scheduler._medusa.backbone), events.append)])
    scheduler.drain()
    engine.forward = run
    try:
        scheduler.run()
    finally:
        del engine.forward
    return received


def tokens_in(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.engine.engine.PREFILL_ROWS", 8)


@pytest.mark.slow
def test_short_prompt_ends_while_long_ones_are_run(tmp_path: Path, small_pieces: None) -> None:
    scheduler = Scheduler(tiny_medusa(tmp_path), Metrics(), slots=4, waiting=4)
    long = [Request([*range(n, n + 55)], 4, stop_ids=()) for n in (5, 6, 7)]
    short = Request(IDS, 3, stop_ids=())
    order: list[int] = []
    received: list[list[Event]] = [[], [], [], []]
    for number, request in enumerate((*long, short)):

        def deliver(event: Event, number: int = number) -> None:
            received[number].append(event)
            order.append(number)

        scheduler.submit([Ticket(request, Answer(scheduler._medusa.backbone), deliver)])
    scheduler.drain()
    scheduler.run()
    # The short answer is whole before the first token of a long prompt's.
    assert order[: len(received[3])] == [3] * len(received[3])
    assert received[3][-1].last
    for request, events in zip((*long, short), received, strict=True):
        alone = scheduler._medusa.generate(
            list(request.prompt), max_new_tokens=request.max_new_tokens, stop_ids=()
        )
        assert tokens_in(events) == alone.tokens


def test_a_prompt_that_the_drafter_still_reads_is_not_short() -> None:
    request = Request([*range(5, 45)], 2, stop_ids=())
    unread = [SimpleNamespace(tokens=range(30)), SimpleNamespace(tokens=range(2))]
    sequence = SimpleNamespace(tokens=[*range(5, 45)], unread=unread)
    prompt = Prompt(Ticket(request, Any, list.append), sequence, iter(()))  # type: ignore[arg-type]
    assert prompt.left == 32


@pytest.mark.slow
def test_long_prompt_goes_on_while_short_ones_arrive(tmp_path: Path, small_pieces: None) -> None:
    scheduler = Scheduler(tiny_medusa(tmp_path), Metrics(), slots=2, waiting=40)
    long = Request([*range(5, 60)], 2, stop_ids=())
    short = [Request([5 + n, 9], 1, stop_ids=()) for n in range(30)]
    order: list[str] = []
    for name, request in [("long", long), *(("short", request) for request in short)]:
        ticket = Ticket(
            request,
            Answer(scheduler._medusa.backbone),
            lambda event, name=name: order.append(name),
        )
        scheduler.submit([ticket])
    scheduler.drain()
    scheduler.run()
    assert order.index("long") < 4 * 7


@pytest.mark.slow
def test_prompt_is_cancelled_between_its_pieces(tmp_path: Path, small_pieces: None) -> None:
    scheduler = Scheduler(tiny_medusa(tmp_path), Metrics(), slots=2, waiting=2)
    tickets = []
    received: list[list[Event]] = [[], []]
    for request, events in zip(
        (Request([*range(5, 60)], 4, stop_ids=()), Request([*range(8, 60)], 4, stop_ids=())),
        received,
        strict=True,
    ):
        tickets.append(Ticket(request, Answer(scheduler._medusa.backbone), events.append))
    scheduler.submit(tickets)
    forward, passes = scheduler._medusa.backbone.engine.forward, []

    def run(plan: Any, cache: Any) -> Any:
        passes.append(plan)
        tickets[0].abandoned = len(passes) >= 4
        return forward(plan, cache)

    scheduler._medusa.backbone.engine.forward = run
    scheduler.drain()
    scheduler.run()
    del scheduler._medusa.backbone.engine.forward
    assert [event.last for event in received[0]] == [True]
    assert not tokens_in(received[0])
    assert scheduler._decoder.free_slots == 2
    assert not scheduler._prompts
    alone = scheduler._medusa.generate([*range(8, 60)], max_new_tokens=4, stop_ids=())
    assert tokens_in(received[1]) == alone.tokens


@pytest.mark.slow
def test_timed_pieces_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a prompt take about as long as asked, on an engine whose bits do not depend on them."""
    medusa = tiny_medusa(tmp_path, engine="native")
    prompt = [5 + n % 50 for n in range(300)]
    alone = medusa.generate(prompt, max_new_tokens=8, stop_ids=())
    monkeypatch.setattr(prefill, "rows_within", lambda seconds, rows, taken: max(32, rows // 2))
    rows = []
    scheduler = Scheduler(medusa, Metrics(), slots=2, waiting=2)
    [events] = scheduled(
        scheduler,
        Request(prompt, 8, stop_ids=()),
        before=lambda plan: rows.append(plan.tokens.shape[1]) if plan.is_chain else None,
    )
    assert rows[:2] == [FIRST_PIECE, 32]
    assert sum(rows) == 300
    assert tokens_in(events) == alone.tokens


def test_rows_of_a_piece_follow_the_time_that_the_last_one_took() -> None:
    assert prefill.rows_within(0.15, 128, 0.30) == 64
    assert prefill.rows_within(0.15, 128, 0.001) == 512
    assert prefill.rows_within(0.15, 128, 60.0) == 32
    assert prefill.rows_within(0.15, 16, 60.0) == prefill.MIN_PIECE


def test_without_memory_for_a_step_one_request_fails(tmp_path: Path) -> None:
    medusa = tiny_medusa(tmp_path)
    scheduler = Scheduler(medusa, Metrics(), slots=3, waiting=3)
    requests = [Request(prompt, 12, stop_ids=()) for prompt in (IDS, [*range(5, 25)], [8, 9])]
    refused = []

    def refuse(plan: Any) -> None:
        if plan.tokens.shape[0] == 3 and not refused:
            refused.append(True)
            raise MemoryError

    received = scheduled(scheduler, *requests, before=refuse)
    assert refused
    assert isinstance(received[1][-1].error, MemoryError)
    for number in (0, 2):
        alone = medusa.generate(list(requests[number].prompt), max_new_tokens=12, stop_ids=())
        assert tokens_in(received[number]) == alone.tokens


def test_without_memory_for_anything_requests_fail_and_later_ones_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    medusa = tiny_medusa(tmp_path)
    with serving(medusa, slots=2) as server:
        engine = medusa.backbone.engine
        forward = engine.forward

        def refuse(plan: Any, cache: Any) -> Any:
            raise MemoryError

        engine.forward = refuse
        for _ in range(2):
            status, headers, answer = server.post(SHORT)
            assert (status, answer["error"]["code"]) == (503, "out_of_memory")
            assert int(headers["retry-after"]) > 0
        engine.forward = forward
        assert server.post(SHORT)[0] == 200
        del engine.forward


def byte_level_backbone() -> Any:
    """Returns a backbone whose token i is byte i."""
    inner = Tokenizer(models.BPE({letter: byte for letter, byte in BYTES.items()}, []))
    inner.decoder = decoders.ByteLevel()
    backbone = tiny_backbone()
    backbone.tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    return backbone


def test_parts_of_characters_have_their_own_bytes() -> None:
    text = "aहि🙂"
    likely = [Likelihood(byte, -1.0, ((byte, -1.0), (0xE0, -2.0))) for byte in text.encode()]
    backbone = byte_level_backbone()
    (chat,) = logprobs_of(backbone, likely, chat=True)
    assert bytes(byte for token in chat["content"] for byte in token["bytes"]).decode() == text
    assert all(token["top_logprobs"][1]["bytes"] == [0xE0] for token in chat["content"])
    (completion,) = logprobs_of(backbone, likely, chat=False)
    assert bytes(byte for own in completion["bytes"] for byte in own).decode() == text


def test_byte_fallback_tokens_have_their_own_bytes() -> None:
    inner = Tokenizer(models.BPE({"<unk>": 0, "▁it": 1, "<0xC3>": 2, "<0xA9>": 3}, []))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backbone = tiny_backbone()
    backbone.tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    (chat,) = logprobs_of(backbone, [Likelihood(id, -1.0) for id in (1, 2, 3)], chat=True)
    assert [token["bytes"] for token in chat["content"]] == [list(b" it"), [0xC3], [0xA9]]


@pytest.fixture(scope="module")
def ending(medusa: Medusa) -> tuple[int, list[int]]:
    """Returns a token that answers end with, and the tokens before it."""
    whole = medusa.generate(IDS, max_new_tokens=12, stop_ids=()).tokens
    end = next(token for token in whole[2:] if token not in whole[:2])
    return end, whole[: whole.index(end)]


@pytest.mark.quick(
    "fields0-False-True", "fields2-False-True", "fields3-False-False", "fields4-False-True"
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, False),
        ({"include_stop_str_in_output": True}, True),
        ({"skip_special_tokens": False}, False),
        ({"return_token_ids": True}, False),
        ({"ignore_eos": True}, False),
    ],
)
def test_log_probabilities_are_those_of_the_texts_tokens(
    server: Served, ending: tuple[int, list[int]], fields: dict, shown: bool, stream: bool
) -> None:
    end, before = ending
    body = {**SHORT, "max_tokens": 12, "logprobs": 1, "stop_token_ids": [end], **fields}
    answer = answered(server, body, stream)
    assert "".join(answer["tokens"]) == answer["text"]
    assert len(answer["tokens"]) == len(before) + shown
    assert answer["finish_reason"] == "stop"
    if "return_token_ids" in fields:
        assert answer["ids"] == [*before, end]


def answered(server: Served, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """Returns text, log probabilities and token ids of an answer, joined from its chunks if it is streamed."""
    if stream:
        _, _, text = server.request("POST", "/v1/completions", {**body, "stream": True})
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
    else:
        choices = server.post(body)[2]["choices"]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return {
        "text": "".join(choice["text"] for choice in choices),
        "tokens": [token for part in parts for token in part["tokens"]],
        "offsets": [place for part in parts for place in part["text_offset"]],
        "ids": [id for choice in choices for id in choice.get("token_ids", ())],
        "finish_reason": choices[-1]["finish_reason"],
        "chunks": choices,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_echo_lists_every_token_with_its_text(
    server: Served, ending: tuple[int, list[int]], stream: bool
) -> None:
    end, before = ending
    body = {**SHORT, "max_tokens": 12, "logprobs": 1, "stop_token_ids": [end], "echo": True}
    answer = answered(server, body, stream)
    assert len(answer["tokens"]) == len(IDS) + len(before) + 1
    # Prompt and answer are decoded apart, so there may be no blank between them.
    assert "".join(answer["tokens"][:-1]).split() == answer["text"].replace("w", " w").split()
    if stream:
        # The prompt's log probabilities come with its text.
        first = answer["chunks"][0]
        assert len(first["logprobs"]["tokens"]) == len(IDS)
        assert "".join(first["logprobs"]["tokens"]) == first["text"]


def test_limits_of_a_request_are_named(server: Served) -> None:
    wrong = {
        "stop": ["x" * 1000 + str(n) for n in range(40)],
        "logit_bias": {str(n): 1 for n in range(5000)},
        "stop_token_ids": [0] * 1025,
    }
    for field, value in wrong.items():
        status, _, answer = server.post({**SHORT, field: value})
        assert status == 400, answer
        assert field in answer["error"]["message"], answer
        limit = {"stop": "32,768", "logit_bias": "4,096", "stop_token_ids": "1024"}[field]
        assert limit in answer["error"]["message"]


def test_a_large_body_is_refused_by_field_as_a_small_one_is(server: Served) -> None:
    text = "w1 " * 10_000
    for body, param in (
        ({**CHAT, "messages": [{"role": "narrator", "content": text}]}, "messages.0.role"),
        ({**CHAT, "messages": [{"role": "user", "content": text}], "n": 0}, "n"),
    ):
        status, _, answer = server.post(body, "/v1/chat/completions")
        assert (status, answer["error"]["param"]) == (400, param)
    status, _, answer = server.post("{" + text, "/v1/chat/completions")
    assert (status, answer["error"]["code"]) == (400, "invalid_json")
    body = {"messages": [{"role": "user", "content": text}], "return_token_strs": True}
    assert server.post(body, "/tokenize")[2]["count"] > 10_000


@pytest.mark.slow
def test_health_is_answered_while_large_requests_are_prepared(server: Served) -> None:
    """One client's stop strings, biases, messages and choices do not hold up others."""
    stops = [f"{n} " + "x" * 25 for n in range(1000)]
    requests = [
        ({**SHORT, "n": 30, "stop": stops}, "/v1/completions"),
        ({**SHORT, "logit_bias": {str(n): 1 for n in range(64)}, "n": 30}, "/v1/completions"),
        (
            {**CHAT, "messages": [{"role": "user", "content": "w1"}] * 20_000, "max_tokens": 1},
            "/v1/chat/completions",
        ),
        ({**SHORT, "prompt": [5] * 200_000}, "/v1/completions"),
    ]
    waited = []
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(server.post, body, path) for body, path in requests]
        while not all(answer.done() for answer in answers):
            started = time.monotonic()
            assert server.request("GET", "/health")[0] == 200
            waited.append(time.monotonic() - started)
    assert [answer.result()[0] for answer in answers][:2] == [200, 200]
    # Generous: on a quiet machine it is some milliseconds.
    assert max(waited) < 2


def test_choices_are_prepared_once_and_beside_the_decoder(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = {"stops": [], "processors": []}

    def recorded(name: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            threads[name].append(threading.current_thread().name)
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(preparation, "StopStrings", recorded("stops", preparation.StopStrings))
    processors = recorded("processors", sequence.sequence_processors)
    monkeypatch.setattr(sequence, "sequence_processors", processors)
    body = {**SHORT, "n": 5, "stop": ["x"], "logit_bias": {"5": 1}, "max_tokens": 4}
    assert len(server.post(body)[2]["choices"]) == 5
    for names in threads.values():
        assert len(names) == 1
        assert "AnyIO worker" in names[0]
