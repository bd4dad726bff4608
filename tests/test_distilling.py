"""Distillation: seeds of every form, greedy answers equal to decoding alone, and no sample lost or doubled."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from medusa_cli.cli import app
from medusa_cli.distilling import RecordWriter, Seed, Settings, distill, read_seeds
from medusa_cli.distilling.distilled import order
from medusa_cli.engines.load import choose_kernel
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.run import Run
from medusa_cli.states import StateStore
from tests import passes
from tests.runs import save_model
from tests.tiny import CHAT_TEMPLATE, tiny_backbone

SEEDS = [Seed(f"s{i}", tuple(f"w{i} w{j}" for j in range(1 + i % 3))) for i in range(9)]


def settings(**changes) -> Settings:
    return Settings(**{"max_new_tokens": 12, "batch_size": 4, "capacity": 128, "max_turns": 3, **changes})


def test_every_answer_equals_decoding_that_conversation_alone() -> None:
    backbone = tiny_backbone("llama")
    samples = {sample.id: sample for sample in distill(backbone, SEEDS, settings())}
    assert set(samples) == {seed.id for seed in SEEDS}
    for seed in SEEDS:
        sample = samples[seed.id]
        assert len(sample.spans) == len(seed.turns)
        out = passes.run(backbone, sample.tokens)
        for start, end in sample.spans:
            assert out.logits[start - 1 : end - 1].argmax(-1).tolist() == sample.tokens[start:end]
        assert len(sample.states) == len(sample.tokens) - 1  # the last token has not been run
        assert torch.allclose(sample.states.float(), out.hidden[:-1], rtol=2**-8, atol=1e-4)  # bf16


def test_answer_tokens_are_counted_from_the_first_on() -> None:
    told: list[int] = []
    samples = list(distill(tiny_backbone("llama"), SEEDS, settings(), on_tokens=told.append))
    assert sum(told) == sum(end - start for sample in samples for start, end in sample.spans)


def test_the_tokens_are_the_chat_template_of_the_messages() -> None:
    backbone = tiny_backbone("llama")
    for sample in distill(backbone, SEEDS[:3], settings()):
        first = backbone.encode_chat(sample.messages[:1])
        assert sample.tokens[: len(first)] == first
        assert [m["role"] for m in sample.messages] == ["user", "assistant"] * len(sample.spans)


def test_sampling_depends_on_the_conversation_alone_not_on_its_neighbours() -> None:
    backbone = tiny_backbone("llama")
    hot = settings(temperature=1.0)
    together = {s.id: s.tokens for s in distill(backbone, SEEDS, hot)}
    alone = {s.id: s.tokens for seed in SEEDS for s in distill(backbone, [seed], hot)}
    assert together == alone
    other = {s.id: s.tokens for s in distill(backbone, SEEDS, settings(temperature=1.0, random_seed=1))}
    assert other != together


def test_a_prompt_too_long_for_a_slot_is_skipped_and_told() -> None:
    skipped = []
    long = Seed("long", ("w1 " * 300,))
    done = list(distill(tiny_backbone("llama"), [long, SEEDS[0]], settings(), on_skip=skipped.append))
    assert [s.id for s in skipped] == ["long"] and [s.id for s in done] == ["s0"]


def test_a_conversation_that_the_template_refuses_is_told_and_costs_no_other() -> None:
    backbone, refused = tiny_backbone("llama"), []
    refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    backbone.tokenizer.chat_template = refuse + CHAT_TEMPLATE
    seeds = [Seed("sys", ("w1",), system="w2"), Seed("half", ("w1 \ud83d",)), *SEEDS[:2], Seed("sys2", ("w3",), "w4")]
    done = distill(backbone, seeds, settings(batch_size=1), on_refusal=lambda seed, why: refused.append((seed.id, why)))
    assert [one.id for one in done] == ["s0", "s1"]
    why = "the chat template refuses it (no system role)"
    assert refused == [("sys", why), ("half", "half a character"), ("sys2", why)]
    with pytest.raises(
        UserError, match="cannot be told this conversation: .*no system role.*; leave the system prompt"
    ):
        backbone.encode_chat([{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}])


def test_turns_go_on_where_the_template_puts_a_blank_that_decoding_drops() -> None:
    backbone = tiny_backbone("llama")
    backbone.tokenizer.chat_template = (
        "{% for m in messages %}{{ '<start> ' + m['role'] + ': ' + m['content'] + ' <end> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start> assistant:' }}{% endif %}"
    )
    (made,) = distill(backbone, [Seed("a", ("w1", "w2"))], settings())
    assert len(made.spans) == 2


def test_the_order_is_the_same_every_time_and_takes_max_samples() -> None:
    assert order(SEEDS, settings(), 5) == order(SEEDS, settings(), 5)
    assert len(order(SEEDS, settings(), 5)) == 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_new_tokens": 128}, "max_new_tokens 128 leaves no room for a prompt in context 128"),
    ],
)
def test_impossible_settings_are_named(change: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings(**change)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_seeds_are_read_from_every_form(tmp_path: Path) -> None:
    share = {"id": "a", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]}
    chat = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}
    seeds, report = read_seeds(write(tmp_path / "a.json", json.dumps([share, chat])))
    assert seeds[0] == Seed("a", ("q",)) and seeds[1].system == "s" and report.read == 2
    lines, _ = read_seeds(write(tmp_path / "a.jsonl", json.dumps(share) + "\n" + json.dumps(chat) + "\n"))
    assert [s.turns for s in lines] == [("q",), ("q",)]


def test_half_a_character_spoils_its_record_alone(tmp_path: Path) -> None:
    rows = [{"id": name, "messages": [{"role": "user", "content": text}]} for name, text in
            (("a", "w1"), ("b", "w1 \ud83d"), ("c\udc00", "w1"), ("d", "\U0001f600"))]  # fmt: skip
    rows.append({"id": "e", "messages": [{"role": ["user"], "content": "w1"}]})
    seeds, report = read_seeds(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert [seed.id for seed in seeds] == ["a", "d"]
    assert report.skipped == {"half a character": 2, "a message without role": 1}


def test_cut_off_and_malformed_records_are_counted_and_skipped(tmp_path: Path) -> None:
    good = {"id": "a", "conversations": [{"from": "human", "value": "q"}]}
    odd = {"id": "b", "conversations": [{"from": "martian", "value": "q"}]}
    text = json.dumps([good, odd, {"id": "c"}, {"id": "d", "conversations": [{"from": "gpt", "value": "r"}]}])
    seeds, report = read_seeds(write(tmp_path / "a.json", text[:-1] + ', {"id": "e", "conv'))
    assert [s.id for s in seeds] == ["a"]
    assert report.skipped == {
        "cut off": 1,
        "unknown role 'martian'": 1,
        "no conversations or messages": 1,
        "no user turn": 1,
    }
    assert "cut off" in str(report)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("{}\n", "no usable"), ('[{"id"', "no usable"), ("not json\n", "no usable")],
)
def test_files_without_a_conversation_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_seeds(write(tmp_path / "a.json", text))


def test_a_missing_seed_file_is_named() -> None:
    with pytest.raises(UserError, match="seed 'nowhere.jsonl' does not exist"):
        read_seeds("nowhere.jsonl")


def test_a_torn_record_and_orphan_states_are_dropped_on_resume(tmp_path: Path) -> None:
    backbone, run = tiny_backbone("llama"), Run.open(str(tmp_path / "r"), create=True)
    samples = list(distill(backbone, SEEDS[:4], settings()))
    writer = RecordWriter(run, backbone.hidden_size, {"seed": "x", "settings": {}})
    for sample in samples[:3]:
        writer.write(sample)
    writer.close()
    whole = run.distill_path.read_bytes()
    run.distill_path.write_bytes(whole[:-20])
    store = StateStore(run.states_path, backbone.hidden_size)
    store.append(torch.zeros(5, backbone.hidden_size))
    store.close()
    again = RecordWriter(run, backbone.hidden_size, {"seed": "x", "settings": {}})
    assert again.done == {s.id for s in samples[:2]}
    again.write(samples[2])
    again.close()
    assert run.distill_path.read_bytes() == whole
    record = json.loads(whole.splitlines()[-1])
    first, count = record["state_rows"]
    store = StateStore(run.states_path, backbone.hidden_size)
    assert store.rows == first + count
    assert torch.equal(store.read(first, count), samples[2].states.to(torch.bfloat16))


@pytest.mark.parametrize(
    "middle", [b'{"id": "torn", "mess\n', b"\n", b'{"id": "\xff\xfe"}\n', b'{"conversations": []}\n', b"[1]\n"]
)
def test_a_damaged_line_within_the_file_is_named_and_nothing_is_cut(tmp_path: Path, middle: bytes) -> None:
    backbone, run = tiny_backbone("llama"), Run.open(str(tmp_path / "r"), create=True)
    writer = RecordWriter(run, backbone.hidden_size, {})
    for sample in distill(backbone, SEEDS[:3], settings()):
        writer.write(sample)
    writer.close()
    lines = run.distill_path.read_bytes().splitlines(keepends=True)
    run.distill_path.write_bytes(b"".join([lines[0], middle, *lines[1:]]))
    before = run.distill_path.read_bytes(), run.states_path.read_bytes()
    with pytest.raises(UserError, match=r"distill\.jsonl line 2 is no conversation"):
        RecordWriter(run, backbone.hidden_size, {})
    assert (run.distill_path.read_bytes(), run.states_path.read_bytes()) == before


def test_a_last_line_that_lacks_its_line_break_alone_is_kept(tmp_path: Path) -> None:
    run = Run.open(str(tmp_path / "r"), create=True)
    lines = [f'{{"id": "{name}", "messages": [], "tokens": [1, 2], "spans": [[1, 2]]}}\n' for name in "ab"]
    run.distill_path.write_text("".join(lines).rstrip())
    writer = RecordWriter(run, 4, {})
    writer.close()
    assert writer.done == {"a", "b"} and run.distill_path.read_text() == "".join(lines)


def test_other_settings_do_not_mix_into_a_file(tmp_path: Path) -> None:
    backbone, run = tiny_backbone("llama"), Run.open(str(tmp_path / "r"), create=True)
    writer = RecordWriter(run, backbone.hidden_size, {"seed": "x", "settings": {"temperature": 0}})
    writer.write(next(distill(backbone, SEEDS[:1], settings())))
    writer.close()
    with pytest.raises(UserError, match="distilled with settings"):
        RecordWriter(run, backbone.hidden_size, {"seed": "x", "settings": {"temperature": 1}})


def test_what_was_dropped_is_asked_again_by_other_settings(tmp_path: Path) -> None:
    run, dropped = Run.open(str(tmp_path / "r"), create=True), tmp_path / "r" / "distill-dropped.jsonl"

    def opened(temperature: float) -> RecordWriter:
        return RecordWriter(run, 4, {"seed": "x", "settings": {"temperature": temperature}}, least=9)

    first = opened(0.0)
    first.drop("a", 3)
    first.close()
    dropped.write_bytes(dropped.read_bytes() + b'{"id": "torn')
    again = opened(0.0)
    for name in ("b", "c"):
        again.drop(name, 4)
    again.close()
    same = opened(0.0)
    assert same.answered == {"a", "b", "c"}
    same.close()
    other = opened(0.7)
    assert other.answered == set() and not dropped.exists()
    other.close()


def test_kill_minus_nine_loses_and_doubles_nothing(tmp_path: Path) -> None:
    backbone = tiny_backbone("llama")
    model = tmp_path / "model"
    backbone.model.save_pretrained(model)
    backbone.tokenizer.save_pretrained(model)
    rows = [{"id": f"k{i}", "messages": [{"role": "user", "content": f"w{i % 40}"}]} for i in range(60)]
    seed = write(tmp_path / "seed.jsonl", "\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "medusa_cli", "distill", "--seed", seed, "--model", str(model), "--dtype", "fp32"]
    command += ["--max-new-tokens", "200", "--no-dedup", "--batch-size", "2", "--quiet", "--run"]
    path = tmp_path / "killed" / "distill.jsonl"
    child = subprocess.Popen([*command, str(path.parent)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    kept = path.read_bytes().count(b"\n")
    assert 4 <= kept < 60
    subprocess.run([*command, str(path.parent)], check=True)
    subprocess.run([*command, str(tmp_path / "whole")], check=True)

    def by_id(file: Path) -> dict:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert len({r["id"] for r in records}) == len(records) == 60
        return {r["id"]: r["tokens"] for r in records}

    assert by_id(path) == by_id(tmp_path / "whole" / "distill.jsonl")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    rows = [{"id": f"k{i}", "messages": [{"role": "user", "content": f"w{i}"}]} for i in range(6)]
    seed = write(tmp_path / "seed.jsonl", "\n".join(map(json.dumps, rows)))
    return ["distill", "--seed", seed, "--model", save_model(tmp_path / "model"), "--dtype", "fp32", "--run",
            str(tmp_path / "run"), "--max-new-tokens", "4", "--json"]  # fmt: skip


def test_a_rounded_model_does_not_go_on_for_the_whole_one(words: list[str]) -> None:
    runner = CliRunner()
    words += ["--dtype", "bf16"]
    assert runner.invoke(app, [*words, "--max-samples", "2", "--engine", "eager"]).exit_code == 0
    mixed = runner.invoke(app, [*words, "--engine", "int8"])
    assert mixed.exit_code == 1 and '"rounding": "int8"' in " ".join(mixed.stderr.split())
    assert json.loads(runner.invoke(app, [*words, "--engine", "fast"]).stdout)["conversations"] == 6


def test_resume_goes_on_and_begins_nothing(words: list[str], tmp_path: Path) -> None:
    runner = CliRunner()
    refused = runner.invoke(app, [*words, "--resume"])
    assert refused.exit_code == 1 and "does not exist" in refused.stderr and not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    refused = runner.invoke(app, [*words, "--resume"])
    assert refused.exit_code == 1 and "holds no distillation" in " ".join(refused.stderr.split())
    assert runner.invoke(app, [*words, "--max-samples", "2"]).exit_code == 0
    assert json.loads(runner.invoke(app, [*words, "--resume"]).stdout)["conversations"] == 6


def test_a_run_goes_on_with_its_own_model(words: list[str]) -> None:
    runner, at = CliRunner(), words.index("--model")
    assert runner.invoke(app, [*words, "--max-samples", "2"]).exit_code == 0
    again = runner.invoke(app, [*words[:at], *words[at + 2 :]])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["conversations"] == 6 and f"{words[at + 1]} answers" in again.stderr


def test_ultrachat_is_a_name_for_its_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rows(name: str):
        asked.append(name)
        yield {
            "prompt_id": "p1",
            "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x"}],
        }

    monkeypatch.setattr("medusa_cli.distilling.seeds._hub_rows", rows)
    found, _ = read_seeds("ultrachat")
    assert asked == ["HuggingFaceH4/ultrachat_200k"] and found[0].turns == ("hello",)


def test_a_model_that_has_no_room_for_any_prompt_is_named(words: list[str], tmp_path: Path) -> None:
    model = save_model(tmp_path / "short", positions=12)
    run = ["--run", str(tmp_path / "other"), "--model", model, "--max-new-tokens", "11"]
    done = CliRunner().invoke(app, [one for one in words if one != "--json"] + run)
    said = " ".join(done.stderr.split())
    assert done.exit_code == 1 and "6 prompts were skipped: longer than the model's 12 positions leave room for" in said
    assert "distill.jsonl holds no conversation" in said and "medusa train" not in done.stdout


def test_the_kernel_is_chosen_for_so_many_rows(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is fast over a tree's few rows is not the one for a whole batch of conversations."""
    asked = []

    def choose(*given):
        asked.append(given[-1])
        return choose_kernel(*given)

    monkeypatch.setattr("medusa_cli.engines.load.choose_kernel", choose)
    assert CliRunner().invoke(app, [*words, "--max-samples", "2"]).exit_code == 0
    assert CliRunner().invoke(app, [*words, "--batch-size", "3"]).exit_code == 0
    assert asked == [64, 3]
