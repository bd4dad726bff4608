"""The server answers what decoding alone answers, as OpenAI's client expects it, whatever its clients do."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from medusa_cli.api import Medusa
from medusa_cli.decode import Likelihood, Reply, Request
from medusa_cli.serve.openai_format import OpenAIFormat
from medusa_cli.serve.scheduler import Ticket
from tests.helpers import save_model, save_run, tiny_backbone
from tests.serving import MODEL, Served, serving

IDS = [5, 9, 20, 11, 7]


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Medusa:
    folder = tmp_path_factory.mktemp("serving")
    run = save_run(folder / "run", save_model(folder / "model"))
    return Medusa.from_pretrained(drafter=run.path, tree="static", dtype="fp32")


@pytest.fixture(scope="module")
def server(medusa: Medusa) -> Iterator[Served]:
    with serving(medusa, slots=8) as found:
        yield found


def test_32_clients_at_once_get_what_each_gets_alone(server: Served, medusa: Medusa) -> None:
    prompts = [[8 + n, 9 + n % 5, 60 - n] for n in range(32)]
    client = server.openai()

    def ask(prompt: list[int]) -> tuple[list[str], str, str]:
        rules = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "logprobs": 0}
        if prompt[0] % 2:
            choice = client.completions.create(**rules).choices[0]
            return choice.logprobs.tokens, choice.text, choice.finish_reason
        chunks = [chunk.choices[0] for chunk in client.completions.create(**rules, stream=True)]
        tokens = [token for chunk in chunks for token in chunk.logprobs.tokens]
        return tokens, "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(ask, prompts))
    for prompt, (tokens, text, reason) in zip(prompts, found, strict=True):
        alone = medusa.generate(prompt, max_new_tokens=40)
        words = [medusa.backbone.tokenizer.decode([token]) for token in alone.tokens]
        assert tokens == [words[0], *(f" {word}" for word in words[1:])]
        assert (text, reason) == (alone.text, alone.finish_reason)
    assert server.number("medusa_requests_running") == server.number("medusa_requests_waiting") == 0


def test_a_chat_streams_what_it_says_at_once_and_its_usage_counts_drafts(server: Served, medusa: Medusa) -> None:
    client = server.openai()
    rules = {"model": MODEL, "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 30}
    whole = client.chat.completions.create(**rules)
    chunks = list(client.chat.completions.create(**rules, stream=True, stream_options={"include_usage": True}))
    alone = medusa.generate("w1 w2", max_new_tokens=30)
    assert whole.choices[0].message.content == alone.text
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == alone.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == alone.finish_reason
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.completion_tokens == len(alone.tokens) and usage.prompt_tokens == alone.prompt_tokens
        assert usage.medusa["accepted_tokens"] == alone.stats.accepted
        assert usage.medusa["drafted_tokens"] == alone.stats.drafted > 0
    shown = [piece for chunk in chunks[:-1] for piece in (chunk.model_extra.get("medusa") or {"pieces": []})["pieces"]]
    assert "".join(text for text, _ in shown) == alone.text


def test_log_probabilities_of_chats_are_the_backbones(server: Served, medusa: Medusa) -> None:
    rules = {"model": MODEL, "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 12}
    said = server.openai().chat.completions.create(**rules, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    alone = medusa.generate("w1 w2", max_new_tokens=12, logprobs=2)
    assert [one.logprob for one in said] == pytest.approx([one.logprob for one in alone.likelihoods], abs=1e-4)
    for one in said:
        assert one.top_logprobs[0].token == one.token and bytes(one.bytes).decode() == one.token
        assert one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob


def test_tokens_of_a_llama_are_read_in_their_places() -> None:
    inner = Tokenizer(models.BPE({"<unk>": 0, "▁so": 1, "▁it": 2, "s": 3, "<0xC3>": 4, "<0xA9>": 5, "<0x73>": 6}, []))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backbone = tiny_backbone()
    backbone.tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    likely = [Likelihood(token, -1.0, ((token, -1.0), (3, -2.0), (6, -3.0))) for token in (1, 2, 3, 4, 5, 2)]

    def told(*chunks: list[Likelihood], chat: bool) -> list[dict]:
        wording = OpenAIFormat(backbone, "m", chat=chat)
        ticket = Ticket(Request((1,), 8, top=3), Reply(backbone), lambda event: None)
        return [wording.chunk(ticket, [], chunk, False)["choices"][0]["logprobs"] for chunk in chunks]

    words = ["so", " it", "s", "\ufffd", "\ufffd", " it"]
    (whole,), parts = told(likely, chat=False), told(likely[:2], likely[2:], chat=False)
    assert whole["tokens"] == words and parts[0]["tokens"] + parts[1]["tokens"] == words
    assert whole["text_offset"] == [0, 2, 5, 6, 7, 8] == parts[0]["text_offset"] + parts[1]["text_offset"]
    assert whole["top_logprobs"][1] == {" it": -1.0, "s": -2.0}  # "s" and its byte read alike
    (chat,) = told(likely, chat=True)
    assert [one["token"] for one in chat["content"]] == words
    assert [one["top_logprobs"][0]["token"] for one in chat["content"]] == words


def test_a_token_of_the_log_probabilities_is_decoded_once_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, decoded = tiny_backbone(), list[list[int]]()
    decode = backbone.tokenizer.decode
    monkeypatch.setattr(backbone.tokenizer, "decode", lambda tokens: decoded.append(tokens) or decode(tokens))
    likely = [Likelihood(9, -1.0, tuple((token, -1.0) for token in range(9, 29))) for _ in range(10)]
    ticket = Ticket(Request((1,), 8, top=20), Reply(backbone), lambda event: None)
    OpenAIFormat(backbone, "m", chat=True).chunk(ticket, [], likely, False)
    assert len(decoded) <= 10 * (1 + 20 + 2)  # two more to go on behind it


def test_a_seed_draws_the_same_again_whoever_else_is_there(server: Served, medusa: Medusa) -> None:
    client = server.openai()
    rules = {"model": MODEL, "prompt": IDS, "max_tokens": 30, "temperature": 1.5}

    def draw(seed: int | None) -> str:
        return client.completions.create(**rules, **({} if seed is None else {"seed": seed})).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(draw, [1, 2, 1, 2, 1, None, None, None]))
    assert texts[0] == texts[2] == texts[4] == medusa.generate(IDS, max_new_tokens=30, temperature=1.5, seed=1).text
    assert texts[1] == texts[3] != texts[0]
    assert len(set(texts[5:])) > 1


def test_a_stop_text_is_no_part_of_the_answer(server: Served, medusa: Medusa) -> None:
    words = medusa.generate(IDS, max_new_tokens=24).text.split()
    choice = server.openai().completions.create(model=MODEL, prompt=IDS, max_tokens=24, stop=[words[4], "x"]).choices[0]
    assert choice.text.split() == words[: words.index(words[4])] and choice.finish_reason == "stop"


def test_the_next_turn_reads_only_what_is_new(server: Served) -> None:
    client = server.openai()
    messages = [{"role": "user", "content": " ".join(f"w{n}" for n in range(40))}]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "w3"}]
    again = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_models_are_listed_and_others_are_not_served(server: Served) -> None:
    client = server.openai()
    assert [one.id for one in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.completions.create(model="other", prompt=IDS)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("functions", []),
        ("modalities", ["audio"]),
        ("top_logprobs", 3),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("max_tokens", 0),
        ("max_tokens", 401),
        ("max_tokens", "many"),
        ("stop", ""),
        ("seed", 2**63),
        ("stream_options", {"loud": True}),
        ("messages", []),
        ("messages", [{"role": "tool", "content": "w1"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": "\ud800"}]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server: Served, field: str, value: object) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "w1"}], "max_tokens": 2, field: value}
    status, _, found = server.post(body, "/v1/chat/completions")
    assert status == 400, found
    assert field in str(found["error"]["message"]) and set(found["error"]) == {"message", "type", "param", "code"}
    nothing = {**body, field: None} if field != "messages" else {**body, field: [{"role": "user", "content": "w1"}]}
    assert server.post(nothing, "/v1/chat/completions")[0] == 200  # null is left out


@pytest.mark.parametrize(
    ("path", "more", "param", "said"),
    [
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a valid string"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "should be 'text'",
        ),
        ("chat", {"stop": ["w1", ""]}, "stop.1", "at least 1 character"),
        ("chat", {"max_completion_tokens": 401}, "max_completion_tokens", "401 is more than the 400"),
        ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, None, "max_completion_tokens differ"),
        ("", {"prompt": ""}, "prompt", "at least 1 character"),
        ("", {"prompt": [5, -1]}, "prompt.1", "greater than or equal to 0"),
        ("", {"prompt": []}, "prompt", "at least 1 item"),
    ],
)
def test_a_refusal_is_about_the_form_that_was_sent(
    server: Served, path: str, more: dict, param: str | None, said: str
) -> None:
    asked = {"messages": [{"role": "user", "content": "w1"}]} if path else {"prompt": IDS}
    status, _, found = server.post({"model": MODEL, **asked, **more}, f"/v1/{path}/completions".replace("//", "/"))
    assert status == 400 and found["error"]["param"] == param and said in found["error"]["message"], found
    assert "Value error" not in found["error"]["message"]


def test_a_limit_said_twice_alike_is_one(server: Served) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "w1"}], "max_tokens": 3}
    assert server.post({**body, "max_completion_tokens": 3}, "/v1/chat/completions")[0] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 400),
        ("", 400),
        ("[]", 400),
        ("\0" * 100, 400),
        ("[" * 50_000, 400),
        ({"prompt": [64], "model": MODEL}, 400),
        ('{"\\ud800": 1}', 400),
    ],
)
def test_what_is_no_request_is_said_to_be_none(server: Served, body: object, status: int) -> None:
    found = server.post(body)
    assert found[0] == status and found[2]["error"]["message"]


def test_a_body_without_its_header_is_told_which(server: Served) -> None:
    body = {"model": MODEL, "prompt": IDS}
    status, _, text = server.ask("POST", "/v1/completions", body, {"Content-Type": "application/x-www-form-urlencoded"})
    assert status == 400 and "Content-Type: application/json" in text
    assert "no JSON object" in server.post("[]")[2]["error"]["message"]


def test_events_are_in_ascii_as_clients_end_lines_at_many_characters(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenAIFormat, "closing", lambda *_: {"text": "a\u2028b\u0085c"})
    body = {"model": MODEL, "prompt": IDS, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    with serving(medusa) as server:
        lines = server.ask("POST", "/v1/completions", body)[2].splitlines()
    assert json.loads(lines[-4].removeprefix("data: ")) == {"text": "a\u2028b\u0085c"}


def test_metrics_count_what_was_answered(medusa: Medusa) -> None:
    with serving(medusa) as server:
        answers = [server.post({"model": MODEL, "prompt": IDS, "max_tokens": 20})[2] for _ in range(3)]
        usage = [answer["usage"] for answer in answers]
        server.post("{")
        assert server.number("medusa_generated_tokens_total") == sum(one["completion_tokens"] for one in usage)
        assert server.number("medusa_drafted_tokens_total") == sum(one["medusa"]["drafted_tokens"] for one in usage)
        assert server.number("medusa_accepted_tokens_total") == sum(one["medusa"]["accepted_tokens"] for one in usage)
        assert server.number("medusa_prompt_tokens_total") == 3 * len(IDS)
        assert server.number("medusa_prompt_tokens_reused_total") == 2 * (len(IDS) - 1)
        assert server.number("medusa_request_seconds_count") == 3
        text = server.ask("GET", "/metrics")[2]
        assert 'medusa_http_responses_total{code="400",path="/v1/completions"} 1.0' in text


def test_many_threads_do_not_outlive_their_server(medusa: Medusa) -> None:
    before = set(threading.enumerate())
    with serving(medusa) as server:
        server.post({"model": MODEL, "prompt": IDS, "max_tokens": 2})
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left)


def test_the_page_is_one_file_that_asks_nobody_else(server: Served) -> None:
    status, headers, page = server.ask("GET", "/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "http://" not in page and "https://" not in page and "src=" not in page and "@import" not in page


def test_the_schema_is_there_and_names_the_routes(server: Served) -> None:
    paths = json.loads(server.ask("GET", "/openapi.json")[2])["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= set(paths)


def test_the_package_ships_the_page_and_its_types() -> None:
    import medusa_cli

    folder = Path(medusa_cli.__file__).parent
    assert (folder / "py.typed").is_file() and (folder / "serve" / "index.html").is_file()
