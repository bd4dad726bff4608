"""Distillation through a server: turns in order, retries, failures aside, one that dies half way, bad addresses."""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from medusa_cli.data.conversation import Conversation
from medusa_cli.distill.endpoint import Tokenizer, answer_remotely, connect, tokenise
from medusa_cli.distill.records import Answered, Failed, Outcome, TooLong
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.runs.http import ChatServers, retry_after
from medusa_cli.runs.io import Malformed
from medusa_cli.runs.recipe import DistillRecipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run
from tests.helpers import medusa, save_model


class Server:
    """An OpenAI-compatible server that answers with words it makes from the question; `fault` may spoil a request."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.fault = lambda number, body: None  # a status to answer with instead
        self.headers: dict[str, str] = {}
        self.together = self.most_together = 0
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                """Silent."""

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "served"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append({**body, "authorization": self.headers.get("Authorization")})
                    number = len(outer.requests)
                    outer.together += 1
                    outer.most_together = max(outer.most_together, outer.together)
                threading.Event().wait(0.02)
                with lock:
                    outer.together -= 1
                if status := outer.fault(number, body):
                    return self._send(status, {"error": "spoilt"})
                said = "w" + str(len(body["messages"])) + " " + body["messages"][-1]["content"]
                reason = "length" if "w9" in said else "stop"
                self._send(200, {"choices": [{"message": {"content": said}, "finish_reason": reason}]})

            def _send(self, status: int, document: dict) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Answer what has been asked, and refuse every connection from now on."""
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.stop()


@pytest.fixture
def other() -> Iterator[Server]:
    one = Server()
    yield one
    one.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("endpoint") / "model")


seed = Conversation.from_turns
SEEDS = [seed(f"s{i}", [f"w{i} w{i + 1}", f"w{i + 2}"]) for i in range(10, 22)]
RULES = DistillRecipe(max_new_tokens=16)


@pytest.fixture(autouse=True)
def pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.runs.http.FIRST_PAUSE", 0.01)


def answers(
    url: str | list[str], model: str, seeds=SEEDS, rules: DistillRecipe = RULES, concurrency: int = 4
) -> list[Outcome]:
    """Returns what became of the seeds at one server, or at several."""
    servers = ChatServers([url] if isinstance(url, str) else url, "served")
    return list(answer_remotely(servers, Tokenizer(model), seeds, rules, concurrency))


def conversations(outcomes: list[Outcome]) -> list[Conversation]:
    return [outcome.conversation for outcome in outcomes if isinstance(outcome, Answered)]


def test_turns_follow_one_another_and_conversations_run_side_by_side(server: Server, model: str) -> None:
    made = conversations(answers(server.url, model))
    assert sorted(one.id for one in made) == sorted(one.id for one in SEEDS)
    assert 1 < server.most_together <= 4
    backbone = load_backbone(model, LoadOptions(dtype="fp32"))
    for one in made:
        roles = [message["role"] for message in one.messages]
        assert roles == ["user", "assistant", "user", "assistant"]
        assert one.messages[3]["content"] == "w3 " + one.messages[2]["content"]  # three messages came before it
        for (start, end), said in zip(one.spans, (1, 3), strict=True):
            assert backbone.decode(one.tokens[start:end]).strip() == one.messages[said]["content"]
            assert one.tokens[end - 1] in backbone.eos_ids
    sent = server.requests[0]
    assert set(sent) == {"model", "messages", "max_tokens", "temperature", "stream", "authorization"}
    assert (sent["model"], sent["max_tokens"], sent["stream"]) == ("served", 16, False)


def test_draws_depend_on_the_random_seed_and_the_conversation(server: Server, model: str) -> None:
    def sent(random_seed: int, temperature: float) -> dict[str, int]:
        server.requests.clear()
        rules = replace(RULES, random_seed=random_seed, temperature=temperature)
        assert len(answers(server.url, model, SEEDS[:3], rules)) == 3
        return {one["messages"][0]["content"]: one.get("seed") for one in server.requests}

    first = sent(1, 0.7)
    assert first == sent(1, 0.7) and len(set(first.values())) == 3 and all(0 <= one < 2**31 for one in first.values())
    assert not set(first.values()) & set(sent(2, 0.7).values())
    assert set(sent(1, 0.0).values()) == {None}


def test_a_seeds_system_prompt_opens_the_conversation(server: Server, model: str) -> None:
    (made,) = conversations(answers(server.url, model, [seed("one", ["w20"], "w30")]))
    assert [m["role"] for m in made.messages] == ["system", "user", "assistant"]
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "w30"}


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_as_the_servers_paths_begin(server: Server, model: str, end: str) -> None:
    servers = ChatServers([server.url + end], "served")
    assert servers.check() == [] and servers.models() == ["served"]
    assert servers.complete([{"role": "user", "content": "w1"}]) == ("w1 w1", "stop")


def test_busy_servers_are_asked_again_and_refusals_are_not(server: Server, model: str) -> None:
    seen: dict[str, int] = {}

    def spoil(number: int, body: dict) -> int | None:
        text = body["messages"][0]["content"]
        seen[text] = seen.get(text, 0) + 1
        if text.startswith("w12"):
            return 422
        return 503 if text.startswith("w13") and seen[text] < 3 else None

    server.fault = spoil
    made = answers(server.url, model)
    failed = [one for one in made if isinstance(one, Failed)]
    assert [one.id for one in failed] == ["s12"] and "status 422" in failed[0].reason
    assert seen["w12 w13"] == 1 and seen["w13 w14"] == 4  # two refusals, then both turns


@pytest.mark.parametrize(("pause", "headers"), [(60.0, {}), (0.0, {"Retry-After": "60"})])
def test_a_server_that_fails_is_left_alone_and_the_other_takes_its_work(
    server: Server, other: Server, model: str, pause: float, headers: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.runs.http.FIRST_PAUSE", pause)
    server.fault, server.headers = lambda number, body: 503 if number > 4 else None, headers
    made = conversations(answers([server.url, other.url], model))
    assert sorted(one.id for one in made) == sorted(one.id for one in SEEDS)
    assert len(server.requests) <= 4 + 4  # those under way when it began to fail
    assert len(other.requests) >= 2 * len(SEEDS) - 4


def test_a_server_says_how_long_it_wants_to_be_left_alone() -> None:
    soon = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=100), usegmt=True)
    assert retry_after("7") == 7 and 90 < retry_after(soon) <= 100
    assert retry_after("") == retry_after("soon") == 0


def test_the_first_name_that_the_server_knows_is_taken(server: Server, model: str) -> None:
    server.fault = lambda number, body: None if body["model"] == "served" else 404
    servers, silent = connect(server.url, None, Tokenizer(model))
    assert servers.model == "served" and silent == [] and len(server.requests) == 2
    with pytest.raises(UserError, match="status 404.*endpoint_model"):
        connect(server.url, "third", Tokenizer(model))


def test_what_there_is_no_room_for_is_not_asked(server: Server, model: str) -> None:
    seeds = [
        seed("long", ["w10 " * 90]),
        seed("later", ["w11", "w12 " * 90]),
        seed("endless", ["w13" * 10_000]),
        seed("whole", ["w14", "w15"]),
    ]
    made = answers(server.url, model, seeds, replace(RULES, context=100), concurrency=1)
    assert [one.id for one in made if isinstance(one, TooLong)] == ["long", "endless"]
    assert [(one.id, len(one.spans)) for one in conversations(made)] == [("later", 1), ("whole", 2)]
    assert len(server.requests) == 3


def test_an_answer_cut_by_its_length_has_no_end_token(model: str) -> None:
    speaker = Tokenizer(model)
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    whole, cut = (tokenise(speaker, "x", messages, [ended]) for ended in (True, False))
    assert whole.spans[0][1] == cut.spans[0][1] + 1 and whole.tokens == cut.tokens
    with pytest.raises(Malformed, match="do not give the text back"):
        tokenise(speaker, "x", [messages[0], {"role": "assistant", "content": "unknown words"}], [True])


@pytest.fixture
def seeds(tmp_path: Path) -> str:
    path = tmp_path / "seeds.jsonl"
    lines = [
        {"id": seed.id, "conversations": [{"from": "human", "value": turn} for turn in seed.turns]} for seed in SEEDS
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def test_a_server_that_dies_half_way_costs_no_sample_and_doubles_none(
    server: Server, model: str, seeds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_API_KEY", "secret")
    monkeypatch.setattr("medusa_cli.runs.http.ATTEMPTS", 2)
    run = tmp_path / "run"
    words = ["distill", "--seed", seeds, "--run", str(run), "--model", model, "--endpoint", server.url,
             "--endpoint-model", "served", "--max-new-tokens", "16", "--concurrency", "3", "--json"]  # fmt: skip
    server.fault = lambda number, body: 500 if number > 9 else None
    first = medusa(*words)
    assert first.exit_code == 0, first.output
    summary = json.loads(first.stdout)
    assert 0 < summary["conversations"] < len(SEEDS)
    assert summary["failed"] == len(SEEDS) - summary["conversations"]
    assert len((run / "distill-failed.jsonl").read_text().splitlines()) == summary["failed"]
    assert server.requests[0]["authorization"] == "Bearer secret"
    server.fault = lambda number, body: None
    second = json.loads(medusa(*words).stdout)
    assert second["conversations"] == len(SEEDS) and second["failed"] == 0
    assert not (run / "distill-failed.jsonl").exists()
    ids = [json.loads(line)["id"] for line in (run / "distill.jsonl").read_text().splitlines()]
    assert sorted(ids) == sorted(seed.id for seed in SEEDS)
    # What came from the server trains: the states are computed here, and the run learns whose they are.
    trained = medusa("train", "--run", str(run), "--dtype", "fp32", "drafter.vocabulary=own", "drafter.num_heads=2")
    assert trained.exit_code == 0, trained.output
    assert json.loads((run / "run.json").read_text())["backbone"]["fingerprint"]
    assert Run(run).drafter_dir.is_dir()


def test_of_two_servers_one_may_die_half_way_and_be_away_at_the_next_start(
    server: Server, other: Server, model: str, seeds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.runs.http.ATTEMPTS", 3)
    run = tmp_path / "run"
    words = ["distill", "--seed", seeds, "--run", str(run), "--model", model, "--endpoint", f"{server.url},{other.url}",
             "--endpoint-model", "served", "--max-new-tokens", "16", "--concurrency", "3", "--json"]  # fmt: skip

    def die(number: int, body: dict) -> int | None:
        if number == 5:
            server.stop()
        return 500 if number >= 5 else None

    server.fault = die
    first = medusa(*words, "--max-samples", "9")
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["failed"] == 0
    again = medusa(*words)
    assert again.exit_code == 0, again.output
    assert f"{server.url} does not answer (ConnectionError); the others take its work" in " ".join(again.stderr.split())
    ids = [json.loads(line)["id"] for line in (run / "distill.jsonl").read_text().splitlines()]
    assert sorted(ids) == sorted(seed.id for seed in SEEDS)


def test_what_the_template_refuses_here_is_counted_as_failed(model: str, seeds: str, tmp_path: Path) -> None:
    template = Path(model, "chat_template.jinja")
    refusing = tmp_path / "refusing"
    shutil.copytree(model, refusing)
    refusal = "{% if 'w13' in messages[0]['content'] %}{{ raise_exception('no thirteen') }}{% endif %}"
    (refusing / template.name).write_text(refusal + template.read_text())
    run = tmp_path / "run"
    done = medusa("distill", "--seed", seeds, "--run", str(run), "--model", str(refusing), "--dtype", "fp32",
                  "--max-new-tokens", "4", "--json")  # fmt: skip
    summary = json.loads(done.stdout)
    assert (summary["failed"], summary["conversations"]) == (2, len(SEEDS) - 2)
    lines = [json.loads(line) for line in (run / "distill-failed.jsonl").read_text().splitlines()]
    assert sorted(one["id"] for one in lines) == ["s12", "s13"] and "no thirteen" in lines[0]["reason"]


def test_a_server_that_is_not_there_is_named(model: str, seeds: str, tmp_path: Path) -> None:
    words = ["distill", "--seed", seeds, "--run", str(tmp_path / "run"), "--model", model, "--endpoint"]
    done = medusa(*words, "http://127.0.0.1:9")
    assert done.exit_code == 1 and "--endpoint http://127.0.0.1:9 does not answer" in done.stderr
    done = medusa(*words, "nowhere at all")
    assert done.exit_code == 1 and "is no address" in done.stderr


def test_a_model_the_server_does_not_know_is_said_at_once(
    server: Server, model: str, seeds: str, tmp_path: Path
) -> None:
    server.fault = lambda number, body: 400
    words = ["distill", "--seed", seeds, "--run", str(tmp_path / "run"), "--model", model, "--endpoint", server.url]
    done = medusa(*words, "--endpoint-model", "other")
    assert done.exit_code == 1 and "'other'" in done.stderr and "status 400" in done.stderr
    assert len(server.requests) == 1 and not (tmp_path / "run" / "distill.jsonl").exists()
