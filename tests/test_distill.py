"""Distillation: seeds of every form, answers equal to decoding alone, and no conversation lost or doubled."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.states import StateStore
from medusa_cli.distill import Answered, Failed, RecordWriter, TooLong, answer_locally, read_seeds
from medusa_cli.distill.distillation import check_settings
from medusa_cli.distill.filters import in_order, unique
from medusa_cli.distill.local import max_batch_size
from medusa_cli.engine.load import choose_kernel
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.model import load as memory
from medusa_cli.model.load import free_memory
from medusa_cli.runs.recipe import DistillRecipe
from medusa_cli.runs.run import Run
from tests.helpers import CHAT_TEMPLATE, forward, medusa, medusa_json, save_model, tiny_backbone, write_lines

seed = Conversation.from_turns
SEEDS = [seed(f"s{i}", [f"w{i} w{j}" for j in range(1 + i % 3)]) for i in range(9)]
CPU = torch.device("cpu")


def settings(**changes) -> DistillRecipe:
    return replace(DistillRecipe(max_new_tokens=12, batch_size=4, context=128, max_turns=3), **changes)


def answers(backbone: Backbone, seeds: Sequence[Conversation], rules: DistillRecipe) -> dict[str, Answered]:
    """Returns the finished conversations by id."""
    outcomes = answer_locally(backbone, seeds, rules)
    return {outcome.conversation.id: outcome for outcome in outcomes if isinstance(outcome, Answered)}


def test_every_answer_equals_decoding_that_conversation_alone() -> None:
    backbone = tiny_backbone("llama")
    answered = answers(backbone, SEEDS, settings())
    assert set(answered) == {seed.id for seed in SEEDS}
    for seed in SEEDS:
        conversation, states = answered[seed.id].conversation, answered[seed.id].states
        assert len(conversation.spans) == len(seed.turns)
        assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * len(seed.turns)
        first = backbone.encode_chat(conversation.messages[:1])
        assert conversation.tokens[: len(first)] == first
        out = forward(backbone, conversation.tokens)
        for start, end in conversation.spans:
            assert out.logits[start - 1 : end - 1].argmax(-1).tolist() == conversation.tokens[start:end]
        assert len(states) == len(conversation.tokens) - 1  # the last token has not been run
        assert torch.allclose(states.float(), out.hidden[:-1], rtol=2**-8, atol=1e-4)  # bf16


def test_sampling_depends_on_the_conversation_and_not_on_its_neighbours() -> None:
    backbone = tiny_backbone("llama")

    def tokens(seeds: Sequence[Conversation], random_seed: int = 0) -> dict[str, list[int]]:
        answered = answers(backbone, seeds, settings(temperature=1.0, random_seed=random_seed))
        return {id: answer.conversation.tokens for id, answer in answered.items()}

    together = tokens(SEEDS)
    assert together == {id: found for seed in SEEDS for id, found in tokens([seed]).items()}
    assert tokens(SEEDS, random_seed=1) != together


def test_a_prompt_too_long_for_a_slot_is_skipped() -> None:
    long = seed("long", ["w1 " * 300])
    outcomes = list(answer_locally(tiny_backbone("llama"), [long, SEEDS[0]], settings()))
    assert [type(outcome) for outcome in outcomes] == [TooLong, Answered] and outcomes[0].id == "long"


def test_a_conversation_that_the_template_refuses_fails_alone() -> None:
    backbone = tiny_backbone("llama")
    refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    backbone.tokenizer.chat_template = refuse + CHAT_TEMPLATE
    seeds = [seed("sys", ["w1"], "w2"), seed("half", ["w1 \ud83d"]), *SEEDS[:2], seed("sys2", ["w3"], "w4")]
    outcomes = list(answer_locally(backbone, seeds, settings(batch_size=1)))
    assert [o.conversation.id for o in outcomes if isinstance(o, Answered)] == ["s0", "s1"]
    assert [o.id for o in outcomes if isinstance(o, Failed)] == ["sys", "half", "sys2"]
    with pytest.raises(UserError, match="no system role"):
        backbone.encode_chat([{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}])


def test_turns_go_on_where_the_template_puts_a_blank_that_decoding_drops() -> None:
    backbone = tiny_backbone("llama")
    backbone.tokenizer.chat_template = (
        "{% for m in messages %}{{ '<start> ' + m['role'] + ': ' + m['content'] + ' <end> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start> assistant:' }}{% endif %}"
    )
    assert len(answers(backbone, [seed("a", ["w1", "w2"])], settings())["a"].conversation.spans) == 2


def test_the_order_is_the_same_every_time_and_takes_max_samples() -> None:
    assert in_order(SEEDS, 0, 4, 5) == in_order(SEEDS, 0, 4, 5)
    assert len(in_order(SEEDS, 0, 4, 5)) == 5 and len(in_order(SEEDS, 0, 4)) == 9


def test_seeds_that_ask_the_same_are_answered_once() -> None:
    seeds = [
        seed("a", ["Hello  there"]),
        seed("b", [" hello\nTHERE ", "more"]),
        seed("c", ["hello there!"]),
        seed("d", ["hello there"], "be brief"),
        seed("e", ["Ｈello there"]),
    ]
    assert [one.id for one in unique(seeds)] == ["a", "c", "d"]
    assert [one.id for one in unique(seeds, {"b"})] == ["b", "c", "d"]


@pytest.mark.parametrize("change", [{"temperature": 1e-300}, {"max_new_tokens": 128}])
def test_impossible_settings_are_named(change: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(change))):
        check_settings(settings(**change))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_seeds_are_read_from_every_form(tmp_path: Path) -> None:
    share = {"id": "a", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]}
    chat = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}
    for text in (
        json.dumps([share, chat]),
        json.dumps([share, chat], indent=2),
        f"{json.dumps(share)}\n\n{json.dumps(chat)}\n",
    ):
        seeds, report = read_seeds(write(tmp_path / "a.json", text))
        assert seeds[0] == seed("a", ["q"]) and seeds[1].system == "s" and seeds[1].turns == ["q"] and report.read == 2


def test_a_large_array_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.runs.io.CHUNK", 7)
    records = [{"id": f"s{i}", "messages": [{"role": "user", "content": f"w{i} " * i}]} for i in range(1, 6)]
    seeds, report = read_seeds(write(tmp_path / "a.json", json.dumps(records)))
    assert [one.id for one in seeds] == [f"s{i}" for i in range(1, 6)] and not report.skipped


def test_half_a_character_spoils_its_record_alone(tmp_path: Path) -> None:
    rows = [{"id": name, "messages": [{"role": "user", "content": text}]} for name, text in
            (("a", "w1"), ("b", "w1 \ud83d"), ("c\udc00", "w1"), ("d", "\U0001f600"))]  # fmt: skip
    rows.append({"id": "e", "messages": [{"role": ["user"], "content": "w1"}]})
    seeds, report = read_seeds(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert [one.id for one in seeds] == ["a", "d"]
    assert sorted(report.skipped.values()) == [1, 2]


def test_cut_off_and_malformed_records_are_counted_and_skipped(tmp_path: Path) -> None:
    good = {"id": "a", "conversations": [{"from": "human", "value": "q"}]}
    odd = {"id": "b", "conversations": [{"from": "martian", "value": "q"}]}
    text = json.dumps([good, odd, {"id": "c"}, {"id": "d", "conversations": [{"from": "gpt", "value": "r"}]}])
    seeds, report = read_seeds(write(tmp_path / "a.json", text[:-1] + ', {"id": "e", "conv'))
    assert [one.id for one in seeds] == ["a"] and report.skipped["cut off"] == 1
    assert sum(report.skipped.values()) == 4 and "unknown role 'martian'" in report.skipped


@pytest.mark.parametrize("text", ["", "{}\n", '[{"id"', "not json\n"])
def test_files_without_a_conversation_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="seed"):
        read_seeds(write(tmp_path / "a.json", text))


def test_a_missing_seed_file_is_named() -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        read_seeds("nowhere.jsonl")


def test_ultrachat_is_a_name_for_its_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rows(name: str):
        asked.append(name)
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x"}]
        yield {"prompt_id": "p1", "messages": messages}

    monkeypatch.setattr("medusa_cli.data.seeds._hub_rows", rows)
    assert read_seeds("ultrachat")[0] == [seed("p1", ["hello"])]
    assert asked == ["HuggingFaceH4/ultrachat_200k"]


def test_a_torn_record_and_orphan_states_are_dropped_on_resume(tmp_path: Path) -> None:
    backbone, run = tiny_backbone("llama"), Run.open(str(tmp_path / "r"), create=True)
    samples = list(answers(backbone, SEEDS[:4], settings()).values())
    writer = RecordWriter(run, backbone.hidden_size, {"seed": "x", "settings": {}})
    for sample in samples[:3]:
        writer.write(sample.conversation, sample.states)
    writer.close()
    whole = run.distill_path.read_bytes()
    run.distill_path.write_bytes(whole[:-20])
    store = StateStore(run.states_path, backbone.hidden_size)
    store.append(torch.zeros(5, backbone.hidden_size))
    store.close()
    again = RecordWriter(run, backbone.hidden_size, {"seed": "x", "settings": {}})
    assert again.done == {sample.conversation.id for sample in samples[:2]}
    again.write(samples[2].conversation, samples[2].states)
    again.close()
    assert run.distill_path.read_bytes() == whole
    record = json.loads(whole.splitlines()[-1])
    first, count = record["state_rows"]
    store = StateStore(run.states_path, backbone.hidden_size)
    assert store.rows == first + count
    assert torch.equal(store.read(first, count), samples[2].states.to(torch.bfloat16))


@pytest.mark.parametrize(
    "middle", [b'{"id": "torn", "mess\n', b'{"id": "\xff\xfe"}\n', b'{"conversations": []}\n', b"[1]\n"]
)
def test_a_damaged_line_within_the_file_is_named_and_nothing_is_cut(tmp_path: Path, middle: bytes) -> None:
    backbone, run = tiny_backbone("llama"), Run.open(str(tmp_path / "r"), create=True)
    writer = RecordWriter(run, backbone.hidden_size, {})
    for sample in answers(backbone, SEEDS[:3], settings()).values():
        writer.write(sample.conversation, sample.states)
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
    writer.write(Conversation("a", [], [1, 2], [(1, 2)]))
    writer.close()
    with pytest.raises(UserError, match="settings"):
        RecordWriter(run, backbone.hidden_size, {"seed": "x", "settings": {"temperature": 1}})


def test_what_was_dropped_is_asked_again_by_other_settings(tmp_path: Path) -> None:
    run, dropped = Run.open(str(tmp_path / "r"), create=True), tmp_path / "r" / "distill-dropped.jsonl"

    def opened(temperature: float) -> RecordWriter:
        return RecordWriter(run, 4, {"seed": "x", "settings": {"temperature": temperature}}, min_answer_tokens=9)

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
    """The command without --json, its six seeds of one turn."""
    seeds = [{"id": f"k{i}", "messages": [{"role": "user", "content": f"w{i}"}]} for i in range(6)]
    file, model = write_lines(tmp_path / "seed.jsonl", seeds), save_model(tmp_path / "model")
    return ["distill", "--seed", str(file), "--model", model, "--dtype", "fp32", "--run", str(tmp_path / "run"),
            "--max-new-tokens", "4"]  # fmt: skip


def test_a_rounded_model_does_not_go_on_for_the_whole_one(words: list[str]) -> None:
    words += ["--dtype", "bf16"]
    medusa(*words, "--max-samples", "2", "--engine", "eager", exit_code=0)
    assert "rounding" in medusa(*words, "--quantize", "int8", exit_code=1).stderr
    assert medusa_json(*words, "--engine", "fast")["conversations"] == 6


def test_resume_goes_on_and_begins_nothing(words: list[str], tmp_path: Path) -> None:
    medusa(*words, "--resume", exit_code=1)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    assert "--resume" in medusa(*words, "--resume", exit_code=1).stderr
    medusa(*words, "--max-samples", "2", exit_code=0)
    assert medusa_json(*words, "--resume")["conversations"] == 6


def test_a_run_goes_on_with_its_own_model(words: list[str]) -> None:
    at = words.index("--model")
    medusa(*words, "--max-samples", "2", exit_code=0)
    assert medusa_json(*words[:at], *words[at + 2 :])["conversations"] == 6


def test_short_answers_are_dropped_and_not_asked_again(words: list[str], tmp_path: Path) -> None:
    seeds = [{"id": f"k{i}", "messages": [{"role": "user", "content": f"w{i % 9}"}]} for i in range(12)]
    words += ["--seed", str(write_lines(tmp_path / "more.jsonl", seeds)), "--max-new-tokens", "40"]
    first = medusa_json(*words, "--min-answer-tokens", "40")
    assert first["duplicates"] == 3 and first["conversations"] + first["dropped"] == 9 and first["dropped"] > 0
    again = medusa_json(*words, "--min-answer-tokens", "40")
    assert again["new_tokens"] == 0 and again["dropped"] == first["dropped"]
    rest = medusa_json(*words)
    assert rest["conversations"] == 9 and rest["dropped"] == 0


def test_a_context_too_short_for_every_prompt_is_named(words: list[str], tmp_path: Path) -> None:
    model = save_model(tmp_path / "short", positions=12)
    run = ["--run", tmp_path / "other", "--model", model, "--max-new-tokens", "11"]
    result = medusa(*words, *run, exit_code=1)
    assert "distill.jsonl" in result.stderr and "--context" in result.stderr and not result.stdout


def test_the_kernel_is_chosen_for_so_many_rows(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is fast over a tree's few rows is not the one for a whole batch of conversations."""
    asked = []

    def choose(*given):
        asked.append(given[-1])
        return choose_kernel(*given)

    monkeypatch.setattr("medusa_cli.engine.load.choose_kernel", choose)
    medusa(*words, exit_code=0)
    medusa(*words, "--run", words[-3] + "2", "--batch-size", "3", exit_code=0)
    assert asked == [64, 3]


def test_a_batch_of_the_papers_recipe_fits_the_memory() -> None:
    vicuna = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32)
    slot = 2 * 32 * 4096 * 4096 * 2  # keys and values of 4,096 positions in bf16: 2.1 GB, 137 GB for 64
    size = max_batch_size(vicuna, torch.bfloat16, 4096, 64 * 10**9, states=0)
    assert 16 <= size < 64 and size * slot < 64 * 10**9
    assert max_batch_size(vicuna, torch.bfloat16, 4096, 10**9, states=0) == 1
    assert max_batch_size(vicuna, torch.bfloat16, 512, 64 * 10**9, states=0) == 64
    grouped = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    sizes = [max_batch_size(grouped, torch.bfloat16, 4096, 30 * 10**9, states=states) for states in (0, 1, 4)]
    assert sizes[0] > 30 and sizes[0] > sizes[1] > sizes[2]


def test_free_memory_is_the_systems_or_what_the_container_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2**20 < free_memory(CPU) < 2**50
    system = tmp_path / "meminfo"
    system.write_text("MemTotal:       4000 kB\nMemAvailable:   3000 kB\nHugePages_Total:    0\n")
    monkeypatch.setattr(memory, "_SYSTEM", system)
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    assert free_memory(CPU) == 3000 * 1024
    (tmp_path / "memory.current").write_text("1500000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 250000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(CPU) == 3000 * 1024
    (tmp_path / "memory.max").write_text("2000000\n")
    assert free_memory(CPU) == 750000


def test_a_flag_goes_before_the_recipe_and_that_before_the_memory(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int | None] = []

    def answer(backbone: Any, seeds: Any, rules: DistillRecipe) -> Any:
        sizes.append(rules.batch_size)
        return iter([Answered(Conversation("a", [], [1, 2], [(1, 2)]))])

    slot = (2 * 2 * 2 * 8 + 32) * 4 * 64  # of the tiny model in fp32, its states included
    monkeypatch.setattr("medusa_cli.distill.distillation.answer_locally", answer)
    monkeypatch.setattr("medusa_cli.distill.local.free_memory", lambda device: int(5.5 * slot / 0.7))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("distill: {batch_size: 7}\n")
    words += ["--context", "64"]
    assert "--batch-size" in medusa(*words, exit_code=0).stderr
    assert "--batch-size" not in medusa(*words, "--recipe", recipe, exit_code=0).stderr
    medusa(*words, "--recipe", recipe, "--batch-size", "3", exit_code=0)
    assert sizes == [5, 7, 3]
