"""Two processes under torchrun train what one process trains, and one of them writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import save_model
from tests.test_joint import records

COMMON = ["--dtype", "fp32", "--json", "drafter.num_heads=2", "drafter.vocabulary=own", "train.epochs=1"]
SMALL = ["train.batch_tokens=64", "train.accumulation=2", "train.validation_every=2", "train.lora_rank=4"]


def prepared(folder: Path) -> Path:
    folder.mkdir()
    lines = [json.dumps({"id": r.id, "tokens": r.tokens, "spans": [list(s) for s in r.spans]}) for r in records(30)]
    (folder / "distill.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def train(launcher: list[str], model: str, run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*launcher, "-m", "medusa_cli", "train", "--run-dir", str(run), "--model", model, *COMMON, *SMALL, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)


TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize("words", [[], ["--stage", "2", "--schedule", "sine", "train.lora_dropout=0"]])
def test_two_processes_equal_one(tmp_path: Path, words: list[str]) -> None:
    model = save_model(tmp_path / "model")
    logs = []
    for name, launcher in (("one", [sys.executable]), ("two", TWO)):
        run = prepared(tmp_path / name)
        done = train(launcher, model, run, *words)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["steps"] > 2  # one document: the second process is silent
        assert (run / "drafter" / "config.json").is_file()
        logs.append([json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()])
    one, two = ([line for line in log if "loss" in line] for log in logs)
    assert len(one) == len(two)
    for ours, theirs in zip(one, two, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["positions"] == theirs["positions"] and ours["accuracies"] == pytest.approx(theirs["accuracies"])


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    done = train(TWO, model, prepared(tmp_path / "run"), "train.accumulation=3")
    assert done.returncode != 0
    assert "train.accumulation=3 cannot be shared by 2 processes" in done.stderr
