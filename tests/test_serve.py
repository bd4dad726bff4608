"""`medusa serve` as a process: it says where it listens, finishes its answers on SIGTERM, and names what is wrong."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from medusa_cli.api import Medusa
from medusa_cli.errors import UserError
from medusa_cli.serve import server
from medusa_cli.serve.limits import Limits
from tests.helpers import medusa, save_model, save_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("serve")
    return f"{save_run(folder / 'run', save_model(folder / 'model', positions=8192)).path}/"


def test_sigterm_lets_answers_finish_and_ends_well(run: str) -> None:
    command = [sys.executable, "-m", "medusa_cli", "serve", "--run", run, "--port", "0", "--tree", "static"]
    process = subprocess.Popen([*command, "--dtype", "fp32"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "the server did not start"
            found = re.search(r"serving 'model' at (http://127\.0\.0\.1:\d+)/v1", line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        body = {"model": "model", "prompt": [8, 30], "max_tokens": 2000, "stream": True, "temperature": 5, "seed": 3}
        asked = urllib.request.Request(
            f"{found[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            first = answer.readline()
            process.send_signal(signal.SIGTERM)
            lines = [first, *answer.readlines()]
        assert lines[-2].strip() == b"data: [DONE]"
        last = json.loads(next(line for line in reversed(lines) if line.startswith(b"data: {"))[6:])
        assert last["choices"][0]["finish_reason"] in ("stop", "length")
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["--host", "nowhere.invalid"], "--host nowhere.invalid --port 8000 cannot be had", 2),
        (["--host", "x" * 300], "cannot be had", 2),
        (["--host", "\0"], "cannot be had", 2),
        (["--port", "65536"], "--port", 2),
        (["--run", "/no/such/run"], "does not exist", 1),
    ],
)
def test_what_cannot_be_served_is_one_line(words: list[str], said: str, code: int) -> None:
    done = medusa("serve", *words)
    assert done.exit_code == code and said in done.stderr and "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = medusa("serve", "--port", port, "--model", "/no/model")
    assert done.exit_code == 2 and f"--port {port} cannot be had" in done.stderr


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.startswith("medusa_cli.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = medusa("serve", "--port", "0")
    assert done.exit_code == 1 and "medusa-cli[serve]" in done.stderr


@pytest.mark.parametrize(("named", "served"), [(".", "x1"), ("../mine", "mine")])
def test_a_model_is_served_under_its_folders_name_or_that_of_a_link_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, served: str
) -> None:
    found = list[str]()

    def prepared(medusa: Medusa, limits: Limits) -> None:
        found.append(limits.name)
        raise UserError("enough", "no more")

    monkeypatch.setattr(server, "prepare", prepared)
    save_model(tmp_path / "x1")
    (tmp_path / "mine").symlink_to(tmp_path / "x1")
    monkeypatch.chdir(tmp_path / "x1")
    medusa("serve", "--model", named, "--baseline", "--port", "0", "--dtype", "fp32")
    assert found == [served]
