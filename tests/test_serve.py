"""`medusa serve` as a process: it prints its address, finishes answers on SIGTERM, and reports faults in one line."""

import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from medusa_cli.api import Medusa
from medusa_cli.errors import UserError
from medusa_cli.serve import server
from medusa_cli.serve.middleware import Limits
from tests.helpers import medusa, save_model, save_run
from tests.serving import Served, fork, serving, start
from tests.test_gguf import write_gguf


@pytest.mark.slow
def test_sigterm_finishes_answers_and_exits_with_0(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", save_model(tmp_path / "model", positions=8192)).path
    process, port = start(
        ["--run", f"{run}/", "--tree", "static", "--dtype", "fp32"], tmp_path / "log"
    )
    try:
        body = {
            "model": "model",
            "prompt": [8, 30],
            "max_tokens": 500,
            "stream": True,
            "temperature": 5,
            "seed": 3,
        }
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{port}/v1/completions"
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers)
        ) as answer:
            first = answer.readline()
            process.send_signal(signal.SIGTERM)
            lines = [first, *answer.readlines()]
        assert lines[-2].strip() == b"data: [DONE]"
        last = json.loads(next(line for line in reversed(lines) if line.startswith(b"data: {"))[6:])
        assert last["choices"][0]["finish_reason"] in ("stop", "length")
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.slow
def test_prefixes_come_back_after_a_kill_and_after_a_stop(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", save_model(tmp_path / "model", positions=4096)).path
    store = tmp_path / "store"
    words = [
        "--run",
        f"{run}/",
        "--tree",
        "static",
        "--dtype",
        "fp32",
        "--prefix-store",
        f"{store}:1",
    ]
    # The tokens of the answer are the next prompt's.
    body = {"prompt": [5 + n * n % 50 for n in range(1300)], "max_tokens": 30, "logprobs": 2}
    cached, texts = list[int](), list[str]()
    for turn in range(3):
        process, port = fork(words, tmp_path / f"log{turn}")
        try:
            answered = Served(port).post({**body, "return_token_ids": True})[2]
            [choice] = answered["choices"]
            cached.append(answered["usage"]["prompt_tokens_details"]["cached_tokens"])
            texts.append(json.dumps([choice["text"], choice["logprobs"]]))
            restored = Served(port).number("medusa_prompt_tokens_restored_total")
            assert restored == cached[-1]
            end = time.monotonic() + 60
            while len(list(store.glob("*.prefix"))) < 2:
                assert time.monotonic() < end
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGTERM if turn else signal.SIGKILL)
            process.join(60)
            assert process.exitcode == (0 if turn else -signal.SIGKILL)
        finally:
            process.kill()
    assert cached == [0, 1024, 1299]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("store", ["", ":3", "{folder}:0", "{folder}:x", "{folder}:nan"])
def test_a_store_that_is_no_folder_with_a_size_is_refused(tmp_path: Path, store: str) -> None:
    words = ["--model", tmp_path / "none", "--prefix-store", store.format(folder=tmp_path)]
    assert "--prefix-store" in medusa("serve", *words, exit_code=2).stderr


@pytest.mark.slow
def test_a_server_without_files_left_recovers_and_logs_little(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", save_model(tmp_path / "model")).path
    # A fork would count the open files of this process, too.
    shell = ["bash", "-c", 'ulimit -n 120; exec "$@"', "limited"]
    process, port = start(
        ["--run", f"{run}/", "--baseline", "--dtype", "fp32"], tmp_path / "log", shell
    )
    try:
        with ExitStack() as silent:
            for _ in range(200):
                silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port), timeout=10) as garbage:
                    garbage.sendall(b"\0\r\n\r\n")
                    garbage.recv(100)
            assert Served(port).request("GET", "/health")[0] == 200
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "log").stat().st_size < 10_000


def test_a_port_in_use_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["serve", "--port", port, "--model", model, "--baseline"]
        assert f"--port {port}" in medusa(*words, exit_code=2).stderr


@pytest.mark.slow
def test_a_model_is_served_with_a_chat_template_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = list[Medusa]()

    def record(medusa: Medusa, limits: Limits, *_: object) -> None:
        loaded.append(medusa)
        raise UserError("enough", "no more")

    model, template = save_model(tmp_path / "model"), tmp_path / "own.jinja"
    template.write_text(
        "{% for message in messages %}{{ 'w5 ' + message.content + ' w6 ' }}{% endfor %}"
    )
    with monkeypatch.context() as patched:
        patched.setattr(server, "Server", record)
        words = ["--model", model, "--baseline", "--port", "0", "--dtype", "fp32"]
        medusa("serve", *words, "--chat-template", template, exit_code=1)
    with serving(loaded[0]) as served:
        body = {
            "messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
        }
        _, _, tokens = served.post(body, "/tokenize")
        _, _, text = served.post({"tokens": tokens["tokens"]}, "/detokenize")
    assert text["prompt"] == "w5 w1 w6 w5 w2 w6"


class Stopped:
    """Stands for a server that stops at once, after `meanwhile`."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.meanwhile = meanwhile

    def __call__(self, medusa: Medusa, limits: Limits, *_: object) -> "Stopped":
        return self

    def run(self, listener: socket.socket) -> None:
        self.meanwhile()


def test_a_stopping_server_leaves_the_socket_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "socket"
    words = ["--model", save_model(tmp_path / "model"), "--baseline", "--dtype", "fp32"]
    monkeypatch.setattr(server, "Server", Stopped())
    medusa("serve", *words, "--uds", place)
    assert not place.exists()

    def replace() -> None:
        place.unlink()
        server.listen("", 0, place).close()

    monkeypatch.setattr(server, "Server", Stopped(replace))
    medusa("serve", *words, "--uds", place)
    assert place.is_socket()


@pytest.mark.slow
def test_the_printed_address_is_of_the_scheme_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "Server", Stopped())
    monkeypatch.setattr(server, "check_certificate", lambda *_: None)
    words = ["--model", save_model(tmp_path / "model"), "--baseline", "--dtype", "fp32"]
    words += ["--port", "0"]
    assert "at http://127.0.0.1:" in medusa("serve", *words).stderr
    certified = medusa("serve", *words, "--ssl-certfile", tmp_path / "certificate.pem")
    assert "at https://127.0.0.1:" in certified.stderr


@pytest.mark.quick(".-x1")
@pytest.mark.parametrize(
    ("model", "name"), [(".", "x1"), ("../mine", "mine"), ("../tiny.gguf", "tiny.gguf")]
)
def test_a_model_is_served_under_the_name_of_its_folder_link_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, name: str
) -> None:
    names = list[str]()

    def record(medusa: Medusa, limits: Limits, *_: object) -> None:
        names.extend(limits.names)
        raise UserError("enough", "no more")

    monkeypatch.setattr(server, "Server", record)
    save_model(tmp_path / "x1")
    (tmp_path / "mine").symlink_to(tmp_path / "x1")
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "x1")
    medusa("serve", "--model", model, "--baseline", "--port", "0", "--dtype", "fp32", exit_code=1)
    assert names == [name]


def test_flags_of_access_and_limits_reach_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Limits]()

    def record(medusa: Medusa, limits: Limits, *_: object) -> None:
        seen.append(limits)
        raise UserError("enough", "no more")

    monkeypatch.setattr(server, "Server", record)
    monkeypatch.setenv("MEDUSA_API_KEY", "of-the-environment")
    words = [
        "--model",
        save_model(tmp_path / "model"),
        "--baseline",
        "--dtype",
        "fp32",
    ]
    more = [
        "--api-key",
        "first",
        "--api-key",
        "second",
        "--cors",
        "https://chat.example",
        "--cors",
        "*",
    ]
    more += [
        "--access-log",
        "--max-body",
        "3",
        "--context",
        "40",
        "--uds",
        tmp_path / "socket",
    ]
    medusa("serve", *words, "--api-key", "", exit_code=2)
    medusa("serve", *words, *more, exit_code=1)
    medusa("serve", *words, "--port", "0", exit_code=1)
    given, bare = seen
    assert given.api_keys == ("first", "second")
    assert bare.api_keys == ("of-the-environment",)
    assert given.cors == ("https://chat.example", "*")
    assert bare.cors == ()
    assert given.access_log
    assert not bare.access_log
    assert given.max_body == 3 << 10
    assert given.context == 40
    assert given.host == ""
    assert bare.host == "127.0.0.1"
