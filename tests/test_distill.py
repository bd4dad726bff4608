"""Distillation: seeds of every form, answers equal to decoding alone, and no conversation lost or doubled."""

import itertools
import json
import re
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from medusa_cli import device as memory
from medusa_cli.data.code_seeds import FIM, KINDS, code_seeds, fim_tokens, is_code, with_fim_tokens
from medusa_cli.data.conversation import Conversation, read_conversations, unread_keys
from medusa_cli.data.packing import held_out_ids
from medusa_cli.data.seeds import distinct, in_order, read_seeds, seed_of
from medusa_cli.data.states import StateStore, read_rows
from medusa_cli.device import free_memory
from medusa_cli.distill import Outcome, Records, answer_locally
from medusa_cli.distill.distillation import HEADER, Progress, merge_parts, part_of
from medusa_cli.distill.filters import is_refusal
from medusa_cli.distill.local import choose_batch_size
from medusa_cli.engine import load_backbone
from medusa_cli.engine.cache import Cache
from medusa_cli.errors import UserError
from medusa_cli.files import cpus
from medusa_cli.files.io import Malformed, ReadReport, read_object
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import render, token_ids
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.recipe import DistillRecipe
from medusa_cli.runs.run import Run
from tests.helpers import (
    CHAT_TEMPLATE,
    forward,
    load_dataset,
    medusa,
    medusa_json,
    save_model,
    tiny_backbone,
    write_lines,
)

seed = Conversation.from_turns
SEEDS = [seed(f"s{i}", [f"w{i} w{j}" for j in range(1 + i % 3)]) for i in range(9)]
CPU = torch.device("cpu")


def settings(**changes) -> DistillRecipe:
    return replace(
        DistillRecipe(max_new_tokens=12, batch_size=4, context=128, max_turns=3), **changes
    )


def answers(
    backbone: Backbone, seeds: Sequence[Conversation], rules: DistillRecipe
) -> dict[str, Outcome]:
    """Returns the outcomes that have a conversation, by id."""
    return {
        outcome.id: outcome
        for outcome in answer_locally(backbone, seeds, rules)
        if outcome.conversation
    }


# Answers.


@pytest.mark.slow
def test_every_answer_equals_decoding_that_conversation_alone() -> None:
    backbone = tiny_backbone()
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
            assert (
                out.logits[start - 1 : end - 1].argmax(-1).tolist()
                == conversation.tokens[start:end]
            )
        assert len(states) == len(conversation.tokens) - 1  # the last token has not been run
        assert torch.allclose(states.float(), out.hidden[:-1], rtol=2**-8, atol=1e-4)  # bf16


def test_a_stop_completes_the_open_answers_and_asks_nothing_more() -> None:
    backbone = tiny_backbone()
    tokens = 0

    def count(more: int) -> None:
        nonlocal tokens
        tokens += more

    outcomes = list(
        answer_locally(backbone, SEEDS, settings(), count, should_stop=lambda: tokens >= 2)
    )
    assert [outcome.id for outcome in outcomes] == [seed.id for seed in SEEDS[:2]]
    whole = answers(backbone, SEEDS, settings())
    for outcome in outcomes:
        assert outcome.conversation is not None
        [span] = outcome.conversation.spans
        assert span == whole[outcome.id].conversation.spans[0]


def test_samples_depend_on_the_conversation_and_the_seed_alone() -> None:
    backbone = tiny_backbone()

    def tokens(seeds: Sequence[Conversation], random_seed: int = 0) -> dict[str, list[int]]:
        answered = answers(backbone, seeds, settings(temperature=1.0, random_seed=random_seed))
        return {id: answer.conversation.tokens for id, answer in answered.items()}

    together = tokens(SEEDS)
    assert together == {id: alone for seed in SEEDS for id, alone in tokens([seed]).items()}
    assert tokens(SEEDS, random_seed=1) != together


@pytest.mark.slow
def test_too_long_and_refused_prompts_cost_nothing_else() -> None:
    backbone = tiny_backbone()
    refuse = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    backbone.tokenizer.chat_template = refuse + CHAT_TEMPLATE
    seeds = [
        seed("system", ["w1"], "w2"),
        seed("half", ["w1 \ud83d"]),
        seed("long", ["w1 " * 300]),
        *SEEDS[:2],
    ]
    outcomes = {
        outcome.id: outcome for outcome in answer_locally(backbone, seeds, settings(batch_size=1))
    }
    assert [id for id, outcome in outcomes.items() if outcome.conversation] == ["s0", "s1"]
    assert [id for id, outcome in outcomes.items() if outcome.failure] == ["system", "half"]
    assert outcomes["long"] == Outcome("long")
    assert "no system role" in outcomes["system"].failure


def test_turns_follow_where_the_template_adds_a_blank_that_decoding_drops() -> None:
    backbone = tiny_backbone()
    backbone.tokenizer.chat_template = (
        "{% for m in messages %}{{ '<start> ' + m['role'] + ': ' + m['content'] + ' <end> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start> assistant:' }}{% endif %}"
    )
    assert (
        len(answers(backbone, [seed("a", ["w1", "w2"])], settings())["a"].conversation.spans) == 2
    )


def test_batch_of_the_papers_recipe_fits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def size(
        gigabytes: int, context: int, taps: int = 0, device: str = "cuda", **config: int
    ) -> int:
        monkeypatch.setattr(
            "medusa_cli.distill.local.free_memory", lambda device: gigabytes * 10**9
        )
        vicuna = LlamaConfig(
            hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, **config
        )
        heads = vicuna.num_key_value_heads
        engine = SimpleNamespace(row_bytes=2 * 32 * heads * 128 * 2, slot_bytes=lambda rows: 0)
        backbone: Any = SimpleNamespace(
            config=vicuna,
            dtype=torch.bfloat16,
            device=torch.device(device),
            max_positions=4096,
            engine=engine,
        )
        return choose_batch_size(backbone, settings(context=context, taps=(1,) * taps), 1)

    # Keys and values of 4,096 positions in bf16: 2.1 GB, 137 GB for 64.
    slot = 2 * 32 * 4096 * 4096 * 2
    assert 16 <= size(64, 4096) < 64
    assert size(64, 4096) * slot < 64 * 10**9
    assert (size(1, 4096), size(64, 128), size(64, 128, device="cpu")) == (1, 256, 64)
    for device in ("cuda", "cpu"):
        few, many = (size(30, 4096, taps, device, num_key_value_heads=8) for taps in (0, 3))
        assert few > 30
        assert few > many


@pytest.mark.slow
def test_the_cache_of_a_distillation_has_the_size_of_its_context_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone = tiny_backbone(positions=1024)
    sizes: list[int] = []
    resize = Cache.resize
    monkeypatch.setattr(
        Cache, "resize", lambda cache, rows: (sizes.append(rows), resize(cache, rows))[1]
    )
    assert len(answers(backbone, SEEDS, settings(context=600))) == len(SEEDS)
    assert sizes == [600]


def test_free_memory_is_the_systems_or_what_the_container_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2**20 < free_memory(CPU) < 2**50
    system = tmp_path / "meminfo"
    system.write_text("MemTotal:       4000 kB\nMemAvailable:   3000 kB\nHugePages_Total:    0\n")
    monkeypatch.setattr(memory, "_SYSTEM", system)
    monkeypatch.setattr(cpus, "CGROUPS", tmp_path)
    monkeypatch.setattr(cpus, "MEMBERSHIP", tmp_path / "cgroup")
    assert free_memory(CPU) == 3000 * 1024
    (tmp_path / "cgroup").write_text("0::/jobs/mine\n")
    parent = tmp_path / "jobs"
    child = parent / "mine"
    child.mkdir(parents=True)
    for folder, limit, free in (
        (child, "max", 3000 * 1024),
        (parent, "2000000", 750000),
        (child, "1900000", 650000),
    ):
        (folder / "memory.current").write_text("1500000\n")
        (folder / "memory.stat").write_text("anon 100\ninactive_file 250000\n")
        (folder / "memory.max").write_text(f"{limit}\n")
        assert free_memory(CPU) == free
    (tmp_path / "cgroup").write_text("5:memory:/job\n")
    job = tmp_path / "memory" / "job"
    job.mkdir(parents=True)
    (job / "memory.usage_in_bytes").write_text("1500000\n")
    (job / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100000\n")
    (job / "memory.limit_in_bytes").write_text("2000000\n")
    assert free_memory(CPU) == 600000


# Seeds.


def test_more_samples_contain_the_fewer_ones() -> None:
    few, more, other = (
        {item.id for item in in_order(SEEDS, number, size, 5 + size % 2)}
        for number, size in ((0, 4), (0, 1), (1, 4))
    )
    assert few < more
    assert len(few) == 5
    assert len(more) == 6
    assert few != other
    assert {item.id for item in in_order(SEEDS, 0, 4)} == {item.id for item in SEEDS}


def test_seeds_with_the_same_prompt_are_answered_once() -> None:
    seeds = [
        seed("a", ["Hello  there"]),
        seed("b", [" hello\nTHERE ", "more"]),
        seed("c", ["hello there!"]),
        seed("d", ["hello there"], "be brief"),
        seed("e", ["Ｈello there"]),
    ]
    assert [kept.id for kept in distinct(seeds)] == ["a", "c", "d"]
    assert [kept.id for kept in distinct(seeds, {"b"})] == ["b", "c", "d"]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_seeds_are_read_from_every_form(tmp_path: Path) -> None:
    share = {
        "id": "a",
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}],
    }
    chat = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}
    for text in (
        json.dumps([share, chat]),
        json.dumps([share, chat], indent=2),
        f"{json.dumps(share)}\n\n{json.dumps(chat)}\n",
    ):
        seeds, report = read_seeds(write(tmp_path / "a.json", text))
        assert seeds[0] == seed("a", ["q"])
        assert seeds[1].system == "s"
        assert seeds[1].turns == ["q"]
        assert report.read == 2


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [message("user", "w1"), message("assistant", "w2")]


@pytest.mark.quick("w40 w41-system_prompt")
@pytest.mark.parametrize(
    "key", ["system", "system_prompt", "system_message", "systemPrompt", "system_instruction"]
)
@pytest.mark.parametrize("value", ["w40 w41", [{"type": "text", "text": "w40 w41"}]])
def test_a_system_prompt_beside_the_messages_comes_first(
    tmp_path: Path, key: str, value: Any
) -> None:
    record = {"id": "a", "messages": TALK, key: value}
    path = Path(write(tmp_path / "a.jsonl", json.dumps(record)))
    opening = message("system", "w40 w41")
    (seed,), report = read_seeds(str(path))
    assert seed.messages == [opening, TALK[0]]
    assert not report.unread
    backbone = tiny_backbone()
    (trained,), report = read_conversations(path, backbone)
    assert trained.messages == [opening, *TALK]
    assert not report.unread
    asked = answers(backbone, [seed], settings())["a"].conversation
    assert asked.messages[:2] == trained.messages[:2]
    start = trained.spans[0][0]
    assert asked.tokens[:start] == trained.tokens[:start]


@pytest.mark.parametrize(
    ("system", "inside", "wanted"),
    [
        ("w40", "w40 ", "w40 "),
        ("", None, None),
        (None, None, None),
        (" ", "w41", "w41"),
        ("w40", "w41", Malformed),
        (7, None, Malformed),
        ({"text": "w40"}, None, Malformed),
    ],
)
def test_one_system_prompt_is_used_or_the_record_is_counted(
    system: Any, inside: str | None, wanted: Any
) -> None:
    messages = TALK if inside is None else [message("system", inside), *TALK]
    record = {"id": "a", "conversations": messages, "system": system}
    if wanted is Malformed:
        with pytest.raises(Malformed, match="system prompt"):
            seed_of(record, ReadReport())
        return
    assert seed_of(record, ReadReport()).system == wanted


def test_system_messages_keep_their_places() -> None:
    backbone = tiny_backbone()
    messages = [
        message("system", "w40"),
        message("user", "w1"),
        message("assistant", "w5"),
        message("system", "w41"),
        message("user", "w6"),
        message("assistant", "w7"),
    ]
    seed = seed_of({"id": "a", "messages": messages}, ReadReport())
    talk = answers(backbone, [seed], settings())["a"].conversation
    assert [m["role"] for m in talk.messages] == [m["role"] for m in messages]
    for asked, wanted in zip(talk.messages, messages, strict=True):
        if wanted["role"] != "assistant":
            assert asked == wanted
    # The tokens are those of the whole conversation in the template.
    first = render(backbone, talk.messages[:2], prompt=True)
    assert talk.tokens[: talk.spans[0][0]] == token_ids(backbone, first)
    assert talk.spans[1][0] > talk.spans[0][1] + len(token_ids(backbone, "w41 w6"))

    between = [messages[1], message("system", "w41"), messages[2]]
    with pytest.raises(Malformed, match="between a question and its answer"):
        seed_of({"id": "a", "messages": between}, ReadReport())


def test_a_template_that_refuses_a_later_system_message_fails_the_conversation() -> None:
    backbone = tiny_backbone()
    backbone.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('only first') }}{% endif %}{% endfor %}" + CHAT_TEMPLATE
    )
    talk = [message("user", "w1"), message("system", "w41"), message("user", "w2")]
    seed = seed_of({"id": "a", "messages": talk}, ReadReport())
    (outcome,) = answer_locally(backbone, [seed], settings())
    assert outcome.conversation is None
    assert "only first" in str(outcome.failure)


def test_keys_with_words_that_are_not_used_are_told(tmp_path: Path) -> None:
    called = {**TALK[1], "tool_calls": [{"name": "f"}]}
    records = [
        {"id": 1, "prompt": "w1", "messages": TALK, "tools": [{"name": "f"}], "turns": 2},
        {"id": 2, "messages": [TALK[0], called], "instruction": "Answer in French", "context": ""},
        {"id": 3, "messages": TALK, "instruction": "w4"},
    ]
    path = Path(write(tmp_path / "a.json", json.dumps(records)))
    _, seeds = read_seeds(str(path))
    _, trained = read_conversations(path, tiny_backbone())
    assert not unread_keys(json.loads(Conversation("a", TALK, [1, 2], [(1, 2)]).to_json()), TALK)
    for report in (seeds, trained):
        assert report.unread == {"tools": 1, "messages.tool_calls": 1, "instruction": 2}
        assert "'instruction' in 2" in str(report)


def test_a_raw_prompt_in_a_file_stays_raw() -> None:
    record = {"id": "a", "messages": [message("user", "w1")], "raw": True}
    assert seed_of(record, ReadReport()).raw is True


def test_large_array_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.files.io.CHUNK", 7)
    records = [
        {"id": f"s{i}", "messages": [{"role": "user", "content": f"w{i} " * i}]}
        for i in range(1, 6)
    ]
    seeds, report = read_seeds(write(tmp_path / "a.json", json.dumps(records)))
    assert [read.id for read in seeds] == [f"s{i}" for i in range(1, 6)]
    assert not report.skipped


def test_malformed_records_are_counted_and_skipped(tmp_path: Path) -> None:
    good = {"id": "a", "conversations": [{"from": "human", "value": "q"}]}
    odd = {"id": "b", "conversations": [{"from": "martian", "value": "q"}]}
    text = json.dumps(
        [good, odd, {"id": "c"}, {"id": "d", "conversations": [{"from": "gpt", "value": "r"}]}]
    )
    seeds, report = read_seeds(write(tmp_path / "a.json", text[:-1] + ', {"id": "e", "conv'))
    assert [read.id for read in seeds] == ["a"]
    assert report.skipped["cut off"] == 1
    assert sum(report.skipped.values()) == 4
    rows = [{"id": name, "messages": [{"role": "user", "content": text}]} for name, text in
            (("a", "w1"), ("b", "w1 \ud83d"), ("c\udc00", "w1"), ("d", "\U0001f600"))]  # fmt: skip
    rows.append({"id": "e", "messages": [{"role": ["user"], "content": "w1"}]})
    seeds, report = read_seeds(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert [read.id for read in seeds] == ["a", "d"]  # half a character spoils its record alone
    assert sorted(report.skipped.values()) == [1, 2]


@pytest.mark.parametrize("text", ["", "{}\n", '[{"id"', "not json\n", None])
def test_seed_without_a_conversation_is_refused(tmp_path: Path, text: str | None) -> None:
    with pytest.raises(UserError, match="seed"):
        read_seeds("nowhere.jsonl" if text is None else write(tmp_path / "a.json", text))


def test_long_turns_of_sharegpt_are_seeds_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = ["short", "long " * 400, "too long " * 1000, "text " * 500]
    record = {"id": "a_1", "conversations": [{"from": "human", "value": turn} for turn in turns]}
    path = write(tmp_path / "a.json", json.dumps([record]))
    monkeypatch.setattr("medusa_cli.files.fetch.sharegpt_path", lambda: Path(path))
    assert read_seeds("sharegpt-long")[0] == [seed("a_1/1", turns[1:2]), seed("a_1/3", turns[3:])]
    write(Path(path), json.dumps([{**record, "system": "w1"}]))
    assert [read.system for read in read_seeds("sharegpt-long")[0]] == ["w1", "w1"]


def test_ultrachat_names_its_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def rows(name: str, named: str, prefer: tuple[str, ...]):
        asked.append(name)
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x"}]
        yield {"prompt_id": "p1", "messages": messages}

    monkeypatch.setattr("medusa_cli.files.hub.hub_rows", rows)
    assert read_seeds("ultrachat")[0] == [seed("p1", ["hello"])]
    assert asked == ["HuggingFaceH4/ultrachat_200k"]


def function(name: str, body: str) -> str:
    doc = "Adds up what a list of rows holds, and leaves out those that are empty or have no number in them at all."
    lines = [
        f"def {name}(rows, limit=10):",
        f'    """{doc}"""',
        *(f"    {line}" for line in body.splitlines()),
    ]
    return "\n".join(lines) + "\n"


BODY = """total = 0
for number, row in enumerate(rows):
    if number == limit and row:
        break
    total += len(row) + 1
# A comment.
return total
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, in the place of those that are installed."""
    folder = tmp_path / "packages"
    for name in ("a", "b", "c"):
        (folder / name).mkdir(parents=True)
    for number in range(40):
        text = function(f"total_{number}", BODY.replace("limit", f"limit - {number}")) + "\n"
        (folder / "abc"[number % 3] / f"m{number}.py").write_text(text)
    (folder / "c" / "copy.py").write_text((folder / "a" / "m0.py").read_text())
    (folder / "c" / "torn.py").write_text("def f(:\n")
    (folder / "c" / "latin.py").write_bytes(b"# \xe9\n")
    (folder / "a" / "tests").mkdir()
    (folder / "a" / "tests" / "t.py").write_text(function("of_a_test", BODY))
    paths = {key: str(folder) for key in ("stdlib", "purelib", "platlib")}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    return folder


def test_code_seeds_are_the_same_for_a_seed_and_hold_no_source_twice(sources: Path) -> None:
    seeds = code_seeds(0)
    assert seeds == code_seeds(0) == read_seeds("code")[0]
    assert seeds != code_seeds(1)
    assert len(seeds) == len({seed.id.rpartition("-")[2] for seed in seeds}) == 40
    assert {seed.id.split("-")[1] for seed in seeds} == set(KINDS)
    assert code_seeds(0, 7) == seeds[:7]
    assert read_seeds("code", 0, 7)[0] == seeds[:7]
    assert not any("of_a_test" in seed.turns[0] for seed in seeds)


def test_prompts_about_one_file_are_held_out_together(sources: Path) -> None:
    for number in range(1, 40):  # the source of number 0 is in two files
        text = function(f"product_{number}", BODY.replace("limit", f"limit * {number}"))
        path = sources / "abc"[number % 3] / f"m{number}.py"
        path.write_text(f"{path.read_text()}\n\n{text}\n")
    seeds = code_seeds(0)
    held_out = held_out_ids([seed.id for seed in seeds], 0.3)
    sides: dict[str, set[bool]] = {}
    for seed in seeds:
        number = re.findall(r"(?:total|product)_(\d+)", seed.turns[0])[0]
        sides.setdefault(number, set()).add(seed.id in held_out)
    del sides["0"]
    assert len(seeds) == 79
    assert held_out
    assert all(len(own) == 1 for own in sides.values())


@pytest.mark.slow
def test_a_repair_prompt_has_one_fault_and_its_traceback_points_at_it(sources: Path) -> None:
    originals = {path.read_text().strip() for path in sources.rglob("m*.py")}
    prompts = [
        seed.turns[0] for number in range(6) for seed in code_seeds(number) if "-repair-" in seed.id
    ]
    assert any("Traceback" in prompt for prompt in prompts)
    for prompt in prompts:
        code = prompt.split("```")[1].removeprefix("python\n").strip()
        original = next(text for text in originals if text.splitlines()[0] == code.splitlines()[0])
        changed = [
            pair
            for pair in zip(code.splitlines(), original.splitlines(), strict=True)
            if pair[0] != pair[1]
        ]
        assert len(changed) == 1
        assert "#" not in changed[0][0]
        if "Traceback" in prompt:
            assert f"    {changed[0][0].strip()}\nNameError" in prompt


def test_fill_in_the_middle_takes_the_tokenizers_tokens_and_needs_them(sources: Path) -> None:
    def vocabulary(*words: str) -> Any:
        return SimpleNamespace(get_vocab=lambda: dict.fromkeys(words, 0))

    seeds = code_seeds(0)
    raw = [seed for seed in seeds if seed.raw]
    assert raw
    assert with_fim_tokens(seeds, vocabulary("w1")) == [seed for seed in seeds if not seed.raw]
    assert fim_tokens(vocabulary(*FIM[0])) == FIM[0]
    for before, after in zip(
        raw, [s for s in with_fim_tokens(seeds, vocabulary(*FIM[1])) if s.raw], strict=True
    ):
        prefix, rest = after.turns[0].removeprefix(FIM[1][0]).split(FIM[1][1])
        assert before.turns[0].startswith(FIM[0][0] + prefix)
        assert rest.endswith(FIM[1][2])
        original = next(
            path.read_text()
            for path in sources.rglob("m*.py")
            if path.read_text().startswith(prefix)
        )
        assert original.rstrip().endswith(rest.removesuffix(FIM[1][2]).rstrip())


def test_a_raw_prompt_is_asked_without_the_chat_template() -> None:
    backbone = tiny_backbone()
    raw = seed("fim", ["w1 w2 w3", "w4"], raw=True)
    conversation = answers(backbone, [raw], settings())["fim"].conversation
    assert conversation.tokens[:3] == backbone.tokenizer.encode("w1 w2 w3")
    assert conversation.raw
    assert len(conversation.spans) == 1
    assert conversation.spans[0][0] == 3
    assert json.loads(conversation.to_json())["raw"] is True
    assert "raw" not in json.loads(replace(conversation, raw=None).to_json())


def test_sharegpts_programming_conversations_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [
        "Write a poem",
        "Why does `print(x)` fail in my Python script?",
        "Web search results: see a.org/css",
    ]
    records = [
        {"id": f"k{i}", "conversations": [{"from": "human", "value": turn}]}
        for i, turn in enumerate(turns)
    ]
    path = write(tmp_path / "a.json", json.dumps(records))
    monkeypatch.setattr("medusa_cli.files.fetch.sharegpt_path", lambda: Path(path))
    assert [chosen.id for chosen in read_seeds("sharegpt-code")[0]] == ["k1"]


@pytest.mark.parametrize(
    "text",
    ["#include <stdio.h>", "def f(x):", "Fix this:\n\n```\nx\n```", "a C++ class", "the SQL"],
)
def test_code_is_recognised(text: str) -> None:
    assert is_code(text)


@pytest.mark.parametrize(
    "text", ["Plan my trip to Java", "the dress code of a ball", "https://a.org/html is down"]
)
def test_other_turns_are_not_code(text: str) -> None:
    assert not is_code(text)


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        ("I'm sorry, but I can't assist with that.", True),
        ("I\u2019m sorry, but I cannot provide that information.", True),
        ("As an AI language model, I am unable to help with this.", True),
        ("Unfortunately, I won't do that.", True),
        ("I can help you with that.", False),
        ("The function can't help here: it returns None.", False),
        ("I'm sorry to hear that. Here is what helps:", False),
        ("I cannot provide the file itself, but here is its content:\n" + "x = 1\n" * 200, False),
    ],
)
def test_refusals_are_told_from_answers(answer: str, refused: bool) -> None:
    assert is_refusal(answer) == refused


# Files.


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.open(f"{tmp_path}/run/", create=True)


def distilled(run: Run, seeds: Sequence[Conversation], name: str = "x") -> list[Outcome]:
    """Answers seeds into a run; returns the outcomes in the file's order."""
    backbone = tiny_backbone()
    outcomes = list(answers(backbone, seeds, settings()).values())
    with closing(Records(run, backbone.hidden_size, {"seed": name, "settings": {}})) as records:
        for outcome in outcomes:
            records.write(outcome.conversation, outcome.states)
    return outcomes


def test_rows_come_back_in_bf16_and_a_torn_one_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "states.bin"
    store = StateStore(path, 6)
    first, second = torch.randn(3, 6), torch.randn(2, 6, dtype=torch.bfloat16)
    assert (store.append(first), store.append(second), store.rows) == (0, 3, 5)
    assert torch.equal(read_rows(path, 6, 0, 5), torch.cat([first.bfloat16(), second]))
    with pytest.raises(UserError, match=r"states\.bin ends before state row 6"):
        read_rows(path, 6, 4, 2)
    store.close()
    path.write_bytes(path.read_bytes() + b"\x01\x02\x03")  # half a row, as after kill -9
    with closing(StateStore(path, 6)) as again:
        assert again.rows == 5
        again.truncate(4)
        assert again.append(first) == 4
        path.rename(tmp_path / "other.bin")
        assert again.rows == 7
    assert torch.equal(
        read_rows(tmp_path / "other.bin", 6, 3, 4), torch.cat([second[:1], first.bfloat16()])
    )


def test_rows_are_read_without_a_right_to_write_and_without_memory_of_their_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "states.bin"
    path.write_bytes(torch.arange(12).bfloat16().view(torch.uint8).numpy().tobytes())
    path.chmod(0o400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = read_rows(path, 4, 1, 2)
    assert rows.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    maps = Path("/proc/self/maps")
    if maps.is_file():
        (mapped,) = [line for line in maps.read_text().splitlines() if line.endswith(f" {path}")]
        assert mapped.split()[1] == "r--s", "a private or writable mapping counts as memory in full"


def test_torn_line_and_orphan_states_are_dropped_on_resume(run: Run) -> None:
    outcomes, width = distilled(run, SEEDS[:3]), tiny_backbone().hidden_size
    whole = run.distill_path.read_bytes()
    run.distill_path.write_bytes(whole[:-20])
    with closing(StateStore(run.states_path, width)) as store:
        store.append(torch.zeros(5, width))
    with closing(Records(run, width, {"seed": "x", "settings": {}})) as again:
        assert again.done == {outcome.id for outcome in outcomes[:2]}
        again.write(outcomes[2].conversation, outcomes[2].states)
    assert run.distill_path.read_bytes() == whole
    first, count = json.loads(whole.splitlines()[-1])["state_rows"]
    assert run.states_path.stat().st_size == (first + count) * width * 2
    assert torch.equal(read_rows(run.states_path, width, first, count), outcomes[2].states)


def test_last_line_that_lacks_its_line_break_alone_is_kept(run: Run) -> None:
    lines = [
        f'{{"id": "{name}", "messages": [], "tokens": [1, 2], "spans": [[1, 2]]}}\n'
        for name in "ab"
    ]
    run.distill_path.write_text("".join(lines).rstrip())
    with closing(Records(run, 4, {"seed": "x", "settings": {}})) as records:
        assert records.done == {"a", "b"}
        assert run.distill_path.read_text() == "".join(lines)


@pytest.mark.slow
def test_changed_states_are_refused_and_computed_again(run: Run) -> None:
    distilled(run, SEEDS)
    backbone = tiny_backbone()
    assert load_dataset(run, backbone).kept
    whole = run.distill_path.read_text()
    first, second = (json.loads(line) for line in whole.splitlines()[:2])
    run.distill_path.write_text(whole.replace(str(second["state_rows"]), str(first["state_rows"])))
    with pytest.raises(UserError, match=r"states\.bin"):  # rows of another conversation
        load_dataset(run, backbone)
    run.distill_path.write_text(whole)
    damaged = bytearray(run.states_path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    run.states_path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"states\.bin"):
        load_dataset(run, backbone)
    run.states_path.unlink()  # the remedy
    assert load_dataset(run, backbone).report.read == len(SEEDS)


def test_a_distillation_goes_on_without_its_deleted_states(run: Run) -> None:
    distilled(run, SEEDS[:4])
    run.states_path.unlink()
    distilled(run, SEEDS[4:])
    dataset = load_dataset(run, tiny_backbone())
    assert dataset.report.read == len(SEEDS)
    assert dataset.states is not None


def test_a_seed_whose_name_contains_the_separator_stands_once_in_the_header(run: Run) -> None:
    distilled(run, SEEDS[:2], "a, b.json")
    for name in ("a, b.json", "c.json", "a, b.json"):
        distilled(run, [], name)
    assert read_object(run.path / HEADER, "the header")["seed"] == "a, b.json, c.json"


def test_damaged_part_of_several_processes_is_asked_again(run: Run) -> None:
    part, width, header = (
        part_of(run, 0),
        tiny_backbone().hidden_size,
        {"seed": "x", "settings": {}},
    )
    outcomes = distilled(part, SEEDS[:4])
    rows = len(outcomes[3].states) * width * 2
    part.states_path.write_bytes(
        bytes(part.states_path.stat().st_size - rows) + part.states_path.read_bytes()[-rows:]
    )
    with closing(Records(run, width, header)) as records:
        merge_parts(run, records)
        assert records.done == {outcomes[3].id}


def test_merge_killed_while_it_removes_a_part_is_completed_by_the_next(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, header = part_of(run, 0), {"seed": "x", "settings": {}}
    outcomes = distilled(part, SEEDS[:3])

    def killed(folder: Path) -> None:
        (folder / part.states_path.name).unlink()
        raise KeyboardInterrupt

    width = tiny_backbone().hidden_size
    with closing(Records(run, width, header)) as records, monkeypatch.context() as broken:
        broken.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            merge_parts(run, records)
    assert part.path.is_dir()
    with closing(Records(run, width, header)) as records:
        merge_parts(run, records)
        assert records.done == {outcome.id for outcome in outcomes}
    assert not part.path.exists()


def test_other_settings_do_not_mix_into_a_file(run: Run) -> None:
    distilled(run, SEEDS[:1])
    with pytest.raises(UserError, match="settings"):
        Records(run, 32, {"seed": "x", "settings": {"temperature": 1}})


def test_answers_to_another_seed_join_a_file(run: Run) -> None:
    outcomes = distilled(run, SEEDS[:2])
    width = tiny_backbone().hidden_size
    with closing(Records(run, width, {"seed": "y", "settings": {}})) as records:
        assert records.done == {outcome.id for outcome in outcomes}
    Records(run, width, {"seed": "x", "settings": {}}).close()
    assert read_object(run.path / HEADER, "the header")["seed"] == "x, y"


# The command.


@pytest.mark.slow
def test_the_models_own_penalties_are_part_of_the_provenance_and_its_data_is_learned_from(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "model" / "generation_config.json").write_text(
        '{"repetition_penalty": 1.3, "temperature": 0.6}'
    )
    medusa(*words, "--max-samples", "1", "--quiet")
    header = json.loads((tmp_path / "run" / "distill.json").read_text())
    assert header["settings"]["generation_config"] == ["repetition_penalty 1.3"]
    backbone = load_backbone(str(tmp_path / "model"), LoadOptions(dtype="fp32"))
    assert load_dataset(Run(tmp_path / "run"), backbone).kept


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Returns the command without --json, its six seeds of one turn."""
    seeds = [{"id": f"k{i}", "messages": [{"role": "user", "content": f"w{i}"}]} for i in range(6)]
    file, model = write_lines(tmp_path / "seed.jsonl", seeds), save_model(tmp_path / "model")
    return ["distill", "--seed", str(file), "--model", model, "--dtype", "fp32", "--run", str(tmp_path / "run"),
            "--max-new-tokens", "4"]  # fmt: skip


@pytest.mark.slow
def test_rounded_model_does_not_continue_the_whole_ones_data(words: list[str]) -> None:
    words += ["--dtype", "bf16"]
    medusa(*words, "--max-samples", "2", "--engine", "eager")
    assert "rounding" in medusa(*words, "--quantize", "int8", exit_code=1).stderr
    assert medusa_json(*words, "--engine", "native")["conversations"] == 6


@pytest.mark.slow
def test_resume_continues_with_the_runs_model_and_begins_nothing(
    words: list[str], tmp_path: Path
) -> None:
    medusa(*words, "--resume", exit_code=1)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    assert "--resume" in medusa(*words, "--resume", exit_code=1).stderr
    medusa(*words, "--max-samples", "2")
    at = words.index("--model")
    assert medusa_json(*words[:at], *words[at + 2 :], "--resume")["conversations"] == 6


def test_duplicates_and_short_answers_are_left_out(words: list[str], tmp_path: Path) -> None:
    seeds = [
        {"id": f"k{i}", "messages": [{"role": "user", "content": f"w{i % 9}"}]} for i in range(12)
    ]
    words += ["--seed", str(write_lines(tmp_path / "more.jsonl", seeds)), "--max-new-tokens", "40"]
    first = medusa_json(*words, "distill.min_answer_tokens=40")
    assert first["duplicates"] == 3
    assert first["conversations"] + first["dropped"] == 9
    assert first["dropped"] > 0
    rest = medusa_json(*words)
    assert rest["conversations"] == 9
    assert rest["dropped"] == 0
    assert medusa_json(*words, "distill.dedup=false")["conversations"] == 12


def test_a_system_prompt_is_set_and_part_of_the_settings(words: list[str], tmp_path: Path) -> None:
    medusa(*words, "--max-samples", "2", "--system", "w9 w8")
    for line in (tmp_path / "run" / "distill.jsonl").read_text().splitlines():
        assert json.loads(line)["messages"][0] == {"role": "system", "content": "w9 w8"}
    assert "settings" in medusa(*words, exit_code=1).stderr
    assert medusa_json(*words, "--system", "w9 w8")["conversations"] == 6


@pytest.mark.quick("training0")
@pytest.mark.parametrize("training", [["train.stage=2"], ["train.states=fresh"]])
def test_states_are_not_kept_for_a_training_that_runs_the_model(
    words: list[str], training: list[str], tmp_path: Path
) -> None:
    assert medusa_json(*words, *training)["conversations"] == 6
    assert (tmp_path / "run" / "states.bin").stat().st_size == 0
    medusa(
        "train",
        "--run",
        tmp_path / "run",
        "--dtype",
        "fp32",
        "drafter.num_heads=2",
        "train.epochs=1",
    )


def test_refusals_are_dropped_on_request(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.distill.filters.is_refusal", lambda answer: True)
    assert (
        medusa_json(*words, "--drop-refusals", "--max-samples", "3", "--keep-refusals")[
            "conversations"
        ]
        == 3
    )
    rest = medusa_json(*words, "--drop-refusals")
    assert (rest["conversations"], rest["refused"]) == (3, 3)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--max-new-tokens", "512"], 2),
        (["distill.context=16", "--max-new-tokens", "15"], 1),  # too short for every prompt
    ],
)
def test_context_without_room_for_an_answer_is_named(
    words: list[str], flags: list[str], code: int
) -> None:
    result = medusa(*words, *flags, exit_code=code)
    assert "distill.context" in result.stderr
    assert not result.stdout


@pytest.mark.slow
def test_batch_size_comes_from_the_setting_the_recipe_or_the_memory(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int | None] = []

    def answer(backbone: Any, seeds: Any, settings: DistillRecipe, *_: Any, **__: Any) -> Any:
        sizes.append(settings.batch_size)
        return iter([Outcome("a", Conversation("a", [], [1, 2], [(1, 2)]))])

    slot = (2 * 2 * (8 + 16) * 4 + 32 * 2) * 64  # of the tiny model: padded values, and its states
    monkeypatch.setattr("medusa_cli.distill.distillation.answer_locally", answer)
    monkeypatch.setattr(
        "medusa_cli.distill.local.free_memory", lambda device: int(5.5 * slot / 0.7)
    )
    recipe = write(tmp_path / "recipe.yaml", "distill: {batch_size: 7}\n")
    words += ["distill.context=64"]
    for more in ([], [recipe], [recipe, "distill.batch_size=3"]):
        assert ("distill.batch_size" in medusa(*words, *more).stderr) == (not more)
    assert sizes == [5, 7, 3]


def test_estimate_of_all_tokens_falls_steadily_and_ends_at_what_was_made() -> None:
    """Short answers end first; the estimate counts what longer ones have by then."""
    seeds = [seed(f"s{number}", ["w1"]) for number in range(60)]
    lengths = [1 + 7 * number % 40 for number in range(60)]
    totals: list[int] = []
    shown = Progress(
        seeds,
        DistillRecipe(max_new_tokens=40),
        lambda name, done, total, *rest: totals.append(total),
    )
    waiting, running = list(lengths), list[int]()
    while waiting or running:
        while waiting and len(running) < 8:
            running.append(waiting.pop(0))
        shown.count(len(running))
        running = [left - 1 for left in running]
        for _ in range(running.count(0)):
            shown.end()
        running = [left for left in running if left]
    assert totals[0] == 60 * 40
    assert totals[-1] == shown.tokens == sum(lengths)
    assert all(after < 1.05 * before for before, after in itertools.pairwise(totals))
    assert all(sum(lengths) <= total < 1.5 * sum(lengths) for total in totals[len(totals) // 3 :])


@pytest.mark.slow
def test_tokens_are_counted_while_conversations_are_under_way() -> None:
    counted: list[int] = []
    outcomes = list(answer_locally(tiny_backbone(), SEEDS, settings(), counted.append))
    assert sum(counted) == sum(
        outcome.conversation.positions for outcome in outcomes if outcome.conversation
    )
    assert len(counted) > len(SEEDS)
