"""Training: data and its states, packing, the step's arithmetic, crash and resume, and the command."""

import dataclasses
import json
import os
import signal
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from medusa_cli import engine as engines
from medusa_cli.data.packing import Example, coverage, frequent_tokens, held_out_ids, micro_batches, schedule
from medusa_cli.data.states import StateStore
from medusa_cli.drafters import DRAFTERS, load_drafter
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import encode
from medusa_cli.runs.recipe import Recipe, load_recipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run
from medusa_cli.train import Stepped, Stopped, Trainer, Validated, build_drafter, load_dataset
from medusa_cli.train.log import TrainLog, read_log
from medusa_cli.train.loop import learning_rate, means, peak_rates, sums_of
from medusa_cli.train.losses import BatchLoss, linear_loss
from medusa_cli.tree import Tree
from tests import helpers
from tests.helpers import END_ID, conversation, generate, medusa, tiny_backbone, tiny_model, tiny_tokenizer, write_lines

# A language that a head can learn: each answer counts on from the question's number.
SETTINGS = [
    "drafter.num_heads=2",
    "drafter.draft_vocab_size=40",
    "train.batch_tokens=64",
    "train.max_tokens=null",
    "train.epochs=3",
    "train.lr=1e-2",
    "train.dtype=fp32",
    "train.validation_fraction=0.2",
    "train.validation_every=5",
    "train.checkpoint_every=4",
]


def recipe_with(*more: str) -> Recipe:
    return load_recipe(None, [*SETTINGS, *more])


@pytest.fixture
def backbone() -> Backbone:
    return tiny_backbone("llama")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run.open(f"{tmp_path}/run", create=True)
    write_lines(found.distill_path, [conversation(n, turns=1 + n % 2) for n in range(40)])
    return found


def trainer(run: Run, backbone: Backbone, *more: str, resume: bool = False, stop=lambda: False) -> Trainer:
    recipe = recipe_with(*more)
    dataset = load_dataset(run, backbone, fraction=recipe.train.validation_fraction)
    drafter = build_drafter(backbone, recipe.drafter, dataset)
    return Trainer(backbone, drafter, dataset, recipe, run, resume=resume, should_stop=stop)


def test_spans_are_the_answers_with_their_end_token(backbone: Backbone) -> None:
    messages = [{"role": "system", "content": "w1"}, *conversation(3, turns=2)["messages"]]
    tokens, spans = encode(backbone, messages)
    assert tokens == backbone.encode_chat(messages, add_generation_prompt=False)
    for (start, end), message in zip(spans, [m for m in messages if m["role"] == "assistant"], strict=True):
        assert tokens[end - 1] == END_ID
        assert backbone.tokenizer.decode(tokens[start : end - 1]) == message["content"]
        assert tokens[:start][-2:] == backbone.encode_chat([{"role": "user", "content": "w1"}])[-2:]


def test_a_template_that_rewrites_earlier_turns_is_refused(backbone: Backbone) -> None:
    last_only = "(' ' + m['content'] + ' <end> ' if loop.last else ' ')"
    backbone.tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m['role'] + {last_only} }}}}{{% endfor %}}"
    with pytest.raises(UserError, match="rewrites earlier turns"):
        encode(backbone, conversation(1, turns=2)["messages"])
    backbone.tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        encode(backbone, conversation(1)["messages"])


def test_states_are_those_that_emit_each_answer_token(run: Run, backbone: Backbone) -> None:
    seen: list[tuple[int, int]] = []
    dataset = load_dataset(run, backbone, on_progress=lambda *event: seen.append(event))
    assert seen[-1][0] == seen[-1][1]
    answer = next(one for one in dataset.train if one.id == "c2")
    tokens, [(start, end)] = encode(backbone, conversation(2)["messages"])
    hidden = helpers.forward(backbone, tokens).hidden
    rows = dataset.states[answer.first_row : answer.first_row + len(answer.tokens)]
    assert answer.tokens.tolist() == tokens[start:end]
    assert torch.equal(rows, hidden[start - 1 : end - 1].bfloat16())
    seen.clear()
    assert torch.equal(
        load_dataset(run, backbone, on_progress=lambda *event: seen.append(event)).states, dataset.states
    )
    assert not seen  # the cached file was used


def test_a_prefill_that_was_killed_goes_on_with_whole_conversations(
    run: Run, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_dataset(run, backbone).states.clone()
    (cached,) = (run.path / "cache").iterdir()
    cached.unlink()
    done: list[int] = []

    def killed(count: int, total: int) -> None:
        done.append(count)
        if len(done) == 7:
            raise Crash

    with pytest.raises(Crash):
        load_dataset(run, backbone, on_progress=killed)
    (part,) = (run.path / "cache").iterdir()
    with part.open("ab") as out:
        out.write(b"half of what the eighth has")
    again: list[int] = []
    found = load_dataset(run, backbone, on_progress=lambda done, total: again.append(done))
    assert torch.equal(found.states, whole) and len(again) == 40 - 7
    assert list((run.path / "cache").iterdir()) == [cached]


def test_kept_states_are_used_and_must_belong_to_the_data(run: Run, backbone: Backbone) -> None:
    records, row = [], 0
    for n in range(6):
        tokens, spans = encode(backbone, conversation(n, turns=2)["messages"])
        count = len(tokens) - 1
        records.append({"id": f"c{n}", "tokens": tokens, "spans": spans, "state_rows": [row, count]})
        row += count
    write_lines(run.distill_path, records)
    store = StateStore(run.states_path, backbone.hidden_size)
    rows = torch.randn(row, backbone.hidden_size).bfloat16()
    store.append(rows)
    dataset = load_dataset(run, backbone)
    assert torch.equal(dataset.states, rows)
    store.truncate(row - 1)
    store.close()
    with pytest.raises(UserError, match=f"states.bin ends before state row {row}"):
        load_dataset(run, backbone)
    run.bind(backbone.identity)
    with pytest.raises(UserError, match="was made for the model 'tiny-llama'"):
        load_dataset(run, tiny_backbone("qwen3"))


def test_kept_states_are_those_of_a_model_rounded_alike(run: Run) -> None:
    def made(engine: str) -> Backbone:
        backbone = Backbone(tiny_model("llama").bfloat16(), tiny_tokenizer())
        engines.attach(backbone, engine)
        return backbone

    quantised = made("eager")
    quantised.model.config.quantization_config = SimpleNamespace(load_in_4bit=True, load_in_8bit=False)
    backbones = {None: made("eager"), "int8": made("int8"), "bnb.nf4": quantised}
    tokens, spans = encode(backbones[None], conversation(0)["messages"])
    count = len(tokens) - 1
    lines = [{"id": f"c{n}", "tokens": tokens, "spans": spans, "state_rows": [n * count, count]} for n in range(4)]
    write_lines(run.distill_path, lines)
    rows = torch.randn(4 * count, backbones[None].hidden_size).bfloat16()
    with closing(StateStore(run.states_path, backbones[None].hidden_size)) as store:
        store.append(rows)
    for answered_by in backbones:
        settings = {} if answered_by is None else {"rounding": answered_by}
        (run.path / "distill.json").write_text(json.dumps({"settings": settings}))
        for rounding, backbone in backbones.items():
            taken = torch.equal(load_dataset(run, backbone).states, rows)
            assert taken == (rounding == answered_by), (rounding, answered_by)


def test_bad_records_are_counted_and_bad_files_refused(run: Run, backbone: Backbone) -> None:
    good = json.dumps(conversation(1))
    lines = [
        good,
        good,
        "",
        "{no json",
        "[]",
        '{"id": "x", "tokens": [1, 99999], "spans": [[1, 2]]}',
        '{"id": "y", "tokens": [1, 2, 3], "spans": [[2, 9]]}',
        '{"messages": [{"role": "wizard", "content": "w1"}]}',
        '{"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2 w3"}]}',
        good[:-9],
    ]
    run.distill_path.write_text("\n".join(lines))
    report = load_dataset(run, backbone).report
    assert report.read == 2
    assert report.skipped == {
        "same id as an earlier one": 1,
        "no JSON": 1,
        "not an object": 1,
        "token ids outside the model's vocabulary": 1,
        "assistant spans out of order or range": 1,
        "unknown role 'wizard'": 1,
        "cut off": 1,
    }
    run.distill_path.write_text("[" + good + ", " + json.dumps(conversation(2)) + ", " + good[:20])
    report = load_dataset(run, backbone).report
    assert (report.read, report.skipped) == (2, {"cut off": 1})
    for text, part in (("", "is empty"), ("{}", "no usable conversation")):
        run.distill_path.write_text(text)
        with pytest.raises(UserError, match=part):
            load_dataset(run, backbone)
    run.distill_path.unlink()
    with pytest.raises(UserError, match=r"distill.jsonl does not exist; make it with `medusa distill`"):
        load_dataset(run, backbone)


def test_the_split_is_by_record_and_stable(run: Run, backbone: Backbone) -> None:
    dataset = load_dataset(run, backbone, fraction=0.2)
    held, trained = {a.id for a in dataset.held_out}, {a.id for a in dataset.train}
    assert held and trained and not held & trained
    write_lines(run.distill_path, [conversation(n) for n in range(80)])
    more = load_dataset(run, backbone, fraction=0.2)
    assert {a.id for a in more.held_out} & (held | trained) == held
    assert len({dataset.digest, more.digest, load_dataset(run, backbone, fraction=0.3).digest}) == 3
    write_lines(run.distill_path, [conversation(n) for n in range(2)])
    small = load_dataset(run, backbone, fraction=0.001)
    assert len({a.id for a in small.held_out}) == len({a.id for a in small.train}) == 1


def test_rounded_weights_have_states_of_their_own(run: Run) -> None:
    def files(backbone: Backbone) -> set[str]:
        load_dataset(run, backbone)
        return {path.name for path in (run.path / "cache").iterdir()}

    def made(engine: str) -> Backbone:
        backbone = Backbone(tiny_model("llama").bfloat16(), tiny_tokenizer())
        engines.attach(backbone, engine)
        return backbone

    plain = files(made("eager"))
    assert files(made("fast")) == plain
    assert len(files(made("int8"))) == 2 and len(files(made("int4"))) == 3
    quantised = made("eager")
    quantised.model.config.quantization_config = SimpleNamespace(load_in_4bit=True, load_in_8bit=False)
    assert len(files(quantised)) == 4


def test_data_with_nothing_to_learn_is_refused(run: Run, backbone: Backbone) -> None:
    short = [{"id": f"c{n}", "tokens": [5, 6, 7], "spans": [[2, 3]]} for n in range(4)]
    write_lines(run.distill_path, short)
    with pytest.raises(UserError, match="holds no answer of two tokens or more"):
        load_dataset(run, backbone)


def batch_found(positions: int, loss: float, kl: float, correct: int) -> BatchLoss:
    counted = torch.tensor([positions - 1])
    hits = torch.tensor([correct])
    return BatchLoss(torch.tensor(loss), torch.tensor([loss]), hits, counted, counted - 1, positions, {"kl": kl})


def test_means_are_of_positions_and_targets_not_of_batches() -> None:
    small, large = batch_found(5, 1.0, 0.1, 4), batch_found(21, 4.0, 0.5, 0)
    mean = means([sums_of(small), {}, sums_of(large)])  # the process between had no batch
    assert mean["loss"] == pytest.approx((5 * 1 + 21 * 4) / 26) and mean["positions"] == 26
    assert mean["head_losses"] == [pytest.approx((3 * 1 + 19 * 4) / 22)] and mean["accuracies"] == [4 / 24]
    assert mean["parts"] == {"kl": pytest.approx((5 * 0.1 + 21 * 0.5) / 26)}


def answers_of(*lengths: int) -> list[Example]:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        Example(f"a{i}", torch.arange(n), s, torch.zeros(n).long())
        for i, (n, s) in enumerate(zip(lengths, starts, strict=True))
    ]


def test_parts_of_one_conversation_are_held_out_together() -> None:
    whole = [f"A{n:06d}" for n in range(400)]
    held = held_out_ids([f"{name}_{part}" for name in whole for part in range(4)], 0.2)
    names = {id[:7] for id in held}
    assert 40 < len(names) < 120
    assert held == {f"{name}_{part}" for name in names for part in range(4)}
    # Numbered names are no parts: each conversation goes its own way.
    for kind in ("example", "c", "sharegpt", "conversation7"):
        assert 0 < len(held_out_ids([f"{kind}_{n}" for n in range(100)], 0.2)) < 100


def test_of_few_conversations_one_is_held_out_and_never_all() -> None:
    parts = ["A000001_0", "A000001_1", "B000001_0", "B000001_1"]
    for fraction in (1e-9, 0.5, 1.0):
        assert held_out_ids(parts, fraction) in ({"A000001_0", "A000001_1"}, {"B000001_0", "B000001_1"})
    assert held_out_ids(parts, 0.0) == held_out_ids(parts[:2], 1.0) == set()


def test_packing_keeps_answers_whole_where_they_fit() -> None:
    batches = micro_batches(answers_of(5, 6, 4, 23, 2), 10)
    assert [[len(a.tokens) for a in batch] for batch in batches] == [[5], [6, 4], [10], [10], [3, 2]]
    assert [a.first_row for batch in batches[2:] for a in batch] == [15, 25, 35, 38]


def test_the_plan_is_the_same_for_a_seed_and_bounded() -> None:
    answers = answers_of(*[7] * 12)

    def ids(**changes) -> list[list[str]]:
        given = {"limit": 14, "epochs": 2, "seed": 0, "max_positions": None, **changes}
        return [[a.id for a in batch] for batch in schedule(answers, **given)]

    assert ids() == ids() != ids(seed=1)
    assert len(ids()) == 12
    assert sorted(sum(ids()[:6], [])) == sorted(a.id for a in answers)
    assert ids(max_positions=30) == ids()[:3]


def test_frequent_tokens_stand_in_most_answers() -> None:
    answers = [torch.tensor(one) for one in ([7, 3], [9, 9, 9, 9, 7], [3, 7, 5])]
    ids = frequent_tokens(answers, 3, 12)
    assert ids.tolist() == [7, 3, 5]  # 9 stands there most often, in one answer, and 5 has the smaller id
    assert coverage(ids, answers) == pytest.approx(6 / 10) and coverage(torch.arange(64), answers) == 1


def test_the_rate_warms_up_and_falls_to_its_floor() -> None:
    rates = [learning_rate(s, 100, min_ratio=0.1, warmup=8) for s in range(100)]
    assert rates[0] == pytest.approx(1 / 9) and rates[8] == 1.0 == max(rates)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[8:] == sorted(rates[8:], reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cross_entropy_of_blocks_equals_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 16).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(0, 50, (300,))
    plain = F.cross_entropy(F.linear(hidden, weight.to(dtype)).float(), targets)
    (3 * plain).backward()
    wanted = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    loss, hits = linear_loss(hidden, weight, targets)
    (3 * loss).backward()
    near = 1e-5 if dtype == torch.float32 else 2e-2
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=near)
    assert int(hits) == int((F.linear(hidden, weight.to(dtype)).argmax(-1) == targets).sum())
    for ours, theirs in zip((hidden.grad, weight.grad), wanted, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours.float(), theirs.float(), atol=near * float(theirs.float().abs().max()))
    with torch.no_grad():
        assert float(linear_loss(hidden, weight, targets)[0]) == pytest.approx(float(plain.detach()), rel=near)


@pytest.mark.parametrize("vocabulary", ["draft", "own", "shared"])
def test_heads_learn_and_the_backbone_stays(run: Run, backbone: Backbone, vocabulary: str) -> None:
    before = {name: p.clone() for name, p in backbone.model.named_parameters()}
    events = list(trainer(run, backbone, f"drafter.vocabulary={vocabulary}", "train.epochs=12").events())
    steps = [event for event in events if isinstance(event, Stepped)]
    checks = [event for event in events if isinstance(event, Validated)]
    assert steps[-1].loss < 0.7 * steps[0].loss
    assert checks[-1].accuracies[0] > checks[0].accuracies[0]
    assert all(torch.equal(p, before[name]) for name, p in backbone.model.named_parameters())


def test_accumulation_equals_one_large_batch(run: Run, backbone: Backbone) -> None:
    """Two micro-batches of one step give the mean of their gradients; the count of steps follows."""
    one, two = trainer(run, backbone), trainer(run, backbone, "train.accumulation=3")
    assert two.steps == -(-len(one.batches) // 3)
    steps = [event for event in two.events() if isinstance(event, Stepped)]
    assert sum(event.positions for event in steps) == one.positions == steps[-1].total_positions


def test_a_batch_without_any_target_is_passed_over(run: Run, backbone: Backbone) -> None:
    work = trainer(run, backbone, "train.accumulation=2")
    first = work.batches[0][0]
    work.batches[1] = [Example(first.id, first.tokens[:1], first.first_row, first.segments[:1])]
    assert next(iter(work.events())).step == 1


class Crash(Exception):
    pass


def crash_at(events, step: int) -> list:
    seen = []
    with pytest.raises(Crash):
        for event in events:
            seen.append(event)
            if isinstance(event, Stepped) and event.step == step:
                raise Crash
    return seen


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resume_after_a_crash_ends_with_equal_losses_and_weights(run: Run, backbone: Backbone, dtype: str) -> None:
    more = (f"train.dtype={dtype}", "train.accumulation=2")
    whole = trainer(run, backbone, *more)
    expected = [e for e in whole.events() if isinstance(e, Stepped)]
    (run.path / "checkpoint.pt").unlink()
    first = crash_at(trainer(run, backbone, *more).events(), 6)
    second = trainer(run, backbone, *more, resume=True)
    assert second.step == 4  # the last checkpoint; steps 5 and 6 are done again
    rest = [e for e in second.events() if isinstance(e, Stepped)]
    losses = [e.loss for e in first if isinstance(e, Stepped)][:4] + [e.loss for e in rest]
    assert losses == [e.loss for e in expected]
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, second.drafter.state_dict()[name]), name


def test_a_request_to_stop_leaves_a_checkpoint(run: Run, backbone: Backbone) -> None:
    asked: list[int] = []
    stopped = trainer(run, backbone, stop=lambda: len(asked) > 2)
    seen = []
    for event in stopped.events():
        seen.append(event)
        asked.append(1)
    assert isinstance(seen[-1], Stopped) and seen[-1].step == 3
    assert trainer(run, backbone, resume=True).step == 3


def test_resume_refuses_what_changed(run: Run, backbone: Backbone) -> None:
    with pytest.raises(UserError, match="checkpoint.pt does not exist"):
        trainer(run, backbone, resume=True)
    crash_at(trainer(run, backbone).events(), 5)
    with pytest.raises(UsageError, match="train.lr, train.soft changed"):
        trainer(run, backbone, "train.lr=0.5", "train.soft=1", resume=True)
    with pytest.raises(UserError, match="the checkpoint was made for the model"):
        trainer(run, tiny_backbone("llama", seed=5), resume=True)
    trainer(run, backbone, "train.validation_every=1", resume=True)
    write_lines(run.distill_path, [conversation(n) for n in range(9)])
    with pytest.raises(UserError, match="the training data changed"):
        trainer(run, backbone, resume=True)
    (run.path / "checkpoint.pt").write_bytes(b"half a file")
    with pytest.raises(UserError, match="checkpoint.pt is damaged"):
        trainer(run, backbone, resume=True)


def test_a_loss_that_is_no_number_names_the_conversations(run: Run, backbone: Backbone) -> None:
    work = trainer(run, backbone, "train.batch_tokens=20")
    states = work.dataset.states.clone()
    victim = work.batches[2][0]
    states[victim.first_row] = float("nan")
    work.stage.dataset = dataclasses.replace(work.dataset, states=states)
    with pytest.raises(
        UserError, match=rf"the loss is nan at step 3 of .* conversations .*\b{victim.id}\b.*lower train.lr"
    ):
        list(work.events())


def test_the_log_drops_what_a_resume_does_again(tmp_path: Path) -> None:
    log = TrainLog(tmp_path / "train.jsonl")
    for step in range(1, 5):
        log.write(Validated(step, 1.0, [1.0], [0.5], 3, 3 * step, {}))
    log.close()
    with log.path.open("a") as out:
        out.write('{"event": "st')
    assert len(read_log(log.path)) == 4
    TrainLog(log.path, resumed_at=2).close()
    assert [line["step"] for line in read_log(log.path)] == [1, 2]
    TrainLog(log.path).close()
    assert read_log(log.path) == []


@pytest.fixture
def model_folder(tmp_path: Path) -> str:
    backbone = tiny_backbone("llama")
    folder = tmp_path / "model"
    backbone.model.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)
    return str(folder)


def train_words(run: Run, model: str, *more: str) -> list[str]:
    return ["train", *SETTINGS, "--run", str(run.path), "--model", model, "--dtype", "fp32", *more]


def test_the_command_trains_and_says_what_it_used(run: Run, model_folder: str) -> None:
    result = medusa(*train_words(run, model_folder, "drafter.num_heads=3", "--json"))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["heads"] == 3 and len(document["validation"]["accuracies"]) == 3
    assert document["tokens_per_s"] > 0 and document["drafter"] == str(run.drafter_dir)
    first = result.stderr.splitlines()[0]
    assert "Training 3 medusa heads" in first and "train.epochs" in first
    config = json.loads((run.drafter_dir / "config.json").read_text())
    assert config["provenance"]["backbone"]["id"] == model_folder
    assert config["provenance"]["recipe"]["train"]["epochs"] == 3
    assert load_recipe(run.recipe_path).drafter.num_heads == 3
    assert (run.path / "train.png").read_bytes().startswith(b"\x89PNG")
    assert {line["event"] for line in read_log(run.path / "train.jsonl")} == {"stepped", "validated", "saved"}
    assert [path.name for path in run.path.glob(".*")] == [".lock"]  # which every writer takes
    from medusa_cli.engine import load_backbone

    assert load_drafter(run.drafter_dir, load_backbone(model_folder)).num_heads == 3


def test_ctrl_c_leaves_a_checkpoint_and_resume_ends_the_same(
    run: Run, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert medusa(*train_words(run, model_folder, "--quiet")).exit_code == 0
    whole = (run.drafter_dir / "medusa_lm_head.safetensors").read_bytes()
    steps = [line["loss"] for line in read_log(run.path / "train.jsonl") if line["event"] == "stepped"]
    write = TrainLog.write

    def interrupt(self: TrainLog, event) -> None:
        write(self, event)
        if isinstance(event, Stepped) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrainLog, "write", interrupt)
    result = medusa(*train_words(run, model_folder))
    assert result.exit_code == 130 and "--resume" in result.stderr
    monkeypatch.undo()
    result = medusa("train", "--resume", "--run", str(run.path), "--dtype", "fp32", "--quiet")
    assert result.exit_code == 0, result.output
    assert (run.drafter_dir / "medusa_lm_head.safetensors").read_bytes() == whole
    assert [line["loss"] for line in read_log(run.path / "train.jsonl") if line["event"] == "stepped"] == steps


def test_other_data_needs_no_distillation(tmp_path: Path, model_folder: str) -> None:
    data = write_lines(tmp_path / "mine.jsonl", [conversation(n) for n in range(12)])
    run = Run(tmp_path / "fresh")
    result = medusa(*train_words(run, model_folder, "--data", str(data)))
    assert result.exit_code == 0, result.output
    assert "hidden states" in result.stderr and run.drafter_dir.is_dir()


@pytest.mark.parametrize("kind", ["medusa", "hydra", "amphista", "firp"])
def test_a_longer_training_is_made_of_parts(run: Run, model_folder: str, tmp_path: Path, kind: str) -> None:
    words = [f"drafter={kind}", *(["drafter.vocabulary=shared"] if kind == "firp" else [])]
    assert medusa(*train_words(run, model_folder, *words)).exit_code == 0
    second = Run(tmp_path / "second")
    done = medusa(*train_words(second, model_folder, *words, "--from", str(run.path), "train.lr=0"))
    assert done.exit_code == 0 and f"the heads start from {run.drafter_dir}" in done.stderr, done.output
    (first, again) = (next(place.drafter_dir.glob("*.safetensors")).read_bytes() for place in (run, second))
    assert first == again  # a rate of nothing leaves what it was given
    # A run with conversations of its own learns from these.
    own = Run(tmp_path / "own")
    write_lines(own.path / "distill.jsonl", [conversation(n) for n in range(12)])
    done = medusa(*train_words(own, model_folder, *words, "--from", str(run.path)))
    assert done.exit_code == 0 and f"on {own.distill_path}" in done.stderr, done.output
    assert f"the heads start from {run.drafter_dir}" in done.stderr
    other = ["--from", str(run.path), "drafter.num_heads=3"]
    done = medusa(*train_words(second, model_folder, *words, *other))
    assert done.exit_code == 0 and "holds none of this kind and shape" in done.stderr, done.output


@pytest.mark.parametrize(
    "more",
    [
        ["drafter=hydra", "drafter.num_layers=3"],
        ["drafter=hydra", "drafter.prefix_layers=1", "drafter.context=answer"],
        ["drafter=hydra", "drafter.prefix_layers=1", "drafter.context=conversation"],
        ["drafter=medusa", "drafter.num_layers=3"],
        ["drafter=amphista", "drafter.num_layers=2"],
    ],
    ids=" ".join,
)
def test_larger_heads_start_from_smaller_ones(run: Run, model_folder: str, tmp_path: Path, more: list[str]) -> None:
    kind, *_ = more
    assert medusa(*train_words(run, model_folder, kind)).exit_code == 0
    second, backbone = Run(tmp_path / "second"), engines.load_backbone(model_folder, LoadOptions(dtype="fp32"))
    done = medusa(*train_words(second, model_folder, *more, "--from", str(run.path), "train.lr=0"))
    assert done.exit_code == 0 and f"the heads start from {run.drafter_dir}" in done.stderr, done.output
    first, again = (load_drafter(one.drafter_dir, backbone) for one in (run, second))
    assert first.config != again.config
    tree, prompt = Tree.dense([3, 2]), [5, 9, 20, 11]
    ours, theirs = (list(generate(backbone, one, tree, prompt, max_new_tokens=20)) for one in (first, again))
    assert [(s.tokens, s.path) for s in ours] == [(s.tokens, s.path) for s in theirs]
    third, data = Run(tmp_path / "third"), ["--data", str(run.data_path)]
    back = medusa(*train_words(third, model_folder, kind, "--from", str(second.path), *data))
    assert back.exit_code == 0 and "holds none of this kind and shape" in back.stderr, back.output


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["train.lrr=3"], 2, "did you mean 'train.lr'?"),
        (["drafter=medussa"], 2, "did you mean 'medusa'?"),
        (["drafter.num_heads=0"], 2, "drafter.num_heads=0"),
        (
            ["drafter.draft_vocab_size=900", "drafter.vocabulary=draft"],
            2,
            "drafter.draft_vocab_size=900 is larger",
        ),
        (["gone.yaml"], 1, "the recipe gone.yaml does not exist"),
        (["a.yaml", "b.yaml"], 2, "'b.yaml' is a second recipe"),
        (["--data", "gone.jsonl"], 1, "gone.jsonl does not exist"),
        (["--resume"], 1, "checkpoint.pt does not exist"),
        (["--run", "nowhere/at/all"], 1, "--run 'nowhere/at/all'"),
        (["--from", "nowhere/at/all"], 1, "--from 'nowhere/at/all'"),
    ],
)
def test_bad_words_end_in_one_line(run: Run, model_folder: str, words: list[str], code: int, part: str) -> None:
    result = medusa(*train_words(run, model_folder, "--quiet", *words))
    assert result.exit_code == code
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and part in errors[0] and "Traceback" not in result.stderr
    assert not run.drafter_dir.exists()


def test_a_run_of_another_model_is_refused(run: Run, model_folder: str) -> None:
    run.bind(tiny_backbone("qwen3").identity)
    result = medusa(*train_words(run, model_folder, "--quiet"))
    assert result.exit_code == 1 and "was made for the model 'tiny-qwen3'" in result.stderr


def test_a_recipe_without_a_rate_takes_the_drafters_own() -> None:
    plain, named = load_recipe().train, load_recipe(None, ["train.lr=5e-4"]).train
    medusa, firp = (DRAFTERS[name].__new__(DRAFTERS[name]) for name in ("medusa", "firp"))
    assert peak_rates(medusa, plain)[0] == medusa.learning_rate < firp.learning_rate == peak_rates(firp, plain)[0]
    assert peak_rates(medusa, named) == peak_rates(firp, named) == [5e-4, 1.25e-4]
