"""Training data: answers and their hidden states, the split, packing, and states of several layers."""

import json
import random
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from medusa_cli.data.conversation import (
    Conversation,
    conversation_of,
    id_of,
    read_conversations,
)
from medusa_cli.data.draft_vocabulary import coverage, frequent_tokens
from medusa_cli.data.packing import (
    Dataset,
    held_out_ids,
    read_dataset,
    split_conversations,
)
from medusa_cli.data.states import StateStore
from medusa_cli.data.vllm_states import layer_ids, with_vllm_states
from medusa_cli.drafters import MedusaHeads
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.files.io import ReadReport
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import padded_pass
from medusa_cli.model.chat_template import encode
from medusa_cli.model.distributed import Distributed
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.run import Run
from tests import helpers
from tests.helpers import (
    END_ID,
    answers_of,
    attach,
    conversation,
    load_dataset,
    medusa,
    save_model,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
    write_lines,
)


@pytest.fixture
def backbone() -> Backbone:
    return tiny_backbone()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.open(f"{tmp_path}/run", create=True)
    write_lines(run.distill_path, [conversation(n, turns=1 + n % 2) for n in range(40)])
    return run


def bf16_backbone(engine: str) -> Backbone:
    """Returns a bf16 backbone on an engine; engine bnb.nf4 stands for weights that bitsandbytes quantized."""
    network = tiny_model().bfloat16()
    if engine == "bnb.nf4":
        network.config.quantization_config = SimpleNamespace(load_in_4bit=True, load_in_8bit=False)
    backbone = Backbone(network, tiny_tokenizer())
    quantize = engine if engine in ("int8", "int4") else None
    attach(backbone, "native" if quantize or engine == "native" else "eager", quantize=quantize)
    return backbone


def test_ids_of_records_are_kept_unless_they_are_none() -> None:
    assert id_of({"id": 0}) == "0"
    assert id_of({"id": "a", "prompt_id": "b"}) == "a"
    for missing in (None, "", False):
        assert id_of({"id": missing, "prompt_id": "b"}) == "b"
        first, second = (id_of({"id": missing, "messages": text}) for text in ("x", "y"))
        assert first != second
        assert len(first) == len(second) == 16


def test_spans_are_answers_with_their_end_token(backbone: Backbone) -> None:
    messages = [{"role": "system", "content": "w1"}, *conversation(3, turns=2)["messages"]]
    tokens, spans = encode(backbone, messages)
    assert tokens == backbone.encode_chat(messages, add_generation_prompt=False)
    for (start, end), message in zip(
        spans, [m for m in messages if m["role"] == "assistant"], strict=True
    ):
        assert tokens[end - 1] == END_ID
        assert backbone.tokenizer.decode(tokens[start : end - 1]) == message["content"]
        assert tokens[:start][-2:] == backbone.encode_chat([{"role": "user", "content": "w1"}])[-2:]


def test_template_that_rewrites_earlier_turns_is_refused(backbone: Backbone) -> None:
    last_only = "(' ' + m['content'] + ' <end> ' if loop.last else ' ')"
    backbone.tokenizer.chat_template = (
        f"{{% for m in messages %}}{{{{ m['role'] + {last_only} }}}}{{% endfor %}}"
    )
    with pytest.raises(UserError, match="chat template"):
        encode(backbone, conversation(1, turns=2)["messages"])


def test_states_are_those_that_emit_each_answer_token(run: Run, backbone: Backbone) -> None:
    seen: list[tuple[str, int, int]] = []
    dataset = load_dataset(run, backbone, show=lambda *progress: seen.append(progress))
    assert seen[-1][1] == seen[-1][2]
    item = next(item for item in dataset.train if item.id == "c2")
    tokens, [(start, end)] = encode(backbone, conversation(2)["messages"])
    heads = MedusaHeads.create(backbone, 1, 1, "own")
    batch = dataset.batch(backbone, heads, [item])
    assert batch.next.tolist() == tokens[start:end]
    assert torch.equal(
        batch.hidden, helpers.forward(backbone, tokens).hidden[start - 1 : end - 1].bfloat16()
    )
    seen.clear()
    again = load_dataset(run, backbone, show=lambda *progress: seen.append(progress))
    assert torch.equal(again.states, dataset.states)
    assert not seen


def test_killed_prefill_resumes_with_whole_conversations(run: Run, backbone: Backbone) -> None:
    whole = load_dataset(run, backbone).states.clone()
    (cached,) = (run.path / "cache").iterdir()
    cached.unlink()
    done: list[int] = []

    def killed(name: str, count: int, total: int) -> None:
        done.append(count)
        if len(done) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_dataset(run, backbone, show=killed)
    (part,) = (run.path / "cache").iterdir()
    width, positions = (
        2 * backbone.hidden_size,
        len(encode(backbone, conversation(0)["messages"])[0]) - 1,
    )
    with part.open("r+b") as out:  # as if the first was written in part
        out.seek(width * positions - 3)
        out.write(bytes(3))
        out.seek(0, 2)
        out.write(b"more than there are rows")
    again: list[int] = []
    dataset = load_dataset(run, backbone, show=lambda name, done, total: again.append(done))
    assert torch.equal(dataset.states, whole)
    assert len(again) == 40 - 7 + 1
    assert list((run.path / "cache").iterdir()) == [cached]


def write_vllm_states(run: Run, backbone: Backbone, ids: list[int], count: int) -> None:
    """Writes the states of some conversations as vLLM's connector for hidden states does."""
    folder = run.path / "vllm"
    folder.mkdir()
    network = backbone.model
    norm, network.model.norm = network.model.norm, torch.nn.Identity()
    for number in range(count):
        tokens = encode(backbone, conversation(number, turns=1 + number % 2)["messages"])[0][:-1]
        with torch.no_grad():
            out = padded_pass(backbone, torch.tensor([tokens]), output_hidden_states=True)
        states = torch.stack([out.hidden_states[id][0] for id in ids], dim=1)
        tensors = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(tokens)}
        save_file(tensors, folder / f"chatcmpl-{number}.safetensors")
    network.model.norm = norm


def test_states_that_vllm_wrote_train_a_drafter_without_the_models_layers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model", layers=3)
    backbone = load_backbone(model, LoadOptions(dtype="fp32", engine="eager"))
    taps = (0, 1, -1)
    write_vllm_states(run, backbone, layer_ids(taps, 3), 38)
    dataset = read_dataset(run.data_path, backbone, 0.1)
    whole = load_dataset(run, backbone, fraction=0.1, taps=taps)
    ours = with_vllm_states(dataset, run, backbone, taps, Distributed())
    assert len(ours.train) + len(ours.held_out) == 38
    expected = {item.id: item for item in (*whole.train, *whole.held_out)}
    for item in ours.train:
        (first, count), (start, same) = item.state_rows, expected[item.id].state_rows
        assert count == same
        rows, known = ours.states[first : first + count], whole.states[start : start + count]
        assert torch.allclose(rows.float(), known.float(), rtol=2**-7, atol=0.05), (
            (rows - known).abs().amax(0)
        )
    with pytest.raises(UserError, match=r"eagle_aux_hidden_state_layer_ids \[2, 3\]"):
        with_vllm_states(dataset, run, backbone, (1, -1), Distributed())

    def refuse(*args: Any, **named: Any) -> None:
        raise AssertionError("the layers were loaded")

    for place in ("medusa_cli.engine.load.load_network", "medusa_cli.engine.load._load_native"):
        monkeypatch.setattr(place, refuse)
    words = ["drafter=eagle", "drafter.num_heads=2", "drafter.taps=[1,2]", "train.states=vllm"]
    words += ["drafter.draft_vocab_size=40", "train.batch_tokens=64", "--dtype", "fp32"]
    medusa("train", *words, "--run", run.path, "--model", model)
    assert (run.drafter_dir / "config.json").is_file()
    shutil.rmtree(run.path / "vllm")
    assert (
        "train.states=vllm"
        in medusa("train", *words, "--run", run.path, "--model", model, exit_code=1).output
    )


def test_kept_states_must_belong_to_the_data(run: Run, backbone: Backbone) -> None:
    records, row = [], 0
    for n in range(6):
        tokens, spans = encode(backbone, conversation(n, turns=2)["messages"])
        records.append(
            {"id": f"c{n}", "tokens": tokens, "spans": spans, "state_rows": [row, len(tokens) - 1]}
        )
        row += len(tokens) - 1
    write_lines(run.distill_path, records)
    with closing(StateStore(run.states_path, backbone.hidden_size)) as store:
        rows = torch.randn(row, backbone.hidden_size).bfloat16()
        store.append(rows)
        assert torch.equal(load_dataset(run, backbone).states, rows)
        store.truncate(row - 1)
    with pytest.raises(UserError, match="states.bin"):
        load_dataset(run, backbone)
    run.bind(backbone.identity)
    with pytest.raises(UserError, match="tiny-llama"):
        load_dataset(run, tiny_backbone("qwen3"))


def test_states_belong_to_the_quantization_of_the_model(run: Run, tmp_path: Path) -> None:
    backbones = {
        engine: bf16_backbone(engine) for engine in ("eager", "native", "int8", "int4", "bnb.nf4")
    }
    counts = []
    for backbone in backbones.values():
        load_dataset(run, backbone)
        counts.append(len(list((run.path / "cache").iterdir())))
    assert counts == [1, 2, 3, 4, 5]  # those of the native engine are fp32
    tokens, spans = encode(backbones["eager"], conversation(0)["messages"])
    count = len(tokens) - 1
    kept = Run.open(f"{tmp_path}/kept", create=True)
    lines = [
        {"id": f"c{n}", "tokens": tokens, "spans": spans, "state_rows": [n * count, count]}
        for n in range(4)
    ]
    write_lines(kept.distill_path, lines)
    rows = torch.randn(4 * count, backbones["eager"].hidden_size).bfloat16()
    with closing(StateStore(kept.states_path, rows.shape[1])) as store:
        store.append(rows)
    for answered_by in ("eager", "int8", "bnb.nf4"):
        settings = {} if answered_by == "eager" else {"rounding": answered_by}
        (kept.path / "distill.json").write_text(json.dumps({"settings": settings}))
        for engine in ("eager", "int8", "bnb.nf4"):
            taken = torch.equal(load_dataset(kept, backbones[engine]).states, rows)
            assert taken == (engine == answered_by), (engine, answered_by)
    # A copy of another model's answers, whose states this one does not have.
    backbone = backbones["eager"]
    backbone.identity |= {"weights": "a"}
    for weights, taken in (("b", False), ("a", True)):
        owner = backbone.identity | {"weights": weights}
        (kept.path / "distill.json").write_text(json.dumps({"backbone": owner, "settings": {}}))
        assert torch.equal(load_dataset(kept, backbone).states, rows) == taken, weights


def test_states_belong_to_the_weights_of_the_model(run: Run, backbone: Backbone) -> None:
    counts = []
    for id, weights in (("one", "a"), ("moved", "a"), ("moved", "b")):
        backbone.identity |= {"id": id, "weights": weights}
        load_dataset(run, backbone)
        counts.append(len(list((run.path / "cache").iterdir())))
    assert counts == [1, 1, 2]


def test_bad_records_are_counted_and_bad_files_refused(run: Run, backbone: Backbone) -> None:
    good = json.dumps(conversation(1))
    lines = [good, good, "", good[:-9]]
    lines += ['{"id": "x", "tokens": [1, 99999], "spans": [[1, 2]]}']
    lines += ['{"id": "y", "tokens": [1, 2, 3], "spans": [[2, 9]]}']
    lines += ['{"messages": [{"role": "wizard", "content": "w1"}]}']
    lines += [
        '{"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2 w3"}]}'
    ]
    run.distill_path.write_text("\n".join(lines))
    report = load_dataset(run, backbone).report
    assert report.read == 2
    assert sum(report.skipped.values()) == len(report.skipped) == 5
    run.distill_path.write_text("[" + good + ", " + json.dumps(conversation(2)) + ", " + good[:20])
    report = load_dataset(run, backbone).report
    assert (report.read, report.skipped) == (2, {"cut off": 1})
    short = json.dumps({"id": "c", "tokens": [5, 6, 7], "spans": [[2, 3]]})
    refused = (
        ("", "is empty"),
        ("{}", "no usable conversation"),
        (short, "no answer of two tokens or more"),
    )
    for text, part in refused:
        run.distill_path.write_text(text)
        with pytest.raises(UserError, match=part):
            load_dataset(run, backbone)
    run.distill_path.unlink()
    with pytest.raises(UserError, match=r"distill.jsonl does not exist"):
        load_dataset(run, backbone)


def test_rows_of_specforge_and_speculators_are_read(tmp_path: Path, backbone: Backbone) -> None:
    parts = [{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}]
    image = [{"type": "image_url", "image_url": {"url": "a.png"}}]
    answer = {"role": "assistant", "content": "w3 w4"}
    rows = [
        {"id": "specforge", "conversations": [{"role": "user", "content": "w1 w2"}, answer]},
        {"id": "parts", "messages": [{"role": "user", "content": parts}, answer]},
        {"id": "image", "messages": [{"role": "user", "content": image}, answer]},
        {
            "id": "masked",
            "input_ids": [9, 8, 7, 6, 5, 4],
            "loss_mask": [0, 0, 1, 1, 0, 1],
            "conversations": [],
        },
        {"id": "all", "input_ids": [9, 8, 7], "loss_mask": [1, 1, 1]},
        {"id": "short", "input_ids": [9, 8, 7], "loss_mask": [0, 1]},
        {"id": "none", "input_ids": [9, 8, 7], "loss_mask": [0, 0, 0]},
        {"id": "foreign", "input_ids": [9, 10**6, 7], "loss_mask": [0, 1, 1]},
    ]
    read, report = read_conversations(write_lines(tmp_path / "rows.jsonl", rows), backbone)
    known = {item.id: item for item in read}
    assert set(known) == {"specforge", "parts", "masked", "all"}
    assert sum(report.skipped.values()) == 4
    assert known["specforge"].tokens == known["parts"].tokens
    assert len(known["parts"].spans) == 1
    assert known["masked"].tokens == [9, 8, 7, 6, 5, 4]
    assert known["masked"].spans == [
        (2, 4),
        (5, 6),
    ]
    assert known["all"].spans == [(1, 3)]  # nothing comes before the first token


def test_conversations_go_out_as_rows_and_come_back(
    run: Run, backbone: Backbone, tmp_path: Path
) -> None:
    raw = Conversation("raw", [{"role": "user", "content": "w1"}], [9, 8, 7], [(1, 3)], raw=True)
    before = [*read_conversations(run.distill_path, backbone)[0], raw]
    run.distill_path.write_text("".join(f"{item.to_json()}\n" for item in before))
    result = medusa("export", "--to", "data", "--run", f"{run.path}/", "--output", tmp_path / "out")
    assert "tokens.jsonl" in result.stderr  # the raw one
    for file, wanted in (("tokens.jsonl", before), ("conversations.jsonl", before[:-1])):
        after, report = read_conversations(tmp_path / "out" / file, backbone)
        assert not report.skipped
        assert [(a.id, a.tokens, a.spans) for a in after] == [
            (b.id, b.tokens, b.spans) for b in wanted
        ]
    lines = [
        json.loads(line)
        for line in (tmp_path / "out" / "conversations.jsonl").read_text().splitlines()
    ]
    assert all(
        message.keys() == {"role", "content"} for line in lines for message in line["conversations"]
    )
    empty = Run.open(f"{tmp_path}/empty", create=True)
    words = ("export", "--to", "data", "--run", f"{empty.path}/", "--output", tmp_path / "none")
    assert "distill" in medusa(*words, exit_code=1).stderr


@pytest.mark.slow
def test_split_is_by_conversation_and_stable(run: Run, backbone: Backbone) -> None:
    dataset = load_dataset(run, backbone, fraction=0.2)
    ids, trained = {a.id for a in dataset.held_out}, {a.id for a in dataset.train}
    assert ids
    assert trained
    assert not ids & trained
    write_lines(run.distill_path, [conversation(n) for n in range(80)])
    more = load_dataset(run, backbone, fraction=0.2)
    assert {a.id for a in more.held_out} & (ids | trained) == ids
    assert len({dataset.digest, more.digest, load_dataset(run, backbone, fraction=0.3).digest}) == 3
    write_lines(run.distill_path, [conversation(n) for n in range(2)])
    small = load_dataset(run, backbone, fraction=0.001)
    assert len({a.id for a in small.held_out}) == len({a.id for a in small.train}) == 1


def test_generations_of_a_conversation_stay_together() -> None:
    ids = [f"conv-{number}_gen{turn}" for number in range(40) for turn in range(3)]
    out = held_out_ids(ids, 0.2)
    assert out
    assert len({id.partition("_gen")[0] for id in out}) * 3 == len(out)


def test_parts_of_a_conversation_stay_together() -> None:
    ids = held_out_ids([f"A{n:06d}_{part}" for n in range(400) for part in range(4)], 0.2)
    names = {id[:7] for id in ids}
    assert 40 < len(names) < 120
    assert ids == {f"{name}_{part}" for name in names for part in range(4)}
    turns = held_out_ids(
        [f"A{n:06d}_{part}/{turn}" for n in range(400) for part in range(4) for turn in (0, 7)], 0.2
    )
    assert {id.partition("/")[0] for id in turns} == ids
    # Numbered names are no parts: each conversation goes its own way.
    for kind in ("example", "c", "sharegpt", "conversation7"):
        assert 0 < len(held_out_ids([f"{kind}_{n}" for n in range(100)], 0.2)) < 100
    # Of few conversations one is held out, and never all.
    parts = ["A000001_0", "A000001_1", "B000001_0", "B000001_1"]
    for fraction in (1e-9, 0.5, 1.0):
        assert held_out_ids(parts, fraction) in (
            {"A000001_0", "A000001_1"},
            {"B000001_0", "B000001_1"},
        )
    assert held_out_ids(parts, 0.0) == held_out_ids(parts[:2], 1.0) == set()


def packed(*lengths: int) -> Dataset:
    return Dataset(
        answers_of(*map(range, lengths)), [], ReadReport(), "", torch.zeros(sum(lengths), 4)
    )


def test_micro_batches_hold_whole_conversations_up_to_their_limit() -> None:
    dataset = packed(5, 6, 4, 23, 2)
    batches = dataset.micro_batches(dataset.train, 10)
    assert [[item.positions for item in batch] for batch in batches] == [[5], [6, 4], [23], [2]]


def test_batches_that_the_model_runs_hold_no_more_tokens_than_allowed() -> None:
    dataset = replace(packed(*range(3, 43)), states=None)
    batches = dataset.micro_batches(dataset.train, 64, random.Random(1))
    assert sorted(item.id for batch in batches for item in batch) == sorted(
        item.id for item in dataset.train
    )
    assert all(max(len(item.tokens) for item in batch) * len(batch) <= 64 for batch in batches)


def test_conversations_are_cut_to_a_length() -> None:
    items = [Conversation(f"c{n}", [], list(range(n)), [(4, 8), (10, n)]) for n in range(11, 41)]
    cut = split_conversations(items, ReadReport(), max_length=20, fraction=0.0).train
    assert all(len(item.tokens) <= 20 and item.spans[-1][1] == len(item.tokens) for item in cut)
    assert len(cut) == len(items)


def test_conversations_without_an_answer_to_learn_from_are_counted(
    tmp_path: Path, backbone: Backbone
) -> None:
    rows = [
        {"id": f"a{n}", "conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": text}]}
        for n, text in enumerate(("w2 w3", "", " ", "w4"))
    ]  # fmt: skip
    read, report = read_conversations(write_lines(tmp_path / "a.jsonl", rows), backbone)
    data = split_conversations(read, report, fraction=0.0)
    assert report.read == len(data.train)
    assert report.read + sum(report.skipped.values()) == 4
    assert report.read == 2


def test_schedule_is_the_same_for_a_seed_and_bounded() -> None:
    dataset = packed(*[7] * 12)

    def ids(**changes) -> list[list[str]]:
        given = {"limit": 14, "epochs": 2, "seed": 0, "max_positions": None, **changes}
        return [[item.id for item in batch] for batch in dataset.schedule(**given)]

    assert ids() == ids() != ids(seed=1)
    assert len(ids()) == 12
    assert sorted(sum(ids()[:6], [])) == sorted(item.id for item in dataset.train)
    assert ids(max_positions=30) == ids()[:3]


def test_frequent_tokens_stand_in_most_answers() -> None:
    answers = [torch.tensor(tokens) for tokens in ([7, 3], [9, 9, 9, 9, 7], [3, 7, 5])]
    ids = frequent_tokens(answers, 3, 12)
    # 9 stands there most often, in one answer, and 5 has the smaller id.
    assert ids.tolist() == [
        7,
        3,
        5,
    ]
    assert coverage(ids, answers) == pytest.approx(6 / 10)
    assert coverage(torch.arange(64), answers) == 1


def test_conversation_ends_at_the_model_s_context() -> None:
    record = {"id": "long", "tokens": list(range(30)), "spans": [[5, 10], [12, 20], [25, 30]]}
    model: Any = SimpleNamespace(max_positions=15, vocab_size=99)
    short = conversation_of(record, model, ReadReport())
    assert short.id == "long"
    assert short.tokens == list(range(15))
    assert short.spans == [(5, 10), (12, 15)]
