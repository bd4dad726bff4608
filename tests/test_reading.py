"""JSON and YAML from anywhere: bounded, no key twice, of the types that are declared; each fault is one line."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from medusa_cli.data.conversation import read_conversations
from medusa_cli.distill import Records
from medusa_cli.errors import LONGEST, UserError
from medusa_cli.runs.io import read_json
from medusa_cli.runs.run import Run
from medusa_cli.train.log import Validated, read_log
from tests.helpers import medusa, save_model, save_run, tiny_backbone

DEEP = "[" * 5000 + "]" * 5000
LONG = "9" * 5000


@pytest.mark.parametrize("text", [DEEP, LONG, "1e999", "NaN", '{"a": {"b": "\\ud800"}}', "{", "  ", "{} {}"])
def test_bad_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"the file .*a\.json is empty, cut off or no JSON") as raised:
        read_json(tmp_path / "a.json", "the file")
    assert len(str(raised.value)) < 2 * LONGEST


def test_what_is_no_file_or_too_large_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "pipe", "no JSON text file"),
        (tmp_path, "no JSON text"),
        (tmp_path / "x", "exist"),
    ):
        with pytest.raises(UserError, match=message):
            read_json(path)
    (tmp_path / "large.json").write_text("[]" + " " * 100)
    monkeypatch.setattr("medusa_cli.runs.io.MAX_BYTES", 100)
    with pytest.raises(UserError, match="is larger than"):
        read_json(tmp_path / "large.json")


def record_of(number: int) -> dict[str, Any]:
    """A line of two answers."""
    return {"id": f"c{number}", "messages": [], "tokens": [1, 2, 3, 4, 5, 6], "spans": [[1, 3], [4, 6]]}


CHANGES = [
    *({"id": id} for id in (["x"], {"a": 1}, 1.5)),
    *({"spans": spans} for spans in (["ab"], [None], [[1, None]], [[0, 2.5]])),
    *({"state_rows": rows} for rows in ([-3, 5], [0.5, 1], [0, 10**30], "ab")),
    *({"tokens": tokens} for tokens in ([1, -2], "abc")),
]
LINES = [*(json.dumps(record_of(1) | change) for change in CHANGES), DEEP, LONG, '{"id": "a", "id": "b"}']
LINES += ['{"tokens": ' + LONG + "}", '{"id": "torn", "mess', '{"conversations": []}', "[1]"]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[-30:])
def test_a_bad_line_is_passed_over_in_training_and_named_in_distilling(tmp_path: Path, line: str) -> None:
    run = Run.open(f"{tmp_path}/run", create=True)
    lines = [json.dumps(record_of(0)), line, json.dumps(record_of(2))]
    run.distill_path.write_text("\n".join(lines) + "\n")
    before = run.distill_path.read_bytes()
    records, report = read_conversations(run.distill_path, tiny_backbone())
    assert len(records) == 2 and sum(report.skipped.values()) == 1
    with pytest.raises(UserError, match=r"distill\.jsonl line 2"):
        Records(run, 32, {})
    assert run.distill_path.read_bytes() == before


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("distill.jsonl", "states.bin"):
        run = Run.open(f"{tmp_path}/{name}", create=True)
        os.mkfifo(run.path / name)
        with pytest.raises(UserError, match="is no regular file"):
            Records(run, 32, {})


def test_a_log_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    step = {"event": "validated", **dataclasses.asdict(Validated(1, 1.0, [1.0], [0.5], 3, 9, {}))}
    path = tmp_path / "train.jsonl"
    wrong = ({"step": "2"}, {"head_losses": []}, {"accuracies": [0.5, 0.5]}, {"event": ["saved"]}, {"event": "rested"})
    without = ({key: value for key, value in step.items() if key != missing} for missing in step)
    for bad in ("[1]", DEEP, *map(json.dumps, without), *(json.dumps(step | fields) for fields in wrong)):
        path.write_text(f"{json.dumps(step)}\n{bad}\n{json.dumps(step)}\n")
        assert read_log(path) == [step]
    path.write_bytes(b'{"event": "saved", "step": 1}\n\xff\xfe\n')
    assert read_log(path) == [{"event": "saved", "step": 1}]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return save_run(tmp_path / "run", save_model(tmp_path / "model"), calibrated=True)


FILES = {
    "run.json": ("chat", "--prompt", "w1"),
    "drafter/config.json": ("chat", "--prompt", "w1"),
    "tree.json": ("chat", "--prompt", "w1", "--tree", "static"),
    "calibration.json": ("tree", "--budget", "4"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", [DEEP, LONG, "[3]", "3", '{"backbone": 3, "accuracies": "x", "parents": 1}', "\udcff"])
def test_every_file_of_a_run_is_refused_in_one_line(run: Run, name: str, text: str) -> None:
    (run.path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    done = medusa(*FILES[name], "--run", run.path, exit_code=1)
    assert done.stderr.count("error: ") == 1, done.output
    assert "internal error" not in done.stderr and str(run.path) in done.stderr.replace("\n", "")
