"""Distillation through servers: turns in order, retries, failures aside, a server that dies, bad addresses."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.data.conversation import Conversation
from medusa_cli.distill import Outcome
from medusa_cli.distill.endpoint import Tokenizer, answer_remotely, connect, tokenize
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.files.chat_servers import ChatServers
from medusa_cli.files.io import Malformed
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.recipe import DistillRecipe
from medusa_cli.runs.run import Run
from tests.helpers import ChatServer, medusa, medusa_json, write_lines


def words_of(body: dict) -> tuple[str, str]:
    """Returns an answer made from the question, and its finish reason."""
    text = "w" + str(len(body["messages"])) + " " + body["messages"][-1]["content"]
    return text, "length" if "w9" in text else "stop"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    running = ChatServer(words_of)
    yield running
    running.stop()


other = server


seed = Conversation.from_turns
SEEDS = [seed(f"s{i}", [f"w{i} w{i + 1}", f"w{i + 2}"]) for i in range(10, 22)]
IDS = [seed.id for seed in SEEDS]
RULES = DistillRecipe(max_new_tokens=16, concurrency=4)


@pytest.fixture(autouse=True)
def pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.files.chat_servers.FIRST_PAUSE", 0.01)


def answers(
    urls: str, model: str, seeds: list[Conversation] = SEEDS, rules: DistillRecipe = RULES
) -> list[Outcome]:
    """Returns the outcomes of the seeds at servers, addresses with commas between."""
    servers = ChatServers(urls.split(","), "served")
    return list(answer_remotely(servers, Tokenizer(model), seeds, rules))


def conversations(outcomes: list[Outcome]) -> list[Conversation]:
    return sorted(
        (outcome.conversation for outcome in outcomes if outcome.conversation), key=lambda c: c.id
    )


@pytest.mark.slow
def test_turns_follow_one_another_and_conversations_run_side_by_side(
    server: ChatServer, model: str
) -> None:
    answered = conversations(answers(server.url, model))
    assert [conversation.id for conversation in answered] == IDS
    assert 1 < server.most_together <= 4
    backbone = load_backbone(model, LoadOptions(dtype="fp32"))
    for conversation in answered:
        messages = conversation.messages
        assert [message["role"] for message in messages] == [
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        # Three messages came before it.
        assert messages[3]["content"] == "w3 " + messages[2]["content"]
        for (start, end), message in zip(conversation.spans, messages[1::2], strict=True):
            assert backbone.decode(conversation.tokens[start:end]).strip() == message["content"]
            assert conversation.tokens[end - 1] in backbone.eos_ids
    sent = server.requests[0]
    assert set(sent) == {"model", "messages", "max_tokens", "temperature", "stream", "path", "key"}
    assert (sent["model"], sent["max_tokens"], sent["stream"]) == ("served", 16, False)


def test_draws_depend_on_the_random_seed_and_the_conversation(
    server: ChatServer, model: str
) -> None:
    def sent(random_seed: int, temperature: float) -> dict[str, Any]:
        server.requests.clear()
        rules = replace(RULES, random_seed=random_seed, temperature=temperature)
        assert len(conversations(answers(server.url, model, SEEDS[:3], rules))) == 3
        return {
            request["messages"][0]["content"]: request.get("seed") for request in server.requests
        }

    first = sent(1, 0.7)
    assert first == sent(1, 0.7)
    assert len(set(first.values())) == 3
    assert all(0 <= n < 2**31 for n in first.values())
    assert not set(first.values()) & set(sent(2, 0.7).values())
    assert set(sent(1, 0.0).values()) == {None}


def test_system_prompt_opens_the_conversation(server: ChatServer, model: str) -> None:
    (answered,) = conversations(answers(server.url, model, [seed("a", ["w20"], "w30")]))
    assert [message["role"] for message in answered.messages] == ["system", "user", "assistant"]
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "w30"}


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_address_may_end_as_the_servers_paths_begin(server: ChatServer, end: str) -> None:
    servers = ChatServers([server.url + end], "served")
    assert servers.check() == (["served"], [])
    assert servers.complete([{"role": "user", "content": "w1"}]) == ("w1 w1", "stop")


def test_busy_servers_are_asked_again_and_refusals_are_not(server: ChatServer, model: str) -> None:
    seen: dict[str, int] = {}

    def spoil(number: int, body: dict) -> int | None:
        text = body["messages"][0]["content"]
        seen[text] = seen.get(text, 0) + 1
        if text.startswith("w12"):
            return 422
        return 503 if text.startswith("w13") and seen[text] < 3 else None

    server.fault = spoil
    failed = {
        outcome.id: outcome.failure for outcome in answers(server.url, model) if outcome.failure
    }
    assert list(failed) == ["s12"]
    assert "422" in failed["s12"]
    assert seen["w12 w13"] == 1
    assert seen["w13 w14"] == 4


@pytest.mark.parametrize(("pause", "headers"), [(60.0, {}), (0.0, {"Retry-After": "60"})])
def test_failing_server_is_left_alone_and_the_other_takes_its_work(
    server: ChatServer,
    other: ChatServer,
    model: str,
    pause: float,
    headers: dict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("medusa_cli.files.chat_servers.FIRST_PAUSE", pause)
    server.fault, server.headers = lambda number, body: 503 if number > 4 else None, headers
    assert [c.id for c in conversations(answers(f"{server.url},{other.url}", model))] == IDS
    assert len(server.requests) <= 4 + 4  # those under way when it began to fail
    assert len(other.requests) >= 2 * len(SEEDS) - 4


def test_first_name_that_the_server_knows_is_taken(server: ChatServer, model: str) -> None:
    server.fault = lambda number, body: None if body["model"] == "served" else 404
    servers, silent = connect(server.url, None, Tokenizer(model))
    assert servers.model == "served"
    assert silent == []
    assert len(server.requests) == 2
    with pytest.raises(UserError, match="404.*endpoint_model"):
        connect(server.url, "third", Tokenizer(model))


def test_prompts_without_room_for_an_answer_are_not_asked(server: ChatServer, model: str) -> None:
    seeds = [
        seed("long", ["w10 " * 90]),
        seed("later", ["w11", "w12 " * 90]),
        seed("endless", ["w13" * 10_000]),
        seed("whole", ["w14", "w15"]),
    ]
    outcomes = answers(server.url, model, seeds, replace(RULES, context=100, concurrency=1))
    assert [outcome.id for outcome in outcomes if outcome == Outcome(outcome.id)] == [
        "long",
        "endless",
    ]
    assert [(c.id, len(c.spans)) for c in conversations(outcomes)] == [("later", 1), ("whole", 2)]
    assert len(server.requests) == 3


def test_answer_cut_by_its_length_has_no_end_token(model: str) -> None:
    tokenizer = Tokenizer(model)
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    whole, cut = (tokenize(tokenizer, "x", messages, [ended]) for ended in (True, False))
    assert whole.spans[0][1] == cut.spans[0][1] + 1
    assert whole.tokens == cut.tokens
    with pytest.raises(Malformed):
        tokenize(
            tokenizer, "x", [messages[0], {"role": "assistant", "content": "unknown words"}], [True]
        )


@pytest.fixture
def words(model: str, tmp_path: Path) -> list[str]:
    """Returns the command without --endpoint."""
    records = [
        {"id": seed.id, "messages": [{"role": "user", "content": turn} for turn in seed.turns]}
        for seed in SEEDS
    ]
    seeds = write_lines(tmp_path / "seeds.jsonl", records)
    return ["distill", "--seed", str(seeds), "--run", str(tmp_path / "run"), "--model", model, "--max-new-tokens", "16",
            "distill.concurrency=3"]  # fmt: skip


def ids(run: Path) -> list[str]:
    return sorted(
        json.loads(line)["id"] for line in (run / "distill.jsonl").read_text().splitlines()
    )


@pytest.mark.slow
def test_server_that_dies_half_way_costs_no_sample_and_doubles_none(
    server: ChatServer, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_API_KEY", "secret")
    monkeypatch.setattr("medusa_cli.files.chat_servers.ATTEMPTS", 2)
    run = tmp_path / "run"
    words += ["--endpoint", server.url, "distill.endpoint_model=served"]
    server.fault = lambda number, body: 500 if number > 9 else None
    first = medusa_json(*words)
    assert 0 < first["conversations"] < len(SEEDS)
    assert first["failed"] == len(SEEDS) - first["conversations"]
    assert len((run / "distill-failed.jsonl").read_text().splitlines()) == first["failed"]
    assert server.requests[0]["key"] == "Bearer secret"
    server.fault = lambda number, body: None
    assert medusa_json(*words)["failed"] == 0
    assert not (run / "distill-failed.jsonl").exists()
    assert ids(run) == IDS
    # What came from the server trains: the states are computed here, and the run learns whose they are.
    medusa(
        "train", "--run", run, "--dtype", "fp32", "drafter.vocabulary=own", "drafter.num_heads=2"
    )
    assert json.loads((run / "run.json").read_text())["backbone"]["weights"]
    assert Run(run).drafter_dir.is_dir()


def test_a_training_on_vllms_states_asks_the_server_to_write_those_of_answers(
    server: ChatServer, words: list[str]
) -> None:
    words += ["--endpoint", server.url, "distill.endpoint_model=served"]
    medusa(*words, "train.states=vllm")
    greeting, *asked = server.requests
    assert "kv_transfer_params" not in greeting
    wanted = [request["kv_transfer_params"] for request in asked]
    assert wanted == [{"include_output_tokens": True}] * len(asked)
    assert wanted


def test_one_of_two_servers_may_die_half_way_and_be_away_at_the_next_start(
    server: ChatServer,
    other: ChatServer,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("medusa_cli.files.chat_servers.ATTEMPTS", 3)
    words += ["--endpoint", f"{server.url},{other.url}", "distill.endpoint_model=served"]

    def die(number: int, body: dict) -> int | None:
        if number == 5:
            server.stop()
        return 500 if number >= 5 else None

    server.fault = die
    assert medusa_json(*words, "--max-samples", "9")["failed"] == 0
    again = medusa(*words)
    assert f"--endpoint {server.url}" in again.stderr
    assert ids(tmp_path / "run") == IDS


def test_seeds_that_the_template_refuses_are_counted_as_failed(
    words: list[str], model: str, tmp_path: Path
) -> None:
    refusing = Path(shutil.copytree(model, tmp_path / "refusing")) / "chat_template.jinja"
    refusal = (
        "{% if 'w13' in messages[0]['content'] %}{{ raise_exception('no thirteen') }}{% endif %}"
    )
    refusing.write_text(refusal + refusing.read_text())
    summary = medusa_json(
        *words, "--model", refusing.parent, "--dtype", "fp32", "--max-new-tokens", "4"
    )
    assert (summary["failed"], summary["conversations"]) == (2, len(SEEDS) - 2)
    failed = map(json.loads, (tmp_path / "run" / "distill-failed.jsonl").read_text().splitlines())
    assert sorted((line["id"], "no thirteen" in line["reason"]) for line in failed) == [
        ("s12", True),
        ("s13", True),
    ]


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "nowhere at all"])
def test_server_that_is_not_there_is_named(words: list[str], address: str) -> None:
    assert f"--endpoint {address}" in medusa(*words, "--endpoint", address, exit_code=1).stderr


def test_model_that_the_server_does_not_know_is_named_at_once(
    server: ChatServer, words: list[str], tmp_path: Path
) -> None:
    server.fault = lambda number, body: 400
    failed = medusa(*words, "--endpoint", server.url, "distill.endpoint_model=other", exit_code=1)
    assert "'other'" in failed.stderr
    assert "400" in failed.stderr
    assert len(server.requests) == 1
    assert not (tmp_path / "run" / "distill.jsonl").exists()
