"""Answers are recorded only if asked for, whole after a kill, and left out on request; a drafter is loaded again."""

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.api import Medusa
from medusa_cli.decode import Answer, Request
from medusa_cli.errors import UserError
from medusa_cli.files.model_source import ModelSource
from medusa_cli.loading import with_drafting
from medusa_cli.runs.resolve import choose
from medusa_cli.serve.metrics import Metrics
from medusa_cli.serve.record import Recorder, answerer
from medusa_cli.serve.scheduler import Event, Scheduler, Ticket
from medusa_cli.tune.prompts import read_prompts
from tests.helpers import save_model, save_run
from tests.serving import IDS, MODEL, Served, serving, start, tiny_medusa

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 12}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="module")
def medusa(place: Path) -> Medusa:
    return tiny_medusa(place)


@pytest.fixture(scope="module")
def running(medusa: Medusa) -> Iterator[Served]:
    with serving(medusa) as server:
        yield server


@pytest.fixture
def server(running: Served, medusa: Medusa, tmp_path: Path) -> Served:
    """Returns the running server, which records in the test's folder."""
    assert running.server is not None
    weights = answerer(medusa.backbone.identity)
    running.server._scheduler.recorder = Recorder(tmp_path / "traffic.jsonl", weights)
    return running


@pytest.mark.slow
def test_answers_are_conversations_for_tune(
    server: Served, medusa: Medusa, tmp_path: Path, place: Path
) -> None:
    status, _, answer = server.post(CHAT, "/v1/chat/completions")
    assert status == 200
    server.post({"prompt": IDS, "max_tokens": 5})
    chat, completion = lines_of(tmp_path / "traffic.jsonl")
    assert stat.S_IMODE((tmp_path / "traffic.jsonl").stat().st_mode) == 0o600
    text = answer["choices"][0]["message"]["content"]
    assert chat["messages"] == [*CHAT["messages"], {"role": "assistant", "content": text}]
    prompt = medusa.encode("w1 w2")
    alone = medusa.generate("w1 w2", max_new_tokens=12)
    [[begin, end]] = chat["spans"]
    assert chat["tokens"][:begin] == prompt
    assert end == len(chat["tokens"]) == len(prompt) + 12
    assert medusa.backbone.decode(chat["tokens"][begin:]) == alone.text
    assert [chat["kind"], completion["kind"]] == ["chat", "completion"]
    assert completion["tokens"][: len(IDS)] == IDS
    assert completion["messages"] == []

    seeds, _ = read_prompts(ModelSource.of(str(place / "model")), tmp_path / "traffic.jsonl")
    assert [seed.spans for seed in seeds] == [[(begin, end)], [(5, 10)]]


@pytest.mark.quick(
    "/api/generate-body7-headers7", "/completion-body5-headers5", "/v1/responses-body4-headers4"
)
@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/chat/completions", {**CHAT, "record": False}, {}),
        ("/v1/chat/completions", CHAT, {"X-Medusa-Record": "no"}),
        ("/v1/chat/completions", {**CHAT, "stream": True, "record": False}, {}),
        ("/v1/messages", {**CHAT, "record": False}, {}),
        ("/v1/responses", {"input": "w1", "max_output_tokens": 4, "record": False}, {}),
        ("/completion", {"prompt": IDS, "n_predict": 4, "record": False}, {}),
        ("/api/chat", {"messages": CHAT["messages"], "record": False}, {}),
        ("/api/generate", {"prompt": "w1", "options": {"num_predict": 3, "record": False}}, {}),
        ("/api/generate", {"prompt": "w1"}, {"X-Medusa-Record": "False"}),
    ],
)
def test_requests_that_say_so_are_left_out(
    server: Served, tmp_path: Path, path: str, body: Any, headers: dict[str, str]
) -> None:
    status, _, _ = server.request("POST", path, body, headers)
    assert status == 200
    assert (tmp_path / "traffic.jsonl").read_bytes() == b""
    server.post({"prompt": IDS, "max_tokens": 2})
    assert len(lines_of(tmp_path / "traffic.jsonl")) == 1


def test_nothing_is_recorded_unless_asked(medusa: Medusa, tmp_path: Path) -> None:
    before = sorted(Path.cwd().iterdir())
    with serving(medusa) as running:
        running.post(CHAT, "/v1/chat/completions")
    assert sorted(Path.cwd().iterdir()) == before
    assert not list(tmp_path.iterdir())


def test_lines_are_whole_after_kills_and_several_writers(tmp_path: Path) -> None:
    """Two writers of long lines are killed again and again; each line that is left is a whole one."""
    path = tmp_path / "traffic.jsonl"

    def write() -> None:
        recorder = Recorder(path, "w")
        while True:
            recorder._append(b'{"x": "' + b"y" * 3_000_000 + b'"}\n')

    writers = [get_context("fork").Process(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while not path.exists() or path.stat().st_size < 30_000_000:
        time.sleep(0.005)
    for writer in writers:
        writer.kill()
        writer.join()
    with path.open("ab") as cut:
        cut.write(b'{"x": "cut')
    Recorder(path, "w")._append(b'{"x": "last"}\n')
    lines = lines_of(path)
    assert len(lines) > 5
    assert lines[-1] == {"x": "last"}
    assert {len(line["x"]) for line in lines[:-1]} == {3_000_000}


def test_a_moved_file_is_begun_anew_after_a_reload(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "traffic.jsonl", "w")
    recorder._append(b"{}\n")
    (tmp_path / "traffic.jsonl").rename(tmp_path / "old.jsonl")
    recorder.reopen()
    recorder._append(b"[]\n")
    assert (tmp_path / "old.jsonl").read_text() == "{}\n"
    assert (tmp_path / "traffic.jsonl").read_text() == "[]\n"
    with pytest.raises(OSError, match="directory"):
        Recorder(tmp_path, "w")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="record"):
        Recorder(tmp_path / "pipe", "w")


def test_acceptance_is_reported_by_kind(server: Served) -> None:
    server.post(CHAT, "/v1/chat/completions")
    server.post({"prompt": IDS, "max_tokens": 9})
    page = server.request("GET", "/metrics")[2]
    for kind in ("chat", "completion"):
        assert f'medusa_kind_steps_total{{kind="{kind}"}}' in page
        assert f'medusa_kind_accepted_tokens_total{{kind="{kind}"}}' in page


# Another drafter.


def test_streams_go_on_while_another_drafter_is_loaded(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    old, new = (
        save_run(tmp_path / name, model, heads=heads) for name, heads in (("a", 3), ("b", 4))
    )
    medusa = Medusa.from_pretrained(drafter=old.path, tree="static", dtype="fp32")
    scheduler = Scheduler(medusa, Metrics(), slots=2, waiting=2)
    expected = {
        prompt: medusa.generate(prompt, max_new_tokens=40, stop_ids=(), raw=True).text
        for prompt in ((5, 9, 20), (5, 9, 21), (7, 8))
    }
    texts = dict.fromkeys(expected, "")
    loads = 0

    def load() -> Any:
        nonlocal loads
        loads += 1
        if loads == 1:
            raise UserError("it is being written")
        return with_drafting(
            medusa.loaded, choose(ModelSource.of(model), None, str(new.path), "static")
        )

    def ask(prompt: tuple[int, ...]) -> None:
        def deliver(event: Event) -> None:
            assert event.error is None
            texts[prompt] += "".join(piece.text for piece in event.pieces)
            if prompt == (5, 9, 20) and loads < 2:
                scheduler.reload(load)
            elif loads == 2 and not texts[7, 8] and len(scheduler._waiting) == 0:
                ask((7, 8))

        request = Request(prompt, 40, stop_ids=())
        scheduler.submit([Ticket(request, Answer(medusa.backbone), deliver)])

    ask((5, 9, 20))
    ask((5, 9, 21))
    first = scheduler._decoder
    scheduler.drain()
    scheduler.closing = False
    scheduler_stops(scheduler, texts, expected)
    assert texts == expected
    assert loads == 2
    assert scheduler._decoder is not first
    assert scheduler._retiring == []
    assert medusa.loaded.drafter is not None
    assert medusa.loaded.drafter.num_heads == 4


def scheduler_stops(scheduler: Scheduler, texts: dict[Any, str], expected: dict[Any, str]) -> None:
    """Runs a scheduler until all texts are complete."""
    import threading

    def drain() -> None:
        late = time.monotonic() + 120
        while texts != expected and time.monotonic() < late:
            time.sleep(0.02)
        scheduler.drain()

    threading.Thread(target=drain, daemon=True).start()
    scheduler.run()


def test_another_model_is_refused(tmp_path: Path, medusa: Medusa) -> None:
    other = save_model(tmp_path / "other")
    run = save_run(tmp_path / "run", other)
    with pytest.raises(UserError, match="start the server again"):
        with_drafting(medusa.loaded, choose(ModelSource.of(other), None, str(run.path), "static"))


@pytest.mark.slow
def test_a_signal_loads_the_drafter_again(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    run = save_run(tmp_path / "run", model)
    log = tmp_path / "log"
    words = ["--run", f"{run.path}/", "--tree", "static", "--dtype", "fp32", "--device", "cpu"]
    process, port = start([*words, "--record", str(tmp_path / "traffic.jsonl")], log)
    try:
        save_run(tmp_path / "run", model, heads=4)
        process.send_signal(signal.SIGHUP)
        late = time.monotonic() + 60
        while log.read_text().count("medusa drafter") < 2:
            assert time.monotonic() < late, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        status, _, _ = Served(port).post({"prompt": IDS, "max_tokens": 4})
        assert status == 200
        process.kill()
        process.wait()
        assert len(lines_of(tmp_path / "traffic.jsonl")) == 1
    finally:
        process.kill()
