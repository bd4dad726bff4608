"""Distillation by two processes: the same conversations as one makes, whole again after kill -9 of a process."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.states import read_rows
from medusa_cli.distill import Records, answer_locally
from medusa_cli.distill.distillation import merge_parts, part_of
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.runs.recipe import DistillRecipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run
from tests import forked, helpers
from tests.helpers import medusa, tiny_backbone, write_lines
from tests.test_distributed import TWO

COUNT = 40


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [{"id": f"k{i}", "messages": [{"role": "user", "content": f"w{i} w1"}]} for i in range(COUNT)]
    return str(write_lines(tmp_path_factory.mktemp("sharding") / "seed.jsonl", rows))


def distill(model: str, seed: str, run: Path) -> list[str]:
    words = ["distill", "--seed", seed, "--model", model, "--dtype", "fp32", "--json", "--device", "cpu"]
    return [*words, "--max-new-tokens", "200", "--batch-size", "2", "--run-dir", str(run)]


def finish(size: int, words: list[str], place: Path) -> dict:
    """Runs the command to its end by so many processes; returns its document."""
    done = forked.run(words, place, size)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def answers(run: Path) -> dict[str, list[int]]:
    """Tokens by id, after checking that none is doubled and every state is where its line says."""
    records = [json.loads(line) for line in (run / "distill.jsonl").read_text().splitlines()]
    assert len({item["id"] for item in records}) == len(records) == COUNT
    rows = sorted(tuple(item["state_rows"]) for item in records)
    assert [first for first, _ in rows] == [sum(count for _, count in rows[:i]) for i in range(len(rows))]
    assert not list((run / "parts").glob("*"))
    return {item["id"]: item["tokens"] for item in records}


def check_states(run: Path, model: str) -> None:
    backbone = load_backbone(model, LoadOptions(dtype="fp32"))
    for line in (run / "distill.jsonl").read_text().splitlines()[:: COUNT // 4]:
        item = json.loads(line)
        rows = read_rows(run / "states.bin", backbone.hidden_size, *item["state_rows"]).float()
        assert torch.allclose(rows, helpers.forward(backbone, item["tokens"]).hidden[:-1], atol=0.02, rtol=0.02)


def test_two_processes_answer_what_one_does_and_a_killed_one_costs_nothing(
    model: str, seed: str, tmp_path: Path
) -> None:
    single = finish(1, distill(model, seed, tmp_path / "one"), tmp_path / "output")
    words = distill(model, seed, tmp_path / "two")
    child = subprocess.Popen([*TWO, "-m", "medusa_cli", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parts = [tmp_path / "two" / "parts" / f"00{rank}" / "distill.jsonl" for rank in (0, 1)]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        if all(part.is_file() and part.read_bytes().count(b"\n") >= 2 for part in parts):
            break
        time.sleep(0.02)
    victim = [pid for pid in _children(child.pid) if _environment(pid).get("RANK") == "1"]
    os.kill(victim[0], signal.SIGKILL)
    assert child.wait(timeout=60) != 0  # torchrun ends the others
    kept = sum(part.read_bytes().count(b"\n") for part in parts)
    assert 4 <= kept < COUNT
    two = finish(2, words, tmp_path / "output")
    assert two["conversations"] == single["conversations"] == COUNT
    assert two["answer_tokens"] == single["answer_tokens"] and two["new_tokens"] < single["new_tokens"]
    assert answers(tmp_path / "two") == answers(tmp_path / "one")
    check_states(tmp_path / "two", model)


def _children(pid: int) -> list[int]:
    return [int(item) for item in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _environment(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_endpoint_needs_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--endpoint" in medusa("distill", "--endpoint", "http://127.0.0.1:9", exit_code=2).stderr


def test_a_merge_that_was_killed_is_ended_by_the_next(tmp_path: Path) -> None:
    backbone, run = tiny_backbone("llama"), Run.open(str(tmp_path / "r"), create=True)
    seeds = [Conversation.from_turns(f"s{i}", [f"w{i}"]) for i in range(5)]
    samples = list(answer_locally(backbone, seeds, DistillRecipe(max_new_tokens=8, batch_size=2, context=64)))
    header = {"seed": "x", "settings": {}}
    for rank in (0, 1):
        part = Records(part_of(run, rank), backbone.hidden_size, header)
        for sample in samples[rank::2]:
            part.write(sample.conversation, sample.states)
        part.close()
    whole = Records(run, backbone.hidden_size, header)
    whole.write(samples[0].conversation, samples[0].states)  # as far as an earlier merge had come
    whole.close()
    whole = Records(run, backbone.hidden_size, header)
    merge_parts(run, whole)
    assert whole.done == {seed.id for seed in seeds}
    whole.close()
    by_id = {sample.conversation.id: sample for sample in samples}
    for line in run.distill_path.read_text().splitlines():
        item = json.loads(line)
        assert item["tokens"] == by_id[item["id"]].conversation.tokens
        rows = read_rows(run.states_path, backbone.hidden_size, *item["state_rows"])
        assert torch.equal(rows, by_id[item["id"]].states.to(torch.bfloat16))
    other = Records(part_of(run, 0), backbone.hidden_size, {"seed": "y", "settings": {}})
    other.write(samples[0].conversation, samples[0].states)
    other.close()
    with pytest.raises(UserError, match="distilled with seed"):
        merge_parts(run, Records(run, backbone.hidden_size, header))
