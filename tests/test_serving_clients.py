"""The server takes what clients of OpenAI, vLLM and llama.cpp send, and answers in the shapes that they read."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from medusa_cli.api import Medusa
from medusa_cli.loading import LoadedModel
from medusa_cli.serve import neutral
from medusa_cli.serve.chats import ChatRequest
from medusa_cli.serve.completions import CompletionRequest
from medusa_cli.serve.infill import TOKENS, infill_ids
from medusa_cli.serve.tools import MARKERS
from tests.helpers import byte_backbone, save_model, save_run, tiny_backbone
from tests.serving import IDS, MODEL, Served, serving, tiny_medusa

pytest.importorskip("llguidance")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 6}
SHORT = {"model": MODEL, "prompt": IDS, "max_tokens": 12}
# Fields as clients send them, which change nothing.
NEUTRAL: dict[str, Any] = {
    "cache_prompt": True, "stop_token_ids": [], "skip_special_tokens": True, "top_k": -1, "best_of": 1, "seed": -1,
    "use_beam_search": False, "length_penalty": 1, "typical_p": 1.0, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5.0,
    "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": ["\n"], "xtc_probability": 0, "xtc_threshold": 0.1,
    "dynatemp_range": 0, "prompt_cache_key": "a", "prompt_cache_retention": "24h", "safety_identifier": "a",
    "verbosity": "low", "reasoning": {"effort": "low"}, "include_reasoning": False, "extra_body": {}, "options": {},
    "provider": {"order": ["a"]}, "transforms": ["middle-out"], "chat_id": "a", "session_id": "a", "id": "a",
    "keep_alive": "5m", "priority": 0, "request_id": "a", "return_progress": False, "timings_per_token": True,
    "repeat_last_n": 64, "repeat_penalty": 1.0, "include_stop_str_in_output": False, "echo": False, "id_slot": -1,
    "logprobs": False, "spaces_between_special_tokens": True, "user": "me", "metadata": {"a": "b"}, "store": True,
    "service_tier": "auto", "n_probs": 0, "min_keep": 0, "logit_bias": {}, "stop": [], "ignore_eos": False,
}  # fmt: skip
NEUTRAL_IN_CHATS: dict[str, Any] = {
    "modalities": ["text"], "thinking": {"type": "disabled"}, "web_search_options": {}, "functions": [], "tools": [],
    "function_call": "none", "reasoning_effort": "low", "top_logprobs": 0, "tool_choice": "auto", "documents": [],
    "parallel_tool_calls": True, "response_format": {"type": "text"}, "chat_template_kwargs": {}, "n_predict": -1,
    "add_special_tokens": False, "prediction": {"type": "content", "content": "w1"},
}  # fmt: skip
# Values with which a field would change the answer.
EFFECTIVE: dict[str, Any] = {
    "mirostat": 2, "xtc_probability": 0.5, "typical_p": 0.9, "use_beam_search": True, "best_of": 3, "tfs_z": 0.5,
    "dry_multiplier": 0.8, "extra_body": {"top_k": 1}, "dynatemp_range": 1, "bad_words": ["a"],
    "stop_words": ["a"], "rep_pen": 1.2, "typical": 0.5, "n_probs": 2, "negative_prompt": "a", "t_max_predict_ms": 9,
}  # fmt: skip
EFFECTIVE_IN_CHATS: dict[str, Any] = {
    "modalities": ["text", "audio"], "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
}  # fmt: skip


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Medusa:
    return tiny_medusa(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def server(medusa: Medusa) -> Iterator[Served]:
    with serving(medusa, slots=4) as running:
        yield running


def chat_of(server: Served, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    status, _, body = server.post({**CHAT, **fields}, path)
    assert status == 200, body
    return body


def completion(server: Served, **fields: Any) -> dict[str, Any]:
    status, _, body = server.post({**SHORT, **fields})
    assert status == 200, body
    return body


def chunks_of(
    server: Served, body: dict[str, Any], path: str = "/v1/completions"
) -> list[dict[str, Any]]:
    status, _, text = server.request("POST", path, {**body, "stream": True})
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_neutral_fields_change_nothing(server: Served) -> None:
    plain, text = chat_of(server)["choices"], completion(server)["choices"]
    assert chat_of(server, **NEUTRAL, **NEUTRAL_IN_CHATS)["choices"] == plain
    assert completion(server, **NEUTRAL)["choices"] == text


@pytest.mark.parametrize("field", [*NEUTRAL, *NEUTRAL_IN_CHATS])
def test_each_neutral_field_is_taken_alone(field: str) -> None:
    value = {**NEUTRAL, **NEUTRAL_IN_CHATS}[field]
    ChatRequest(**{**CHAT, field: value})
    if field in NEUTRAL:
        CompletionRequest(**{**SHORT, field: value})


@pytest.mark.parametrize("field", [*EFFECTIVE, *EFFECTIVE_IN_CHATS])
def test_fields_that_would_change_the_answer_are_refused_by_name(
    server: Served, field: str
) -> None:
    value = {**EFFECTIVE, **EFFECTIVE_IN_CHATS}[field]
    requests: list[tuple[Any, str]] = [({**CHAT, field: value}, "/v1/chat/completions")]
    if field in EFFECTIVE:
        requests.append(({**SHORT, field: value}, "/v1/completions"))
    for body, path in requests:
        status, _, answer = server.post(body, path)
        assert (status, answer["error"]["param"]) == (400, field)


def test_a_window_of_penalties_needs_no_penalty(server: Served) -> None:
    for fields, status in (
        ({"repeat_penalty": 1.1}, 400),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, 200),
    ):
        assert (
            server.post({**CHAT, "repeat_last_n": 64, **fields}, "/v1/chat/completions")[0]
            == status
        )


def test_unused_fields_are_logged_once(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "medusa_cli.serve")
    neutral._logged.clear()
    for _ in range(2):
        chat_of(server, keep_alive="5m", top_k=-1, chat_id="b")
    lines = [line for line in caplog.messages if "keep_alive" in line or "chat_id" in line]
    assert len(lines) == 2
    assert not any("top_k" in line for line in caplog.messages)


def test_the_only_model_needs_no_name(server: Served) -> None:
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", SHORT),
        ("/v1/responses", {"input": "w1"}),
    ):
        status, _, answer = server.post({**body, "model": None}, path)
        assert (status, answer["model"]) == (200, MODEL), answer


MARKED = {
    "role": "assistant", "content": "w3", "reasoning": "w5", "refusal": None, "cache_control": {"type": "ephemeral"},
    "provider_specific_fields": {"refusal": None}, "reasoning_content": "w5", "annotations": [], "tool_calls": [],
    "function_call": None, "audio": None, "thinking_blocks": [], "reasoning_details": [],
}  # fmt: skip


def test_marks_of_clients_in_messages_change_nothing(server: Served) -> None:
    def ask(assistant: dict[str, Any], *parts: dict[str, Any]) -> dict[str, Any]:
        content = [{"type": "text", "text": "w1", **part} for part in parts or ({},)]
        messages = [
            {"role": "user", "content": content},
            assistant,
            {"role": "user", "content": "w2"},
        ]
        return chat_of(server, messages=messages)["choices"]

    plain = ask({"role": "assistant", "content": "w3"})
    assert ask(MARKED, {"cache_control": {"type": "ephemeral"}}) == plain
    assert ask({"role": "assistant", "content": None}) == ask({"role": "assistant", "content": ""})


@pytest.mark.slow
def test_reasoning_reaches_templates_that_read_it(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}{{ m.content }} {{ m.reasoning_content }} {% endfor %}{{ documents }}"
    monkeypatch.setattr(medusa.backbone.tokenizer, "chat_template", template)
    with serving(medusa) as server:
        for field in ("reasoning_content", "reasoning"):
            body = {
                "messages": [{"role": "assistant", "content": "w1", field: "w7"}],
                "documents": [{"text": "w9"}],
            }
            status, _, answer = server.post(body, "/apply-template")
            assert status == 200
            assert answer["prompt"].startswith("w1 w7")
            assert "w9" in answer["prompt"]


@pytest.mark.parametrize("arguments", ['{"city": "', "[" * 100_000, "[1]", {"city": "Oslo"}, ""])
def test_any_call_of_the_past_is_taken(server: Served, arguments: Any) -> None:
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
        "index": 0,
    }
    call["provider_specific_fields"] = {"thought": "a"}
    messages = [
        *CHAT["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "provider_specific_fields": None,
        },
        {"role": "tool", "tool_call_id": "a", "content": "w4", "name": "f"},
    ]
    status, _, answer = server.post({**CHAT, "messages": messages}, "/apply-template")
    shown = json.dumps(arguments) if isinstance(arguments, dict) else json.dumps(arguments or {})
    assert status == 200
    assert shown in answer["prompt"]


def test_a_broken_call_is_taken_as_an_item_of_the_past(server: Served) -> None:
    items = [
        {"role": "user", "content": "w1"},
        {
            "type": "function_call",
            "call_id": "a",
            "name": "f",
            "arguments": '{"city": "',
            "status": "incomplete",
        },
        {"type": "function_call_output", "call_id": "a", "output": "w4"},
    ]
    assert server.post({"input": items, "max_output_tokens": 2}, "/v1/responses")[0] == 200


def test_first_forms_of_calls_and_results_are_taken(server: Served) -> None:
    call = {"name": "f", "arguments": "{}"}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "w4"},
    ]
    now = [
        *CHAT["messages"],
        {"role": "assistant", "tool_calls": [{"id": "", "function": call}]},
        {"role": "tool", "tool_call_id": "", "name": "f", "content": "w4"},
    ]
    prompts = [
        server.post({"messages": given}, "/apply-template")[2]["prompt"]
        for given in (messages, now)
    ]
    assert prompts[0] == prompts[1]
    assert "w4" in prompts[0]


def test_responses_take_what_bridges_send(server: Served) -> None:
    fields = {
        "include": ["reasoning.encrypted_content"],
        "truncation": "auto",
        "background": False,
        "store": False,
    }
    fields |= {
        "reasoning": {"effort": "low"},
        "prompt_cache_key": "a",
        "top_logprobs": 0,
        "max_tool_calls": 3,
    }
    item = {
        "role": "user",
        "content": [{"type": "input_text", "text": "w1", "cache_control": {}}],
        "id": "a",
    }
    body = {"model": MODEL, "input": [item], "max_output_tokens": 4}
    plain, given = (server.post({**body, **more}, "/v1/responses") for more in ({}, fields))
    assert plain[0] == given[0] == 200
    assert plain[2]["output"][0]["content"] == given[2]["output"][0]["content"]


def words(medusa: Medusa, **rules: Any) -> list[str]:
    return medusa.generate(IDS, max_new_tokens=12, **rules).text.split()


@pytest.mark.parametrize("stream", [False, True])
def test_stop_token_ids_end_the_answer_before_them(
    server: Served, medusa: Medusa, stream: bool
) -> None:
    whole = words(medusa)
    id = medusa.backbone.tokenizer.convert_tokens_to_ids(whole[3])
    for more, text in (({}, whole[:3]), ({"include_stop_str_in_output": True}, whole[:4])):
        body = {**SHORT, "stop_token_ids": [id], "ignore_eos": True, **more}
        parts = chunks_of(server, body) if stream else [completion(server, **body)]
        choices = [choice for part in parts for choice in part["choices"]]
        assert "".join(choice["text"] for choice in choices).split() == text
        assert choices[-1]["finish_reason"] == "stop"
    for wrong in ([64], [-1], ["w1"]):
        status, _, answer = server.post({**SHORT, "stop_token_ids": wrong})
        assert status == 400
        assert answer["error"]["param"].startswith("stop_token_ids")


def test_a_stop_string_may_be_part_of_the_answer(server: Served, medusa: Medusa) -> None:
    whole = words(medusa)
    stops = [f"no{number}" for number in range(200)] + [whole[4]]
    for included, count in ((False, 4), (True, 5)):
        answer = completion(server, stop=stops, include_stop_str_in_output=included)["choices"][0]
        assert answer["text"].split() == whole[:count]
        assert answer["finish_reason"] == "stop"


def test_special_tokens_are_shown_if_asked_for(server: Served) -> None:
    body = {"logit_bias": {"3": 100}, "max_tokens": 3, "ignore_eos": True}
    assert completion(server, **body)["choices"][0]["text"] == ""
    assert "<start>" in completion(server, **body, skip_special_tokens=False)["choices"][0]["text"]
    ends = {"logit_bias": {"2": 100}, "skip_special_tokens": False}
    assert completion(server, **ends)["choices"][0]["text"] == ""  # the end is none of the answer


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"repeat_penalty": 1.4}, {"repetition_penalty": 1.4}),
        (
            {"repeat_penalty": 1.4, "repetition_penalty": 1.4, "n_predict": 12},
            {"repetition_penalty": 1.4},
        ),
        ({"n_predict": 5, "max_tokens": None}, {"max_tokens": 5}),
        ({"prompt": [5, 9, 9, 9, *IDS], "truncate_prompt_tokens": 5}, {}),
        ({"truncate_prompt_tokens": -1}, {}),
        ({"n": 2}, {}),  # greedily
        ({"no_repeat_ngram_size": 0}, {}),
    ],
    ids=str,
)
def test_other_words_mean_the_same(
    server: Served, fields: dict[str, Any], same: dict[str, Any]
) -> None:
    answers = {choice["text"] for choice in completion(server, **fields)["choices"]}
    assert answers == {completion(server, **same)["choices"][0]["text"]}


@pytest.mark.slow
def test_more_tokens_than_the_server_gives_are_no_fault_of_the_minimum(medusa: Medusa) -> None:
    with serving(medusa, max_new_tokens=9) as server:
        answer = completion(server, min_tokens=10_000, max_tokens=10_000)
        assert answer["usage"]["completion_tokens"] == 9
        assert server.post({**SHORT, "min_tokens": 13})[0] == 400
        assert completion(server, max_tokens=-1, ignore_eos=True)["usage"]["completion_tokens"] == 9


@pytest.mark.slow
def test_a_prompt_beyond_the_context_is_refused_with_its_length(medusa: Medusa) -> None:
    with serving(medusa, context=20) as server:
        for path, body in (
            ("/v1/completions", {**SHORT, "prompt": [8] * 21}),
            ("/v1/responses", {"input": "w1 " * 30}),
        ):
            status, _, answer = server.post(body, path)
            error = answer["error"]
            assert (status, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 20)
            assert error["code"] == "context_length_exceeded"
            assert error["n_prompt_tokens"] > 20
        assert (
            completion(server, prompt=[8] * 21, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"]
            == 19
        )


@pytest.mark.parametrize(
    "fields",
    [
        '"metadata": {"k": "\\ud800"}',
        '"metadata": {"k": NaN}',
        '"tools": [{"type": "function", "name": "f", "parameters": {"default": NaN}}]',
    ],
)
def test_what_json_cannot_hold_is_refused_before_the_answer(server: Served, fields: str) -> None:
    status, _, _ = server.post(f'{{"input": "w1", {fields}}}', "/v1/responses")
    assert status == 400
    body = {"input": "w1", "max_output_tokens": 2, "metadata": {"k": "v"}}
    assert server.post(body, "/v1/responses")[2]["metadata"] == {"k": "v"}
    items = [{"type": None, "role": "user", "content": "w1"}]
    assert server.post({**body, "input": items}, "/v1/responses")[0] == 200


def test_the_chosen_token_is_always_among_the_log_probabilities(server: Served) -> None:
    for count in (0, 1):
        logprobs = completion(server, logprobs=count, temperature=2, seed=1)["choices"][0][
            "logprobs"
        ]
        for token, own, top in zip(
            *(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert top[token] == own
            assert len(top) <= count + 1


def test_offsets_are_places_in_the_text(server: Served, medusa: Medusa) -> None:
    prompt = [3, 5, 9, 2, 20]
    for skip in (True, False):
        fields = {
            "prompt": prompt,
            "echo": True,
            "logprobs": 0,
            "skip_special_tokens": skip,
            "max_tokens": 1,
        }
        [choice] = completion(server, **fields)["choices"]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        for token, place in zip(tokens[:5], offsets, strict=False):
            shown = not (skip and token.strip().startswith("<"))
            assert not shown or choice["text"][place:].strip().startswith(token.strip()), (
                token,
                place,
                choice,
            )


def test_prompts_have_log_probabilities_in_vllms_form(server: Served) -> None:
    echoed = completion(server, echo=True, logprobs=2, max_tokens=1)["choices"][0]["logprobs"][
        "token_logprobs"
    ]
    answer = completion(server, prompt_logprobs=2, logprobs=1, n=2)
    for choice in answer["choices"]:
        rows = choice["prompt_logprobs"]
        assert rows[0] is None
        assert len(rows) == len(IDS)
        assert len(choice["logprobs"]["tokens"]) == 12
        for row, token, logprob in zip(rows[1:], IDS[1:], echoed[1:], strict=False):
            assert row[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4)
            assert 2 <= len(row) <= 3
            assert {entry["rank"] for entry in row.values()} >= {1, 2}
    assert all(
        max(len(top) for top in choice["logprobs"]["top_logprobs"]) <= 2
        for choice in answer["choices"]
    )
    plain = chat_of(server, prompt_logprobs=0)
    assert plain["prompt_logprobs"][0] is None
    assert plain["choices"][0]["logprobs"] is None
    assert server.post({**SHORT, "prompt_logprobs": 1, "stream": True})[0] == 400


def test_token_ids_are_returned_if_asked_for(server: Served, medusa: Medusa) -> None:
    alone = medusa.generate(IDS, max_new_tokens=12)
    # The first texts wait until this is no stop string.
    ids, waiting = (
        alone.tokens,
        f"{alone.text[:12]} never",
    )
    [choice] = completion(server, return_token_ids=True)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (IDS, ids)
    chunks = chunks_of(server, {**SHORT, "return_token_ids": True, "stop": waiting})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["prompt_token_ids"] == IDS
    assert [id for choice in choices for id in choice.get("token_ids", ())] == ids
    whole = chat_of(server, return_token_ids=True)
    assert whole["prompt_token_ids"]
    assert len(whole["choices"][0]["token_ids"]) == whole["usage"]["completion_tokens"]
    assert "token_ids" not in completion(server)["choices"][0]


def test_guidellm_counts_tokens_by_its_body(server: Served) -> None:
    body = {
        "max_tokens": 6,
        "max_completion_tokens": 6,
        "ignore_eos": True,
        "stop": None,
        "stream": True,
    }
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = chunks_of(server, {**CHAT, **body}, "/v1/chat/completions")
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 6
    assert (
        sum(
            bool(chunk["choices"][0]["delta"].get("content"))
            for chunk in chunks
            if chunk["choices"]
        )
        >= 1
    )


def test_usage_comes_with_each_chunk_if_asked_for(server: Served) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = chunks_of(server, {**SHORT, **options, "ignore_eos": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"]["prompt_tokens"] == len(IDS) for chunk in chunks)


def test_answers_name_what_made_them(server: Served) -> None:
    names = {chat_of(server)["system_fingerprint"], completion(server)["system_fingerprint"]}
    names |= {chunk["system_fingerprint"] for chunk in chunks_of(server, SHORT)}
    assert len(names) == 1
    assert names.pop().startswith("fp_")


def test_a_chat_may_echo_its_last_message(server: Served) -> None:
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    fields = {"messages": messages, "continue_final_message": True}
    alone, echoed = (
        chat_of(server, **fields, echo=echo)["choices"][0]["message"]["content"]
        for echo in (False, True)
    )
    assert echoed == "w2 w3" + alone
    chunks = chunks_of(server, {**CHAT, **fields, "echo": True}, "/v1/chat/completions")
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == echoed
    fields = {"echo": True, "add_generation_prompt": False}
    assert chat_of(server, **fields)["choices"][0]["message"]["content"].startswith("w1 w2")


def test_paths_are_served_without_a_version(server: Served) -> None:
    assert chat_of(server, "/chat/completions")["choices"] == chat_of(server)["choices"]
    assert server.post(SHORT, "/completions")[2]["choices"] == completion(server)["choices"]
    assert server.post({"input": "w1"}, "/responses")[0] == 200
    [model] = json.loads(server.request("GET", "/models")[2])["data"]
    assert model["id"] == MODEL
    assert server.request("GET", f"/models/{MODEL}")[0] == 200


def test_models_tell_their_sizes(server: Served, medusa: Medusa) -> None:
    [model] = json.loads(server.request("GET", "/v1/models")[2])["data"]
    assert model["max_model_len"] == medusa.backbone.max_positions == model["meta"]["n_ctx_train"]
    props = json.loads(server.request("GET", "/props")[2])
    assert props["default_generation_settings"]["n_ctx"] == model["max_model_len"]
    assert props["total_slots"] == 4
    assert props["chat_template"]
    assert props["eos_token"] == "<end>"
    assert str(medusa.backbone.id) not in json.dumps(props)
    with serving(medusa, context=28) as small:
        assert json.loads(small.request("GET", "/v1/models")[2])["data"][0]["max_model_len"] == 28


def test_slots_tell_what_runs_without_its_text(server: Served) -> None:
    slots = json.loads(server.request("GET", "/slots")[2])
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert not any(slot["is_processing"] for slot in slots)
    assert server.request("POST", "/slots")[0] == 405


def test_templates_are_applied(server: Served) -> None:
    status, _, answer = server.post({**CHAT, "temperature": 0}, "/apply-template")  # a whole chat
    _, _, tokens = server.post({"messages": CHAT["messages"]}, "/tokenize")
    assert status == 200
    assert (
        server.post({"prompt": answer["prompt"], "add_special_tokens": False}, "/tokenize")[2][
            "tokens"
        ]
        == tokens["tokens"]
    )
    assert (
        server.post({"model": "other", "messages": CHAT["messages"]}, "/apply-template")[0] == 404
    )


def test_keys_come_in_two_headers(medusa: Medusa) -> None:
    with serving(medusa, api_keys=("k",)) as server:
        for headers, status in (
            ({"x-api-key": "k"}, 200),
            ({"x-api-key": "j"}, 401),
            ({"Authorization": "k"}, 401),
        ):
            assert server.post(SHORT, **headers)[0] == status
        assert server.post(SHORT, **{"Authorization": "Bearer j", "x-api-key": "k"})[0] == 401
        for path in ("/props", "/slots"):
            assert server.request("GET", path)[0] == 401


def vllm_figures(page: str) -> tuple[int, int, int, dict[int, int]]:
    """Returns drafts, draft tokens, accepted ones and those by position, read line by line as vLLM's bench does."""
    drafts = draft_tokens = accepted = 0
    by_position: dict[int, int] = {}
    for line in page.split("\n"):
        if not line.startswith("vllm:spec_decode"):
            continue
        value = int(float(line.split()[-1]))
        if "num_drafts" in line:
            drafts += value
        elif "num_draft_tokens" in line:
            draft_tokens += value
        elif "num_accepted_tokens_per_pos" in line:
            position = int(line.split('position="')[1].split('"')[0])
            by_position[position] = by_position.get(position, 0) + value
        elif "num_accepted_tokens" in line:
            accepted += value
    return drafts, draft_tokens, accepted, by_position


@pytest.mark.slow
def test_vllms_bench_reads_the_counters_of_drafts(medusa: Medusa) -> None:
    with serving(medusa) as server:
        assert vllm_figures(server.request("GET", "/metrics")[2]) == (0, 0, 0, {})
        figures = [
            completion(
                server,
                max_tokens=60,
                ignore_eos=True,
                prompt=[n, *IDS],
                speculative={"figures": True},
            )
            for n in (8, 9, 10)
        ]
        page = server.request("GET", "/metrics")[2]
    own = [figure["usage"]["medusa"] for figure in figures]
    drafts, draft_tokens, accepted, by_position = vllm_figures(page)
    metrics = [figure["metrics"]["speculative_decoding"] for figure in figures]
    sums = {name: sum(one[name] for one in metrics) for name in metrics[0] if "num_" in name}
    assert sums["num_spec_steps"] == drafts
    assert sums["num_draft_tokens"] == draft_tokens
    assert sums["num_accepted_draft_tokens"] == accepted
    for one in metrics:
        histogram = one["acceptance_histogram"]
        assert sum(histogram) == one["num_spec_steps"]
        assert min(histogram) >= 0
        accepted_here = sum(count * steps for count, steps in enumerate(histogram))
        assert accepted_here == one["num_accepted_draft_tokens"]
    assert drafts == sum(one["drafts"] for one in own) > 0
    assert draft_tokens == sum(one["drafted_tokens"] for one in own)
    assert accepted == sum(one["accepted_tokens"] for one in own) == sum(by_position.values()) > 0
    assert sum(sum(one["accepted_per_pos"]) for one in own) == accepted
    assert [*by_position] == [*range(len(by_position))]
    assert by_position[0] <= drafts
    assert 'model_name="tiny"' in page
    assert "spec_decode_num_drafts_created" not in page


@pytest.mark.parametrize("given", [False, {"enabled": False, "figures": True}])
def test_a_request_may_decode_plainly(server: Served, given: Any) -> None:
    drafted, plain = (
        completion(server, max_tokens=60, speculative=speculative) for speculative in (True, given)
    )
    assert plain["choices"] == drafted["choices"]
    figures = plain["usage"]["medusa"]
    assert figures["drafted_tokens"] == 0
    assert figures["steps"] == plain["usage"]["completion_tokens"] - 1
    assert drafted["usage"]["medusa"]["drafted_tokens"] > 0
    assert "metrics" in drafted
    assert "metrics" not in plain
    assert figures.get("accepted_per_pos", []) == []
    assert "accepted_per_pos" not in drafted["usage"]["medusa"]
    fields = {"input": "w1", "max_output_tokens": 8, "speculative": {"figures": True}}
    assert server.post(fields, "/v1/responses")[2]["usage"]["medusa"]["drafts"] > 0


@pytest.mark.slow
def test_plain_requests_decode_beside_drafting_ones(medusa: Medusa) -> None:
    requests = [
        medusa.request([n, *IDS], max_new_tokens=30, speculative=n % 2 == 0) for n in range(8, 12)
    ]
    decoder, tokens = medusa.decoder(4), dict[int, list[int]]()
    for sequence, step in decoder.run(requests):
        tokens.setdefault(sequence.number, []).extend(step.tokens)
        assert sequence.number % 2 == 0 or step.nodes == 1
    assert [*tokens.values()] == [
        medusa.generate(request.prompt, max_new_tokens=30).tokens for request in requests
    ]


def test_the_middle_is_filled_in_where_the_model_can() -> None:
    backbone = byte_backbone()
    with serving(Medusa(LoadedModel(backbone))) as server:
        status, _, answer = server.post({"prompt": "a", "suffix": "b", "max_tokens": 2})
        assert (status, answer["error"]["param"]) == (400, "suffix")
        assert server.post({"prompt": "a", "suffix": "", "max_tokens": 2})[0] == 200
    for names in TOKENS:
        backbone = added_backbone(names)
        ids = infill_ids(backbone, "ab", "cd")
        assert backbone.tokenizer.decode(ids) == f"{names[0]}ab{names[1]}cd{names[2]}"
    with serving(Medusa(LoadedModel(backbone))) as server:
        status, _, answer = server.post({"prompt": "ab", "suffix": "cd", "max_tokens": 2})
        assert status == 200
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert server.post({"prompt": "ab", "suffix": "cd", "echo": True})[0] == 400
        assert server.post({"prompt": [5, 6], "suffix": "cd"})[0] == 400


def added_backbone(texts: tuple[str, ...]) -> Any:
    """Returns a tiny model with added tokens that are not special."""
    tokenizer = byte_backbone().tokenizer
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    backbone = tiny_backbone(vocab=len(tokenizer), positions=2048)
    backbone.tokenizer = tokenizer
    return backbone


CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": CITY},
    "cache_control": {"type": "ephemeral"},
}


@pytest.fixture(scope="module")
def qwen() -> Iterator[Served]:
    """Returns a server of a tiny model whose markers of calls are as Qwen's: added tokens that are not special."""
    backbone = added_backbone(MARKERS)
    backbone.tokenizer.chat_template = "{{ tools }}{{ messages[-1].content }}<tool_call>"
    with serving(Medusa(LoadedModel(backbone))) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_required_calls_are_enforced_where_markers_are_added_tokens(
    qwen: Served, choice: Any
) -> None:
    for seed in range(3):
        fields = {
            "tools": [TOOL],
            "tool_choice": choice,
            "temperature": 1,
            "seed": seed,
            "max_tokens": 200,
        }
        answer = chat_of(qwen, **fields)["choices"][0]
        [call] = answer["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] is None


@pytest.mark.slow
def test_a_call_cut_by_the_limit_is_no_call_and_the_conversation_goes_on(qwen: Served) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 30}
    answer = chat_of(qwen, **fields)["choices"][0]
    assert answer["finish_reason"] == "length"
    assert "tool_calls" not in answer["message"]
    assert answer["message"]["content"].startswith("<tool_call>")
    chunks = chunks_of(qwen, {**CHAT, **fields}, "/v1/chat/completions")
    parts = [
        part
        for chunk in chunks
        for c in chunk["choices"]
        for part in c["delta"].get("tool_calls", ())
    ]
    function = {
        "name": "weather",
        "arguments": "".join(part["function"]["arguments"] for part in parts),
    }
    call = {"id": "a", "type": "function", "function": function}
    for past in (answer["message"], {"role": "assistant", "content": None, "tool_calls": [call]}):
        messages = [*CHAT["messages"], past, {"role": "user", "content": "and now?"}]
        assert chat_of(qwen, messages=messages, tools=[TOOL])["choices"]


YES = {"type": "object", "properties": {"yes": {"const": True}}, "required": ["yes"]}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_json": YES}, '{"yes": true}'),
        ({"guided_json": json.dumps(YES)}, '{"yes": true}'),
        ({"json_schema": YES}, '{"yes": true}'),
        ({"guided_regex": "a{3}"}, "aaa"),
        ({"guided_choice": ["only this"]}, "only this"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy"),
        ({"grammar": 'root ::= "x" "y"'}, "xy"),
        (
            {"structured_outputs": {"json": json.dumps(YES), "disable_fallback": True}},
            '{"yes": true}',
        ),
        ({"response_format": {"type": "json_object", "schema": YES}}, '{"yes": true}'),
    ],
    ids=str,
)
def test_forms_are_followed_in_the_words_of_others(
    qwen: Served, fields: dict[str, Any], text: str
) -> None:
    assert chat_of(qwen, **{"max_tokens": 60, **fields})["choices"][0]["message"]["content"] == text
    if "response_format" not in fields:
        assert completion(qwen, prompt="a", max_tokens=60, **fields)["choices"][0]["text"] == text


def test_bad_forms_are_refused_by_their_own_names(qwen: Served) -> None:
    for fields, param in (
        ({"guided_json": {"type": "objekt"}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
    ):
        status, _, answer = qwen.post({**CHAT, **fields}, "/v1/chat/completions")
        assert (status, answer["error"]["param"]) == (400, param), answer
    both = {"guided_regex": "a", "response_format": {"type": "json_object"}}
    assert qwen.post({**CHAT, **both}, "/v1/chat/completions")[0] == 400


@pytest.mark.slow
def test_a_run_with_drafts_follows_required_calls(tmp_path: Any) -> None:
    model = save_model(
        tmp_path / "model", vocab=len(added_backbone(MARKERS).tokenizer), positions=2048
    )
    added_backbone(MARKERS).tokenizer.save_pretrained(model)
    run = save_run(tmp_path / "run", model)
    loaded = Medusa.from_pretrained(drafter=run.path, tree="static", dtype="fp32", lookup=True)
    with serving(loaded) as server:
        fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
        drafted, plain = (
            chat_of(server, **fields, speculative=speculative) for speculative in (True, False)
        )
    calls = [
        body["choices"][0]["message"]["tool_calls"][0]["function"] for body in (drafted, plain)
    ]
    assert calls[0] == calls[1]
    assert json.loads(calls[0]["arguments"])["city"]


def ignored_by(server: Served, body: Any, path: str = "/v1/chat/completions") -> list[str]:
    """Returns the names in the header about ignored fields."""
    status, headers, answer = server.post(body, path)
    assert status == 200, answer
    names = headers.get("x-medusa-ignored-fields", "")
    return names.split(", ") if names else []


def test_unknown_fields_are_ignored_and_named(server: Served) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "w1", "loud": 1}], "mood": "a"}
    body = {
        **CHAT,
        "messages": [message],
        "temprature": 1,
        "max_token": 1,
        "unset": None,
        "stream_options": {"include_usage": True, "loud": True},
        "tools": [{"type": "function", "function": {"name": "f", "eager": True}}],
        "a,b\u00e9\ud83d\x1b" + "c" * 99: 1,
    }
    names = ignored_by(server, body)
    assert {"temprature", "max_token", "stream_options.loud", "messages[].mood"} <= {*names}
    assert {"messages[].content[].loud", "tools[].function.eager"} <= {*names}
    assert len(names) == 7
    assert all(name.isascii() and len(name) < 99 for name in names)
    assert not ignored_by(server, CHAT)
    assert ignored_by(server, {**SHORT, "unheard_of": 1}, "/v1/completions") == ["unheard_of"]
    body = {"input": "w1", "client_metadata": {"a": "b"}, "max_output_tokens": 1}
    assert ignored_by(server, body, "/v1/responses") == ["client_metadata"]
    for path, field in (("/tokenize", "prompt"), ("/apply-template", "messages")):
        body = {field: CHAT["messages"] if field == "messages" else "w1", "unheard_of": 1}
        assert ignored_by(server, body, path) == ["unheard_of"]
    assert ignored_by(server, {"tokens": [8], "unheard_of": 1}, "/detokenize") == ["unheard_of"]
    many = {f"field{number}": 1 for number in range(500)}
    assert len(ignored_by(server, {**CHAT, **many})) <= 30


@pytest.mark.slow
def test_names_of_ignored_fields_do_not_fill_the_log(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "medusa_cli.serve")
    neutral._logged.clear()
    for part in range(20):
        chat_of(server, **{f"field{part}-{number}": 1 for number in range(40)})
    assert len(caplog.messages) <= neutral.MAX_LOGGED


def test_tools_of_their_provider_are_skipped(server: Served) -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    others = [
        {"type": kind, "name": "x", "container": {}}
        for kind in (
            "web_search",
            "code_interpreter",
            "mcp",
            "custom",
            "local_shell",
            "image_generation",
        )
    ]
    body = {"input": "w1 w2", "max_output_tokens": 4, "tools": [function, *others]}
    names = ignored_by(server, body, "/v1/responses")
    assert names[0] == "tools[].type=web_search"
    assert len(names) == 6
    answer = server.post(body, "/v1/responses")[2]
    assert [tool["name"] for tool in answer["tools"]] == ["f"]
    chat = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}, *others]}
    assert len(ignored_by(server, chat)) == 6
    # A choice of such a tool cannot be followed.
    for path, given in (("/v1/responses", body), ("/v1/chat/completions", chat)):
        status, _, refused = server.post({**given, "tool_choice": {"type": "web_search"}}, path)
        assert (status, refused["error"]["param"]) == (400, "tool_choice.type")
    status, _, refused = server.post({**CHAT, "tools": others, "tool_choice": "required"}, path)
    assert status == 400


PAST = [
    # OpenAI's SDK, and its Agents SDK
    {"role": "assistant", "content": "w3", "refusal": None, "annotations": [], "audio": None, "function_call": None},
    {"role": "assistant", "content": [
        {"type": "text", "text": "w3", "role": "assistant", "refusal": None, "tool_calls": [], "annotations": []}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "w3", "annotations": [], "logprobs": []}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "w3"}]},
    # AI SDK, LangChain and LiteLLM
    {"role": "assistant", "content": "w3", "provider_specific_fields": {"a": 1}, "images": [{"type": "image_url"}]},
    {"role": "assistant", "content": "w3", "additional_kwargs": {}, "response_metadata": {"a": []}, "id": "run-1"},
    {"role": "assistant", "content": "w3", "thinking_blocks": [{"type": "thinking"}], "audio": {"id": "a"}},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "w9"}, {"type": "text", "text": "w3"}]},
    {"role": "assistant", "content": "w3", "tool_call_id": "a", "parsed": {"a": 1}, "tool_calls": []},
    {"role": "assistant", "content": "w3", "cache_control": {"type": "ephemeral"}, "unheard_of": {"a": [1]}},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(PAST)))
def test_past_answers_are_taken_in_the_shapes_of_clients(server: Served, number: int) -> None:
    def prompt(assistant: dict[str, Any]) -> Any:
        messages = [*CHAT["messages"], assistant, *CHAT["messages"]]
        status, _, answer = server.post({"messages": messages}, "/apply-template")
        assert status == 200, answer
        return answer["prompt"]

    assert prompt(PAST[number]) == prompt({"role": "assistant", "content": "w3"})


def test_reasoning_is_asked_for_in_templates_that_read_it(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }}"
    with serving(medusa) as server:
        body = {"messages": CHAT["messages"]}
        given = {**body, "reasoning_effort": "low", "enable_thinking": False}
        names = ignored_by(server, given, "/apply-template")
        assert {*names} == {"reasoning_effort", "enable_thinking"}
    monkeypatch.setattr(medusa.backbone.tokenizer, "chat_template", template)
    with serving(medusa) as server:
        for fields, expected in (
            ({}, "w1 w2  "),
            ({"enable_thinking": False}, "w1 w2 False "),
            ({"think": True}, "w1 w2 True "),
            ({"thinking": {"type": "disabled"}}, "w1 w2 False "),
            ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "w1 w2 True "),
            ({"reasoning_effort": "high"}, "w1 w2  high"),
            ({"reasoning": {"effort": "low"}}, "w1 w2  low"),
            ({"reasoning_effort": "none"}, "w1 w2 False none"),
            ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": 0}}, "w1 w2 0 "),
        ):
            status, headers, answer = server.post({**body, **fields}, "/apply-template")
            assert (status, answer["prompt"]) == (200, expected)
            assert "x-medusa-ignored-fields" not in headers
        plain = {"input": "w1 w2", "max_output_tokens": 1}
        counts = [
            server.post({**plain, **more}, "/v1/responses")[2]["usage"]["input_tokens"]
            for more in ({}, {"reasoning": {"effort": "w5"}})
        ]
        assert counts[0] < counts[1]


def test_bias_comes_in_the_forms_of_other_servers(server: Served) -> None:
    first = completion(server, max_tokens=4, logprobs=0)["choices"][0]["logprobs"]["tokens"][0]
    [token] = server.post({"content": first.strip()}, "/tokenize")[2]["tokens"]
    forms: list[Any] = [
        {str(token): -100}, [[token, -100]], [[token, False]], {str(token): False},
        {first.strip(): -100}, [[first.strip(), False]], [[token, -100], ["w9", 0]],
    ]  # fmt: skip
    answers = {completion(server, logit_bias=bias)["choices"][0]["text"] for bias in forms}
    assert len(answers) == 1
    assert answers != {completion(server)["choices"][0]["text"]}


@pytest.mark.slow
def test_do_sample_false_is_greedy(server: Served) -> None:
    plain = completion(server)["choices"]
    assert completion(server, do_sample=False, temperature=1.5)["choices"] == plain
    sampled = completion(server, temperature=1.0, seed=3)["choices"]
    assert completion(server, do_sample=True, seed=3)["choices"] == sampled


@pytest.mark.slow
def test_an_empty_stop_string_is_none(server: Served) -> None:
    plain = completion(server)["choices"]
    for stop in ("", [""], []):
        assert completion(server, stop=stop)["choices"] == plain


@pytest.mark.slow
def test_answers_tell_what_ended_them(server: Served) -> None:
    def stop_of(**fields: Any) -> tuple[Any, Any]:
        [choice] = completion(server, **fields)["choices"]
        *_, last = chunks_of(server, {**SHORT, **fields})
        for name in ("stop_reason", "matched_stop"):
            assert last["choices"][0][name] == choice[name]
        return choice["stop_reason"], choice["matched_stop"]

    ids = completion(server, return_token_ids=True)["choices"][0]["token_ids"]
    word = completion(server)["choices"][0]["text"].split()[2]
    assert stop_of(ignore_eos=True) == (None, None)
    assert stop_of(stop=["nothing", word]) == (word, word)
    assert stop_of(stop=word, include_stop_str_in_output=True) == (word, word)
    assert stop_of(stop_token_ids=[ids[2]]) == (ids[2], ids[2])


def test_tokens_come_in_llamas_form(server: Served) -> None:
    answer = server.post({"content": "w1 w2"}, "/tokenize")[2]
    assert (
        answer["tokens"]
        == server.post({"prompt": "w1 w2", "add_special_tokens": False}, "/tokenize")[2]["tokens"]
    )
    pieces = server.post({"content": "w1 w2", "with_pieces": True}, "/tokenize")[2]["tokens"]
    assert [piece["id"] for piece in pieces] == answer["tokens"]
    text = server.post({"tokens": answer["tokens"]}, "/detokenize")[2]
    assert text["content"] == text["prompt"]
    for body in ({}, {"prompt": "w1", "content": "w1"}):
        assert server.post(body, "/tokenize")[0] == 400


def test_trailing_slashes_and_azures_header_are_taken(medusa: Medusa) -> None:
    with serving(medusa, api_keys=("secret",)) as server:
        for path in ("/v1/models/", "/models/", f"/v1/models/{MODEL}/", "/props/", "/slots/"):
            assert server.request("GET", path, headers={"api-key": "secret"})[0] == 200
            assert server.request("GET", path, headers={"api-key": "wrong"})[0] == 401
        for path, body in (("/v1/completions/", SHORT), ("/tokenize/", {"prompt": "w1"})):
            assert server.request("POST", path, body, {"api-key": "secret"})[0] == 200
        assert server.request("GET", "/health/")[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "w1 \ud83d"}, "prompt"),
        ("/v1/completions", {"prompt": "w1", "suffix": "\ud83d"}, "suffix"),
        ("/v1/completions", {"prompt": ["w1", "\ud83d"]}, "prompt.1"),
        ("/v1/completions", {"prompt": "w1", "stop": ["\ud83d"]}, "stop.0"),
        ("/v1/completions", {"prompt": "w1", "guided_choice": ["\ud83d"]}, "guided_choice.0"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud83d"}]}, "messages.0.content"),
        ("/tokenize", {"content": "\ud83d"}, "content"),
        ("/v1/chat/completions",
         {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "description": "\ud83d"}}]},
         "tools.0.function.description"),
        ("/apply-template", {"messages": [{"role": "user", "content": "\ud83d"}]}, "messages.0.content"),
    ],
)  # fmt: skip
def test_half_a_character_is_refused_where_it_is(
    server: Served, path: str, body: dict[str, Any], param: str
) -> None:
    status, _, answer = server.post(body, path)
    assert (status, answer["error"]["param"]) == (400, param)
    assert "system prompt" not in answer["error"]["message"]


def test_past_items_of_other_models_are_skipped(server: Served) -> None:
    user = {"role": "user", "content": "w1 w2"}
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
    ]
    plain, mixed = (
        server.post({"input": given, "max_output_tokens": 4}, "/v1/responses")
        for given in ([user], [*items, user])
    )
    # How much of it is cached may differ.
    assert plain[2]["usage"]["total_tokens"] == mixed[2]["usage"]["total_tokens"]
    assert (
        mixed[1]["x-medusa-ignored-fields"]
        == "input[].type=reasoning, input[].type=web_search_call"
    )
    reference = {"input": [user, {"type": "item_reference", "id": "msg_1"}]}
    status, _, refused = server.post(reference, "/v1/responses")
    assert status == 400
    assert "store: false" in refused["error"]["message"]
    assert "_kind" not in refused["error"]["message"]


def test_responses_sample_as_chats_do(server: Served) -> None:
    for fields in (
        {"temperature": 1.5, "seed": 5}, {"temperature": 1.5, "seed": 6, "top_k": 3}, {"repetition_penalty": 1.5},
        {"stop": "w"}, {"logit_bias": [[9, 50]]}, {"min_tokens": 5, "ignore_eos": True}, {"do_sample": False},
    ):  # fmt: skip
        chat = chat_of(server, **fields)["choices"][0]["message"]["content"]
        body = {"input": CHAT["messages"], "max_output_tokens": CHAT["max_tokens"], **fields}
        status, _, answer = server.post(body, "/v1/responses")
        assert status == 200, answer
        text = "".join(
            part["text"] for item in answer["output"] for part in item.get("content", ())
        )
        assert text == chat


def test_truncation_drops_the_oldest_items(medusa: Medusa) -> None:
    turns = [
        {"role": role, "content": f"w{number} w{number + 1}"}
        for number in range(5, 25)
        for role in ("user", "assistant")
    ]
    items = [*turns, {"role": "user", "content": "w1 w2"}]
    body = {"input": items, "instructions": "w30", "max_output_tokens": 4}
    with serving(medusa, context=40) as server:
        status, _, refused = server.post(body, "/v1/responses")
        assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
        status, _, answer = server.post({**body, "truncation": "auto"}, "/v1/responses")
        assert (status, answer["truncation"]) == (200, "auto")
        assert 20 < answer["usage"]["input_tokens"] < 40
        short = {**body, "input": items[-1:]}
        plain, auto = (
            server.post({**short, "truncation": given}, "/v1/responses")[2]["usage"]
            for given in ("disabled", "auto")
        )
        assert plain["input_tokens"] == auto["input_tokens"]
        long = {**body, "input": "w1 " * 60, "truncation": "auto"}
        assert server.post(long, "/v1/responses")[0] == 400
