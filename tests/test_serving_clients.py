"""What the server does with clients that are too large, too slow, too many, strangers or gone, and when it stops."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from medusa_cli.api import Medusa
from tests.helpers import save_model, save_run
from tests.serving import MODEL, serving

IDS = [5, 9, 20, 11, 7]
LONG = {"model": MODEL, "prompt": [8, 30], "max_tokens": 400}


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Medusa:
    folder = tmp_path_factory.mktemp("clients")
    run = save_run(folder / "run", save_model(folder / "model"))
    return Medusa.from_pretrained(drafter=run.path, tree="static", dtype="fp32")


@pytest.fixture
def endless(medusa: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    """No end token, so that answers are as long as they are asked to be, and steps that take their time."""
    monkeypatch.setitem(medusa.backbone.__dict__, "eos_ids", frozenset())
    forward = medusa.backbone.engine.forward

    def slowly(*given, **named):
        time.sleep(0.01)
        return forward(*given, **named)

    monkeypatch.setattr(medusa.backbone.engine, "forward", slowly)


def test_sizes_are_limited(medusa: Medusa) -> None:
    with serving(medusa, max_body=2000, max_prompt_tokens=20) as server:
        status, _, found = server.post({"model": MODEL, "prompt": [8] * 21})
        assert status == 400 and "21 tokens, this server takes 20" in found["error"]["message"]
        assert server.post({"model": MODEL, "prompt": [8] * 20, "max_tokens": 1})[0] == 200
        large = {"model": MODEL, "prompt": "w1 " * 1000}
        assert server.post(large)[0] == 413
        # The same without a length beforehand, so that it shows on the way.
        with socket.create_connection(("127.0.0.1", server.port)) as door:
            door.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            door.sendall(b"%x\r\n%s\r\n" % (3000, b" " * 3000))
            assert door.recv(100).startswith(b"HTTP/1.1 413")


def test_a_completion_that_names_no_limit_has_the_servers_where_that_is_less(medusa: Medusa) -> None:
    with serving(medusa, max_new_tokens=8) as server:
        status, _, found = server.post({"model": MODEL, "prompt": IDS})
        assert status == 200 and found["usage"]["completion_tokens"] <= 8
        status, _, found = server.post({"model": MODEL, "prompt": IDS, "max_tokens": 16})
        assert status == 400 and "max_tokens 16 is more than the 8" in found["error"]["message"]


def test_a_body_that_does_not_come_is_not_waited_for(medusa: Medusa) -> None:
    with serving(medusa, body_s=0.2) as server, socket.create_connection(("127.0.0.1", server.port)) as door:
        door.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert door.recv(100).startswith(b"HTTP/1.1 408")
        assert server.post({"model": MODEL, "prompt": IDS, "max_tokens": 1})[0] == 200


def test_the_key_is_asked_for(medusa: Medusa) -> None:
    with serving(medusa, api_key="söcret") as server:
        body = {"model": MODEL, "prompt": IDS, "max_tokens": 1}
        for wrong in (
            {},
            {"Authorization": "Bearer secret"},
            {"Authorization": "Bearer "},
            {"Authorization": "söcret"},
        ):
            status, headers, found = server.post(body, **wrong)
            assert (
                status == 401
                and found["error"]["code"] == "invalid_api_key"
                and "bearer" in headers["www-authenticate"].lower()
            )
        right = "Bearer söcret".encode().decode("latin-1")  # headers go as bytes, these in UTF-8
        assert server.post(body, Authorization=right)[0] == 200
        assert server.ask("GET", "/v1/models")[0] == 401
        assert server.ask("GET", "/health")[0] == server.ask("GET", "/")[0] == 200
    with serving(medusa, api_key="secret") as server:
        assert server.openai(api_key="secret").completions.create(**body).choices[0].text
        with pytest.raises(openai.AuthenticationError):
            server.openai(api_key="Secret").completions.create(**body)


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(medusa: Medusa, stream: bool) -> None:
    with serving(medusa, slots=1, waiting=4) as server:
        for _ in range(2):  # the second waits in the queue when it goes
            door = socket.create_connection(("127.0.0.1", server.port))
            body = json.dumps({**LONG, "stream": stream}).encode()
            door.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            door.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            server.until("medusa_requests_running", 1)
            if stream:
                assert door.recv(12) == b"HTTP/1.1 200"
            waits = socket.create_connection(("127.0.0.1", server.port))
            waits.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            waits.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            server.until("medusa_requests_waiting", 1)
            waits.close()
            server.until("medusa_requests_waiting", 0)
            assert server.number("medusa_requests_running") == 1
            door.close()
            server.until("medusa_requests_running", 0)
        lines = server.ask("GET", "/metrics")[2]
        assert 'medusa_requests_total{reason="cancelled"} 4.0' in lines


@pytest.mark.usefixtures("endless")
def test_a_full_queue_says_when_to_come_again(medusa: Medusa) -> None:
    with serving(medusa, slots=1, waiting=1) as server, ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(server.post, {**LONG, "max_tokens": 150}) for _ in range(2)]
        server.until("medusa_requests_running", 1)
        server.until("medusa_requests_waiting", 1)
        status, headers, found = server.post(LONG)
        assert status == 429 and int(headers["retry-after"]) >= 1 and found["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(**LONG)
        assert [one.result()[0] for one in busy] == [200, 200]
        assert server.post({**LONG, "max_tokens": 1})[0] == 200


@pytest.mark.usefixtures("endless")
def test_requests_join_and_leave_a_running_batch(medusa: Medusa) -> None:
    with serving(medusa, slots=2) as server, ThreadPoolExecutor(4) as pool:
        long = pool.submit(server.post, LONG)
        server.until("medusa_requests_running", 1)
        assert server.post({**LONG, "max_tokens": 3})[0] == 200  # joins, and is done first
        assert not long.done()
        found = long.result()[2]
        assert found["usage"]["completion_tokens"] == 400
        assert found["choices"][0]["text"] == medusa.generate([8, 30], max_new_tokens=400).text
        assert server.number("medusa_batch_size_count") < 400 + 3


@pytest.mark.usefixtures("endless")
def test_a_server_that_is_told_to_stop_finishes_its_answers(medusa: Medusa) -> None:
    with serving(medusa, slots=1) as server, ThreadPoolExecutor(4) as pool:
        client = server.openai()
        running = pool.submit(client.completions.create, **LONG)
        server.until("medusa_requests_running", 1)
        server.server.stop()
        with pytest.raises(openai.InternalServerError) as caught:
            server.openai().completions.create(**LONG)
        assert caught.value.status_code == 503
        assert server.ask("GET", "/health")[0] == 503
        assert running.result().usage.completion_tokens == 400


def test_a_step_that_fails_is_told_and_the_next_request_is_served(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(medusa) as server:
        forward, calls = medusa.backbone.engine.forward, []

        def broken(*given, **named):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("the machine is on fire")
            return forward(*given, **named)

        monkeypatch.setattr(medusa.backbone.engine, "forward", broken)
        body = {"model": MODEL, "prompt": IDS, "max_tokens": 30}
        status, _, found = server.post(body)
        assert status == 500 and "fire" not in found["error"]["message"]
        alone = server.post(body)[2]["choices"][0]["text"]
        assert alone == medusa.generate(IDS, max_new_tokens=30).text
        calls.clear()
        with pytest.raises(openai.APIError):
            list(server.openai().completions.create(**body, stream=True))
