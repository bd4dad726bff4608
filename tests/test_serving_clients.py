"""The server limits sizes, time and access, frees slots of clients that leave, and finishes answers when it stops."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from medusa_cli.api import Medusa
from tests.serving import IDS, MODEL, Served, serving, tiny_medusa

SHORT = {"model": MODEL, "prompt": IDS, "max_tokens": 1}
LONG = {"model": MODEL, "prompt": [8, 30], "max_tokens": 400}


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Medusa:
    return tiny_medusa(tmp_path_factory.mktemp("clients"))


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
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    for part in parts:
        connection.sendall(part)
    return connection


def test_prompt_answer_and_body_are_limited(medusa: Medusa) -> None:
    with serving(medusa, max_body=2000, max_prompt_tokens=20, max_new_tokens=8) as server:
        status, _, answer = server.post({"model": MODEL, "prompt": [8] * 21})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert server.post({"model": MODEL, "prompt": [8] * 20, "max_tokens": 1})[0] == 200
        status, _, answer = server.post({"model": MODEL, "prompt": IDS})  # less than OpenAI's default of 16
        assert status == 200 and answer["usage"]["completion_tokens"] <= 8
        status, _, answer = server.post({"model": MODEL, "prompt": IDS, "max_tokens": 16})
        assert status == 400 and answer["error"]["param"] == "max_tokens"
        assert server.post({"model": MODEL, "prompt": "w1 " * 1000})[0] == 413
        with send(server, b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n" % (3000, b" " * 3000)) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_an_incomplete_body_times_out(medusa: Medusa) -> None:
    with serving(medusa, body_s=0.2) as server, send(server, b"Content-Length: 100\r\n\r\n{") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
        assert server.post(SHORT)[0] == 200


@pytest.mark.parametrize("given", [None, "Bearer secret", "Bearer ", "söcret", "Bearer Söcret"])
def test_a_wrong_key_is_refused(medusa: Medusa, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.encode().decode("latin-1")}  # headers go in UTF-8
    with serving(medusa, api_key="söcret") as server:
        status, sent, answer = server.post(SHORT, **headers)
        assert status == 401 and answer["error"]["code"] == "invalid_api_key" and "www-authenticate" in sent
        assert server.request("GET", "/v1/models", headers=headers)[0] == 401
        assert server.request("GET", "/health")[0] == server.request("GET", "/")[0] == 200
        assert server.post(SHORT, Authorization="Bearer söcret".encode().decode("latin-1"))[0] == 200


def test_openais_client_sends_the_key(medusa: Medusa) -> None:
    with serving(medusa, api_key="secret") as server:
        assert server.openai(api_key="secret").completions.create(**SHORT).choices[0].text
        with pytest.raises(openai.AuthenticationError):
            server.openai(api_key="Secret").completions.create(**SHORT)


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
        assert 'medusa_requests_total{reason="cancelled"} 2.0' in server.request("GET", "/metrics")[2]


@pytest.mark.usefixtures("endless")
def test_a_full_queue_asks_to_retry_later(medusa: Medusa) -> None:
    with serving(medusa, slots=1, waiting=1) as server, ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(server.post, {**LONG, "max_tokens": 150}) for _ in range(2)]
        server.until("medusa_requests_running", 1)
        server.until("medusa_requests_waiting", 1)
        status, headers, answer = server.post(LONG)
        assert status == 429 and int(headers["retry-after"]) >= 1 and answer["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(**LONG)
        assert [answer.result()[0] for answer in busy] == [200, 200]
        assert server.post(SHORT)[0] == 200


@pytest.mark.usefixtures("endless")
def test_requests_join_and_leave_a_running_batch(medusa: Medusa) -> None:
    with serving(medusa, slots=2) as server, ThreadPoolExecutor(4) as pool:
        long = pool.submit(server.post, LONG)
        server.until("medusa_requests_running", 1)
        assert server.post({**LONG, "max_tokens": 3})[0] == 200  # joins, and ends first
        assert not long.done()
        answer = long.result()[2]
        assert answer["usage"]["completion_tokens"] == 400
        assert answer["choices"][0]["text"] == medusa.generate([8, 30], max_new_tokens=400).text
        assert server.number("medusa_batch_size_count") < 400 + 3


@pytest.mark.usefixtures("endless")
def test_a_stopping_server_finishes_its_answers_and_refuses_new_ones(medusa: Medusa) -> None:
    with serving(medusa, slots=1) as server, ThreadPoolExecutor(4) as pool:
        running = pool.submit(server.openai().completions.create, **LONG)
        server.until("medusa_requests_running", 1)
        assert server.server is not None
        server.server.stop()
        status, headers, answer = server.post(LONG)
        assert (status, answer["error"]["code"]) == (503, "closing") and "retry-after" in headers
        assert server.request("GET", "/health")[0] == 503
        assert running.result().usage.completion_tokens == 400


def test_a_failed_step_fails_its_requests_and_serves_the_next(medusa: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert status == 500 and "fire" not in answer["error"]["message"]
        assert server.post(body)[2]["choices"][0]["text"] == medusa.generate(IDS, max_new_tokens=30).text
        calls.clear()
        with pytest.raises(openai.APIError):
            list(server.openai().completions.create(**body, stream=True))
