"""Stage 1: steps, losses, resume, checkpoints, the log, starting heads, and the command."""

import dataclasses
import errno
import json
import os
import signal
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import Result

from medusa_cli import engine as engines
from medusa_cli.data.packing import read_dataset
from medusa_cli.drafters import DRAFTERS, MedusaHeads, load_drafter
from medusa_cli.drafters.io import load_kind
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.recipe import Recipe, TrainRecipe
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.run import Run
from medusa_cli.train import Trainer, loop, setup, train
from medusa_cli.train.checkpoint import best_path, checkpoint_path, earlier_path, load
from medusa_cli.train.log import Stepped, TrainLog, Validated, acceptance_of, read_log
from medusa_cli.train.loggers import LOGGERS, logger_of
from medusa_cli.train.schedules import learning_rate, peak_rates
from medusa_cli.train.setup import build_drafter, joint_backbone, runs_model
from medusa_cli.train.training import Trained
from medusa_cli.tree import Tree
from tests.helpers import (
    attach,
    conversation,
    generate,
    load_dataset,
    medusa,
    medusa_json,
    save_model,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
    write_lines,
)

# A language that a head can learn: each answer counts on from the question's number.
SETTINGS = [
    "drafter.num_heads=2",
    "drafter.draft_vocab_size=40",
    "train.batch_tokens=64",
    "train.max_tokens=null",
]
SETTINGS += ["train.epochs=2", "train.lr=1e-2", "train.dtype=fp32", "train.validation_fraction=0.2"]
SETTINGS += ["train.validation_every=5", "train.checkpoint_every=4"]
KINDS = {
    "medusa": ["drafter=medusa"],
    "bf16": ["drafter=medusa", "train.dtype=bf16", "train.accumulation=2"],
    "hydra": ["drafter=hydra"],
    "hydra++": ["drafter=hydra", "drafter.prefix_layers=1", "drafter.matrices=one"],
    "hydra++ over answers": ["drafter=hydra", "drafter.prefix_layers=1", "drafter.context=answer"],
    "amphista": ["drafter=amphista", "drafter.matrices=one", "train.soft=0.5"],
    "amphista-alpha": ["drafter=amphista", "drafter.attention_layers=2"],
    "eagle": ["drafter=eagle", "train.soft=0.5"],
    "firp": ["drafter=firp", "train.warmup_steps=0"],
    "lora": [
        "train.stage=2",
        "train.schedule=sine",
        "train.backbone_lr=0.02",
        "train.lora_dropout=0.05",
    ],
    "full": ["train.stage=2", "train.schedule=sine", "train.tuning=full", "train.objective=ce"],
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.open(f"{tmp_path}/run", create=True)
    write_lines(run.distill_path, [conversation(n, turns=1 + n % 2) for n in range(24)])
    return run


def trainer(
    run: Run, *words: str, backbone: Backbone | None = None, resume: bool = False
) -> Trainer:
    recipe = load_recipe(None, [*SETTINGS, *words])
    if recipe.train.stage == 2:
        recipe = dataclasses.replace(
            recipe, model=save_model(run.path.with_name("model"), layers=3)
        )
        backbone = joint_backbone(recipe, LoadOptions(device="cpu", dtype="fp32"))
    backbone = backbone or tiny_backbone(layers=3)
    fraction = recipe.train.validation_fraction
    dataset = read_dataset(run.data_path, backbone, fraction)
    torch.manual_seed(0)
    drafter = build_drafter(backbone, recipe.drafter, dataset)
    if not runs_model(drafter, recipe.train):
        dataset = load_dataset(run, backbone, fraction=fraction, taps=drafter.taps)
    return Trainer(backbone, drafter, dataset, recipe, run, resume=resume)


def losses(trainer: Trainer, steps: int | None = None) -> list[float]:
    """Returns the losses of some steps, after which the training is left as if the process was killed, or of all."""
    return list(
        islice((event.loss for event in trainer.events() if isinstance(event, Stepped)), steps)
    )


def words_of(run: Run, model: str, *more: str, dtype: str = "fp32") -> list[str]:
    return ["train", *SETTINGS, "--run", str(run.path), "--model", model, "--dtype", dtype, *more]


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch, *words: Any) -> None:
    """Runs a command whose training is killed after a step."""

    def crash(self: TrainLog, event: Any) -> None:
        if isinstance(event, Stepped) and event.step == step:
            raise RuntimeError("killed")

    with monkeypatch.context() as broken:
        broken.setattr(TrainLog, "write", crash)
        assert medusa(*words, exit_code=None).exit_code != 0


def stop_at(
    step: int, number: int, monkeypatch: pytest.MonkeyPatch, *words: Any, exit_code: int
) -> Result:
    """Runs a command whose training receives a signal after a step."""
    write = TrainLog.write

    def interrupt(self: TrainLog, event: Any) -> None:
        write(self, event)
        if isinstance(event, Stepped) and event.step == step:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(TrainLog, "write", interrupt)
        return medusa(*words, exit_code=exit_code)


def test_rate_warms_up_and_falls_to_its_floor() -> None:
    rates = [learning_rate(step, 100, min_ratio=0.1, warmup=8) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 9)
    assert rates[8] == 1.0 == max(rates)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[8:] == sorted(rates[8:], reverse=True)


def test_default_rate_is_the_drafters_own() -> None:
    plain, named = load_recipe().train, load_recipe(None, ["train.lr=5e-4"]).train
    kinds = [DRAFTERS[name].__new__(DRAFTERS[name]) for name in ("medusa", "firp")]
    assert [peak_rates(kind, plain)[0] for kind in kinds] == [kind.learning_rate for kind in kinds]
    assert all(peak_rates(kind, named) == [5e-4, 1.25e-4] for kind in kinds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["draft", "own", "shared", "draft drafter=firp train.warmup_steps=0"]
)
def test_heads_learn_and_the_backbone_stays(run: Run, words: str) -> None:
    backbone = tiny_backbone(layers=4)
    before = {name: p.clone() for name, p in backbone.model.named_parameters()}
    words = f"drafter.vocabulary={words} train.epochs=16".split()
    events = list(trainer(run, *words, backbone=backbone).events())
    steps = [event for event in events if isinstance(event, Stepped)]
    checks = [event for event in events if isinstance(event, Validated)]
    assert steps[-1].loss < 0.8 * steps[0].loss
    assert checks[-1].loss < checks[0].loss
    assert all(torch.equal(p, before[name]) for name, p in backbone.model.named_parameters())


@pytest.mark.slow
def test_accumulation_makes_fewer_steps_of_the_same_positions(run: Run) -> None:
    small, large = trainer(run), trainer(run, "train.accumulation=3")
    assert large.steps == -(-small.steps // 3)
    steps = [event for event in large.events() if isinstance(event, Stepped)]
    assert sum(event.positions for event in steps) == small.positions == steps[-1].total_positions


def test_steps_that_do_not_fit_in_the_time_are_left_out_and_the_rate_falls(run: Run) -> None:
    whole = trainer(run, "train.warmup_steps=0")
    short = trainer(run, "train.warmup_steps=0")
    assert whole.steps > 6
    # As many seconds as the steps up to the fourth take.
    short.seconds_left = lambda: 1e9 if short.step < 4 else 0.0
    steps = [event for event in short.events() if isinstance(event, Stepped)]
    assert [event.step for event in steps] == [1, 2, 3, 4]
    assert short.step == short.steps == 4
    assert short.progress(4) == 1.0
    assert short.positions == short.positions_done < whole.positions


@pytest.mark.parametrize("slow", [0, 3])
def test_one_slow_step_does_not_shorten_the_training(
    slow: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = trainer(run)
    step, planned = work.train_step, work.steps
    now = 0.0

    def timed() -> Stepped:
        nonlocal now
        now += 100.0 if work.step == slow else 1.0
        return step()

    monkeypatch.setattr(work, "train_step", timed)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now))
    work.seconds_left = lambda: 100.0 + planned - now
    assert [event.step for event in work.events() if isinstance(event, Stepped)] == [
        *range(1, planned + 1)
    ]


@pytest.mark.slow
def test_batch_without_any_target_is_passed_over(run: Run) -> None:
    work = trainer(run, "train.accumulation=2")
    item = work.groups[0][0][0]
    work.groups[0][1] = [
        dataclasses.replace(item, spans=[(start, start + 1) for start, _ in item.spans])
    ]
    assert next(iter(work.events())).step == 1


def test_loss_that_is_no_number_names_the_conversations(run: Run) -> None:
    work = trainer(run, "train.batch_tokens=20")
    states = work.dataset.states.clone()
    [[victim, *_]] = work.groups[2]
    states[victim.state_rows[0] + victim.spans[0][0]] = float("nan")
    work.dataset = dataclasses.replace(work.dataset, states=states)
    with pytest.raises(UserError, match=rf"nan at step 3 of .*\b{victim.id}\b.*train.lr"):
        list(work.events())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_training_resumes_with_equal_losses_and_weights(kind: str, run: Run) -> None:
    whole = trainer(run, *KINDS[kind], "train.epochs=3")
    expected = losses(whole)
    checkpoint_path(run).unlink()
    first = losses(
        trainer(run, *KINDS[kind], "train.epochs=3"), 6 if whole.steps > 6 else whole.steps - 1
    )
    again = trainer(run, *KINDS[kind], "train.epochs=3", resume=True)
    assert again.step == 4  # the last checkpoint; later steps are done again
    assert first[:4] + losses(again) == expected
    assert all(torch.equal(*pair) for pair in zip(whole.parameters, again.parameters, strict=True))


@pytest.mark.quick("0.5-hydra++", "0.5-eagle", "0.5-lora")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("soft", [0.0, 0.5])
def test_losses_in_bf16_are_nearly_those_in_fp32(kind: str, soft: float, run: Run) -> None:
    wide, narrow = (
        losses(trainer(run, *KINDS[kind], f"train.soft={soft}", f"train.dtype={dtype}"), 4)
        for dtype in ("fp32", "bf16")
    )
    assert narrow == pytest.approx(wide, rel=0.1)


def test_resume_refuses_what_changed(run: Run) -> None:
    with pytest.raises(UserError, match="checkpoint.pt does not exist"):
        trainer(run, resume=True)
    losses(trainer(run), 5)
    with pytest.raises(UserError, match="train.lr, train.soft changed"):
        trainer(run, "train.lr=0.5", "train.soft=1", resume=True)
    with pytest.raises(UserError, match="the checkpoint was made for the model"):
        trainer(run, backbone=tiny_backbone(layers=2), resume=True)
    # Validations at other steps could miss the best one.
    with pytest.raises(UserError, match="train.validation_every changed"):
        trainer(run, "train.validation_every=1", resume=True)
    trainer(run, "train.checkpoint_every=1", resume=True)
    write_lines(run.distill_path, [conversation(n) for n in range(9)])
    with pytest.raises(UserError, match="the training data changed"):
        trainer(run, resume=True)
    (run.path / "checkpoint.pt").write_bytes(b"half a file")
    with pytest.raises(UserError, match="checkpoint.pt is damaged"):
        trainer(run, resume=True)


@pytest.mark.quick("draft_ids-9223372036854775808", "step-1000000")
@pytest.mark.parametrize("number", [-5, 10**6, 2**63])
@pytest.mark.parametrize("key", ["draft_ids", "step"])
def test_resume_refuses_ids_beyond_the_vocabulary_and_steps_beyond_the_training(
    run: Run, key: str, number: int
) -> None:
    losses(trainer(run), 5)
    path = run.path / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)
    if key == "step":
        checkpoint["step"] = number
    else:
        checkpoint["tensors"]["draft_ids"][:] = min(number, 2**63 - 1)
    torch.save(checkpoint, path)
    with pytest.raises(UserError, match="checkpoint.pt is damaged"):
        trainer(run, resume=True)


@pytest.mark.slow
def test_resume_refuses_states_of_other_numbers(run: Run) -> None:
    def bf16(engine: str) -> Backbone:
        backbone = Backbone(tiny_model().bfloat16(), tiny_tokenizer(), id="tiny-llama")
        quantize = None if engine == "native" else engine
        attach(backbone, "native", quantize=quantize)
        return backbone

    losses(trainer(run, backbone=bf16("native")), 5)
    assert trainer(run, backbone=bf16("native"), resume=True).step == 4
    with pytest.raises(UserError, match="quantize none"):
        trainer(run, backbone=bf16("int8"), resume=True)
    wide = Backbone(bf16("eager").model.float(), tiny_tokenizer(), id="tiny-llama")
    attach(wide)
    with pytest.raises(UserError, match="dtype bf16"):
        trainer(run, backbone=wide, resume=True)


@pytest.mark.slow
def test_dtype_that_a_refused_resume_names_is_taken(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for word in words_of(run, model, "--quiet") if not word.startswith("train.dtype")]
    # The model in fp32, as its files are, and train.dtype=bf16.
    words = words[: words.index("--dtype")]
    kill_at(6, monkeypatch, *words, "train.dtype=bf16")
    refused = medusa(*words, "--resume", "--dtype", "bf16", exit_code=2)
    assert "give --dtype fp32" in refused.stderr, refused.output
    changed = medusa(*words, str(run.recipe_path), "train.dtype=fp32", "--resume", exit_code=2)
    assert "train.dtype changed" in changed.stderr
    medusa(*words, "--resume", "--dtype", "fp32")
    assert "dtype: bf16" in run.recipe_path.read_text()


@pytest.mark.slow
def test_draft_vocabulary_is_the_givers_after_a_resume_too(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = ["drafter.vocabulary=draft", "drafter.draft_vocab_size=12", "train.checkpoint_every=1"]
    size += ["train.max_tokens=250"]
    other = write_lines(tmp_path / "other.jsonl", [conversation(n) for n in range(25, 45)])

    def ids(run: Run) -> list[int]:
        return load_kind(MedusaHeads, run.drafter_dir, tiny_backbone()).draft_ids.tolist()

    medusa(*words_of(run, model, *size))
    fresh = Run(tmp_path / "fresh")
    medusa(*words_of(fresh, model, *size, "--data", str(other)))
    for stage in ("1", "2"):
        second = Run(tmp_path / stage)
        words = words_of(
            second, model, *size, "--stage", stage, "--from", str(run.path), "--data", str(other)
        )
        kill_at(2, monkeypatch, *words)
        assert load(checkpoint_path(second)).step == 1
        medusa(*words, "--resume")
        assert (
            json.loads((second.drafter_dir / "config.json").read_text())["provenance"][
                "draft_coverage"
            ]
            < 0.9
        )
        assert ids(second) == ids(run) != ids(fresh)


@pytest.mark.slow
def test_coverage_of_the_held_out_answers_is_told(run: Run, model: str, tmp_path: Path) -> None:
    size = ["drafter.vocabulary=draft", "drafter.draft_vocab_size=12", "--json"]
    done = medusa(*words_of(run, model, *size))
    figures = json.loads(done.stdout)
    dataset = read_dataset(run.data_path, tiny_backbone(), 0.2)
    known = {*load_kind(MedusaHeads, run.drafter_dir, tiny_backbone()).draft_ids.tolist()}
    tokens = [
        token
        for item in dataset.held_out
        for start, end in item.spans
        for token in item.tokens[start:end]
    ]
    share = sum(token in known for token in tokens) / len(tokens)
    assert figures["held_out_coverage"] == pytest.approx(share)
    assert 0 < share < 0.9
    assert f"{share:.1%}" in done.stderr
    assert "draft_vocab_size" in done.stderr


def test_start_by_mistake_costs_neither_checkpoint_nor_log_nor_recipe(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    medusa(*words_of(run, model))
    names = ("checkpoint.pt", "train.jsonl", "recipe.yaml")
    before = {name: (run.path / name).read_bytes() for name in names}
    for seed in (1, 2):  # both fail before their first checkpoint
        kill_at(1, monkeypatch, *words_of(run, model, f"train.seed={seed}"))
        refused = medusa(*words_of(run, model, f"train.seed={seed}", "--resume"), exit_code=1)
        assert "checkpoint.earlier.pt" in refused.stderr
    for name in names:
        assert earlier_path(run.path / name).read_bytes() == before[name]
        earlier_path(run.path / name).replace(run.path / name)
    medusa(*words_of(run, model, "--resume"))
    before = {name: (run.path / name).read_bytes() for name in names}
    for seed in (1, 2):
        words = words_of(run, model, f"train.seed={seed}")
        stop_at(1, signal.SIGINT, monkeypatch, *words, exit_code=130)
    for name in names:
        assert earlier_path(run.path / name).read_bytes() == before[name]
    kill_at(6, monkeypatch, *words_of(run, model))  # after a regular checkpoint
    assert not list(run.path.glob("*.earlier.*"))
    medusa(*words_of(run, model, "train.checkpoint_every=100"))
    assert not list(run.path.glob("*.earlier.*"))


@pytest.mark.quick("fault1")
@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"),
    ],
)
def test_full_disk_keeps_the_last_good_checkpoint(
    run: Run, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses(trainer(run, "train.epochs=3"))
    checkpoint_path(run).unlink()
    save, saved = torch.save, []

    def full(obj: object, path: Path) -> None:
        saved.append(path)
        if len(saved) == 1:
            save(obj, path)
            return
        Path(path).write_bytes(b"half of a checkp")  # written before the disk was full
        raise fault

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(Exception, match="No space left|could not be written"):
        list(trainer(run, "train.epochs=3").events())
    monkeypatch.setattr(torch, "save", save)
    assert len(saved) == 2
    assert load(checkpoint_path(run)).step == 4
    names = sorted(path.name for path in run.path.iterdir() if "checkpoint" in path.name)
    assert names == ["checkpoint.pt", "checkpoint_best.pt"]
    assert losses(trainer(run, "train.epochs=3", resume=True)) == expected[4:]


def test_log_drops_the_steps_that_a_resume_does_again(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_library_call_trains_and_shows_its_progress(run: Run, model: str) -> None:
    recipe, shown = load_recipe(None, [*SETTINGS, f"model={model}"]), []
    trained = train(
        run,
        recipe,
        options=LoadOptions(dtype="fp32"),
        show=lambda *progress, **_: shown.append(progress),
    )
    assert trained is not None
    assert trained.run is run
    assert not trained.stopped
    assert trained.figures["steps"] > 2
    figures = trained.figures
    assert [name for name, *_ in shown].count("training") == figures["steps"] + 1
    assert shown[-1] == ("training", figures["positions"], figures["positions"])
    first, two = figures["validation"]["accuracies"]
    assert figures["expected_acceptance"] == pytest.approx(1 + first + first * two)
    assert load_drafter(run.drafter_dir, engines.load_backbone(model)).num_heads == 2


@pytest.mark.slow
@pytest.mark.drawn
def test_command_trains_and_prints_its_results(run: Run, model: str) -> None:
    result = medusa(*words_of(run, model, "drafter.num_heads=3", "--json"))
    document = json.loads(result.stdout)
    assert document["heads"] == 3
    assert len(document["validation"]["accuracies"]) == 3
    assert document["tokens_per_s"] > 0
    assert document["drafter"] == str(run.drafter_dir)
    assert "3 medusa heads" in result.stderr.splitlines()[0]
    config = json.loads((run.drafter_dir / "config.json").read_text())
    assert config["provenance"]["backbone"]["id"] == model
    assert config["provenance"]["recipe"]["train"]["epochs"] == 2
    assert load_recipe(run.recipe_path).drafter.num_heads == 3
    assert (run.path / "train.png").read_bytes().startswith(b"\x89PNG")
    lines = read_log(run.path / "train.jsonl")
    assert {line["event"] for line in lines} == {"stepped", "validated", "saved"}
    # Torch alone takes more.
    assert all(line["memory"] > 50_000_000 for line in lines if line["event"] == "stepped")
    assert [path.name for path in run.path.glob(".*")] == [".lock"]


@pytest.mark.slow
def test_a_drafter_kept_in_8_bits_is_smaller_and_decodes(run: Run, model: str) -> None:
    sizes = []
    for kind in ("bf16", "int8"):
        medusa(*words_of(run, model, f"train.save_dtype={kind}", "drafter=hydra"))
        sizes.append((run.drafter_dir / "drafter.safetensors").stat().st_size)
    assert sizes[1] < 0.7 * sizes[0]
    words = ["--run", run.path, "--tree", "static:4", "--prompt", "w1 w2", "--max-new-tokens", "8"]
    medusa("calibrate", "--run", run.path, "--dtype", "fp32")
    drafted = json.loads(medusa("chat", *words, "--dtype", "fp32", "--json").stdout)
    plain = json.loads(
        medusa("chat", *words[:2], *words[4:], "--dtype", "fp32", "--baseline", "--json").stdout
    )
    assert drafted["answer"] == plain["answer"]


@pytest.mark.quick("2-130")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_training_leaves_a_checkpoint_and_resume_ends_the_same(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    medusa(*words_of(run, model, "--quiet"))
    whole = (run.drafter_dir / "medusa_lm_head.safetensors").read_bytes()
    steps = [
        line["loss"] for line in read_log(run.path / "train.jsonl") if line["event"] == "stepped"
    ]
    result = stop_at(2, number, monkeypatch, *words_of(run, model), exit_code=code)
    assert "--resume" in result.stderr
    medusa("train", "--resume", "--run", str(run.path), "--dtype", "fp32", "--quiet")
    assert (run.drafter_dir / "medusa_lm_head.safetensors").read_bytes() == whole
    assert [
        line["loss"] for line in read_log(run.path / "train.jsonl") if line["event"] == "stepped"
    ] == steps


def test_stop_that_another_process_received_exits_as_sigterm_does(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Trained(run, {}, stopped=True)
    monkeypatch.setattr("medusa_cli.train.train", lambda *_, **__: stopped)
    assert "--resume" in medusa(*words_of(run, model), exit_code=143).stderr


@pytest.mark.quick("words0")
@pytest.mark.parametrize(
    "words",
    [
        ["--stage", "2", "--quantize", "int8"],
        ["--stage", "2", "--engine", "native"],
        ["--stage", "2", "--activations", "int8"],
        ["drafter=firp", "--quantize", "int8"],
        ["train.states=fresh", "--quantize", "int4"],
    ],
)
def test_load_options_without_effect_are_refused_by_name(
    run: Run, model: str, words: list[str]
) -> None:
    refused = medusa(*words_of(run, model, *words), exit_code=2)
    given = {
        word
        for word in refused.stderr.split()
        if word in ("--quantize", "--engine", "--activations")
    }
    assert given == {words[-2]}


@pytest.mark.slow
def test_training_starts_from_another_runs_heads(run: Run, model: str, tmp_path: Path) -> None:
    words = ["train.max_tokens=200"]
    medusa(*words_of(run, model, *words))

    def started(name: str, *more: str) -> Result:
        return medusa(
            *words_of(Run(tmp_path / name), model, *words, "--from", str(run.path), *more)
        )

    assert f"the heads start from {run.drafter_dir}" in started("second", "train.lr=0").stderr
    first, second = (
        next((tmp_path / name / "drafter").glob("*.safetensors")) for name in ("run", "second")
    )
    assert first.read_bytes() == second.read_bytes()  # a rate of nothing changes nothing
    own = write_lines(tmp_path / "own" / "distill.jsonl", [conversation(n) for n in range(12)])
    assert f"on {own}" in started("own").stderr  # its own data before the other run's
    assert "holds none of this kind and shape" in started("third", "drafter.num_heads=3").stderr


def test_a_fine_tune_takes_the_drafter_of_its_model_and_trains_it_further(
    run: Run, model: str, tmp_path: Path
) -> None:
    medusa(*words_of(run, model, "drafter=hydra", "drafter.matrices=none", "train.max_tokens=200"))
    tuned = save_model(tmp_path / "tuned", seed=1)
    words = ["chat", "--model", tuned, "--prompt", "w1 w2", "--max-new-tokens", "8", "--json"]
    drafts = medusa(*words, "--drafter", str(run.drafter_dir), "--tree", "dynamic:4")
    plain = medusa(*words, "--baseline")
    assert "other weights" in drafts.stderr
    assert json.loads(drafts.stdout)["answer"] == json.loads(plain.stdout)["answer"]

    mine = Run.open(f"{tmp_path}/mine", create=True)
    write_lines(mine.distill_path, [conversation(40 + n) for n in range(12)])
    # The origin's recipe gives the drafter's shape, and the model is the fine-tune.
    keys = [word for word in SETTINGS if not word.startswith("drafter")]
    command = ["train", *keys, "train.lr=0", "--run", str(mine.path), "--model", tuned]
    trained = medusa(*command, "--from", str(run.path), "--dtype", "fp32")
    assert f"the heads start from {run.drafter_dir}" in trained.stderr
    old, new = (load_file(one.drafter_dir / "drafter.safetensors") for one in (run, mine))
    # The new texts' tokens can be drafted, and nothing else has changed.
    texts = read_dataset(mine.data_path, tiny_backbone(), 0.2).texts()
    assert {*torch.cat(texts).tolist()} <= {*new.pop("draft_ids").tolist()}
    assert not {*torch.cat(texts).tolist()} <= {*old.pop("draft_ids").tolist()}
    assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["drafter=hydra", "drafter.num_layers=3"],
        ["drafter=hydra", "drafter.prefix_layers=1", "drafter.context=answer"],
        ["drafter=medusa", "drafter.num_layers=3"],
        ["drafter=amphista", "drafter.num_layers=2"],
    ],
    ids=" ".join,
)
def test_larger_heads_start_from_smaller_ones(
    run: Run, model: str, tmp_path: Path, more: list[str]
) -> None:
    kind, *_ = more
    short = ["train.max_tokens=200"]
    medusa(*words_of(run, model, kind, *short))
    second, backbone = (
        Run(tmp_path / "second"),
        engines.load_backbone(model, LoadOptions(dtype="fp32")),
    )
    medusa(*words_of(second, model, *more, *short, "--from", str(run.path), "train.lr=0"))
    small, large = (load_drafter(each.drafter_dir, backbone) for each in (run, second))
    assert small.config != large.config
    tree, prompt = Tree.dense([3, 2]), [5, 9, 20, 11]
    ours, theirs = (
        list(generate(backbone, heads, tree, prompt, max_new_tokens=20)) for heads in (small, large)
    )
    assert [(step.tokens, step.path) for step in ours] == [
        (step.tokens, step.path) for step in theirs
    ]


def test_draft_vocabulary_larger_than_the_models_is_refused(run: Run, model: str) -> None:
    words = ["--quiet", "drafter.draft_vocab_size=900", "drafter.vocabulary=draft"]
    assert (
        "drafter.draft_vocab_size=900" in medusa(*words_of(run, model, *words), exit_code=2).stderr
    )
    assert not run.drafter_dir.exists()


def test_run_of_another_model_is_refused(run: Run, model: str) -> None:
    run.bind(tiny_backbone("qwen3").identity)
    result = medusa(*words_of(run, model, "--quiet"), exit_code=1)
    assert "tiny-qwen3" in result.stderr


# The best validation.


def falling(best: int) -> Any:
    """Returns a stand-in for `Trainer.validate` whose simulated acceptance is highest after a step."""
    real = Trainer.validate

    def validate(self: Trainer) -> Validated:
        share = 0.9 if self.step == best else 0.5
        return dataclasses.replace(
            real(self), accuracies=[share, 0.5], loss=float(self.step == best)
        )

    return validate


def test_simulated_acceptance_is_the_sum_of_products() -> None:
    assert acceptance_of([0.5, 0.4, 0.1]) == pytest.approx(1 + 0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.1)
    assert acceptance_of([0.5, None, 0.1]) == 1.5


def shorten(run: Run) -> None:
    """Gives all answers of a run one token before their end token: only the first head has a target."""
    records = [conversation(n, length=1) for n in range(24)]
    write_lines(run.distill_path, records)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_heads_without_a_position_have_no_loss_and_no_accuracy(kind: str, run: Run) -> None:
    shorten(run)
    work = trainer(run, *KINDS[kind], "drafter.num_heads=3")
    events = [event for event in work.events() if isinstance(event, Stepped | Validated)]
    assert {type(event) for event in events} == {Stepped, Validated}
    for event in events:
        for values in (event.head_losses, event.accuracies):
            assert values[0] is not None
            assert values[1:] == [None, None]


def test_heads_without_a_position_are_told(run: Run, model: str) -> None:
    shorten(run)
    words = words_of(run, model, "drafter.num_heads=3")
    result = medusa(*words)
    for data in ("training", "held-out"):
        assert f"heads 2 to 3 have no position in the {data} data" in " ".join(
            result.stderr.split()
        )
    lines = [line for line in read_log(run.path / "train.jsonl") if line["event"] != "saved"]
    assert lines
    assert all(line["accuracies"][1:] == [None, None] for line in lines)
    checked = medusa("doctor", "--run", f"{run.path}/", "--model", model, "--quick", exit_code=None)
    assert "Traceback" not in checked.stderr
    assert checked.exit_code in (0, 1)
    (row,) = medusa_json("compare", f"{run.path}/")
    assert row["accuracies"][1:] == [None, None]
    assert medusa("compare", f"{run.path}/").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [[], ["--stage", "2", "train.schedule=sine"]], ids=["heads", "lora"]
)
def test_the_drafter_is_the_best_validations_not_the_last_steps(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(Trainer, "validate", falling(5))
    kept: dict[int, dict[str, torch.Tensor]] = {}
    step = Trainer.train_step

    def noted(self: Trainer) -> Stepped:
        event = step(self)
        kept[event.step] = {
            name: weight.detach().clone() for name, weight in self.drafter.named_parameters()
        }
        return event

    monkeypatch.setattr(Trainer, "train_step", noted)
    result = json.loads(medusa(*words_of(run, model, *words, "--json")).stdout)
    assert result["best_step"] == 5 < result["steps"]
    assert result["expected_acceptance"] == pytest.approx(1 + 0.9 + 0.45)
    assert result["validation"]["loss"] == 1
    drafter = load_kind(MedusaHeads, run.drafter_dir, tiny_backbone())
    saved = {name: weight.bfloat16() for name, weight in drafter.named_parameters()}
    assert all(torch.equal(weight, kept[5][name].bfloat16()) for name, weight in saved.items())
    assert any(
        not torch.equal(weight, kept[max(kept)][name].bfloat16()) for name, weight in saved.items()
    )
    lines = [line for line in read_log(run.path / "train.jsonl") if line["event"] == "validated"]
    assert all(
        line["acceptance"] == pytest.approx(acceptance_of(line["accuracies"])) for line in lines
    )


@pytest.mark.slow
def test_a_resumed_training_keeps_the_best_so_far(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "validate", falling(5))
    losses(trainer(run), 9)  # the checkpoint is of step 8
    again = trainer(run, resume=True)
    assert again.step == 8
    assert again.best is not None
    assert again.best[0] == 5
    losses(again)
    assert again.best[0] == 5
    again.take_best()
    best = torch.load(best_path(run))["tensors"]
    assert all(torch.equal(weight, best[name]) for name, weight in again.drafter.named_parameters())


@pytest.mark.quick("content1")
@pytest.mark.parametrize(
    "content", [b"half a file", {"step": 5, "acceptance": 9.0, "tensors": {}}, {"step": "x"}]
)
def test_a_damaged_best_checkpoint_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    monkeypatch.setattr(Trainer, "validate", falling(5))
    losses(trainer(run), 9)
    if isinstance(content, bytes):
        best_path(run).write_bytes(content)
    else:
        torch.save(content, best_path(run))
    with pytest.raises(UserError, match="checkpoint_best.pt is damaged"):
        again = trainer(run, resume=True)
        losses(again)
        again.take_best()


@pytest.mark.slow
def test_a_new_training_does_not_take_an_earlier_ones_best(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Trainer, "validate", falling(5))
        kill_at(7, monkeypatch, *words_of(run, model, "train.checkpoint_every=100"))
    assert best_path(run).is_file()
    assert not checkpoint_path(run).is_file()
    kill_at(3, monkeypatch, *words_of(run, model, "train.checkpoint_every=100"))
    assert not best_path(run).is_file()


# Loggers and the dry run.


class Events:
    """A stand-in for a logger's package: it notes what it is given."""

    def __init__(self) -> None:
        self.notes: list[tuple[dict[str, float], int]] = []
        self.ended = False

    id = "a1"

    def init(self, **facts: Any) -> "Events":
        self.facts = facts
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.notes.append((metrics, step))

    def finish(self) -> None:
        self.ended = True

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *reason: Any) -> None:
        self.finish()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_logger_sees_every_step_and_validation(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    package = Events()
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr("medusa_cli.files.extras.has_package", lambda package: True)
    medusa(*words_of(run, model, "--logger", name))
    lines = [line for line in read_log(run.path / "train.jsonl") if line["event"] != "saved"]
    assert [step for _, step in package.notes] == [line["step"] for line in lines]
    assert package.ended
    for (metrics, _), line in zip(package.notes, lines, strict=True):
        group = "train" if line["event"] == "stepped" else "held_out"
        assert metrics[f"{group}/loss"] == line["loss"]
        assert metrics[f"{group}/accuracy_2"] == line["accuracies"][1]
        assert metrics.get("held_out/acceptance") == line.get("acceptance")


def test_a_resumed_training_goes_on_in_its_loggers_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Events()
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, package)
    recipe = load_recipe()
    with logger_of("wandb", run, recipe):
        assert package.facts["id"] is None
    package.id = "b2"
    with logger_of("wandb", run, recipe):  # a new training is a new run
        assert package.facts["id"] is None
    with logger_of("wandb", run, recipe, resumed_at=3):
        assert package.facts["id"] == "b2"
        assert package.facts["resume"]
    for resumed_at, resume in ((None, "never"), (3, "allow")):
        with logger_of("trackio", run, recipe, resumed_at):
            assert package.facts["resume"] == resume


def test_tensorboard_gets_scalars_and_hides_those_that_a_resume_repeats(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scalars: list[tuple[str, float, int]] = []
    firsts: list[int | None] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            firsts.append(purge_step)
            self.flush = lambda: None
            self.add_text = lambda name, text: None
            self.add_scalar = lambda *scalar: scalars.append(scalar)

        def __enter__(self) -> "Writer":
            return self

        def __exit__(self, *reason: Any) -> None:
            pass

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer)
    )
    with logger_of("tensorboard", run, load_recipe()) as on_event:
        on_event(Validated(3, 0.5, [0.1], [0.25], 9, 9, {}))
    assert ("held_out/acceptance", 1.25, 3) in scalars

    monkeypatch.setattr("medusa_cli.files.extras.has_package", lambda package: True)
    kill_at(6, monkeypatch, *words_of(run, model, "--logger", "tensorboard"))
    scalars.clear()
    medusa(*words_of(run, model, "--logger", "tensorboard", "--resume"))
    assert firsts == [None, None, 5]
    assert min(step for *_, step in scalars) == 5


@pytest.mark.slow
def test_a_missing_logger_is_one_line_that_names_its_extra(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_cli.commands.train import LOGGERS as names

    assert set(names) == set(LOGGERS)
    monkeypatch.setattr("medusa_cli.files.extras.has_package", lambda package: package not in names)
    for name in names:
        assert (
            medusa(*words_of(run, model, "--logger", name), exit_code=1)
            .stderr.strip()
            .endswith(f"[{name}]'")
        )
    medusa(*words_of(run, model, "--logger", "other"), exit_code=2)


@pytest.mark.slow
def test_a_narrow_eagle_keeps_its_width_when_trained_on(
    run: Run, model: str, tmp_path: Path
) -> None:
    first = medusa(*words_of(run, model, "drafter=eagle", "drafter.intermediate_size=24"))
    assert " on cpu, " in first.stderr
    other = Run(tmp_path / "other")
    more = ["--from", run.path, "--dtype", "fp32", "train.epochs=1"]
    medusa("train", "--run", other.path, "--model", model, *more)
    widths = [
        json.loads((one.drafter_dir / "config.json").read_text())["intermediate_size"]
        for one in (run, other)
    ]
    assert widths == [24, 24]


@pytest.mark.quick("medusa")
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["drafter=eagle"],
        ["drafter=firp", "drafter.layers=[1,1]"],
        ["train.states=fresh"],
        ["--stage", "2"],
    ],
    ids=["medusa", "eagle", "firp", "fresh", "lora"],
)
def test_a_dry_run_counts_what_training_takes_and_writes_nothing(
    run: Run, model: str, words: list[str]
) -> None:
    before = sorted(run.path.rglob("*"))
    facts = json.loads(medusa(*words_of(run, model, *words, "--dry-run", "--json")).stdout)
    assert sorted(run.path.rglob("*")) == before
    result = json.loads(medusa(*words_of(run, model, *words, "--json")).stdout)
    assert (facts["steps"], facts["positions"]) == (result["steps"], result["positions"])
    assert facts["positions"] == 2 * facts["answer_tokens"]  # of two epochs
    assert facts["memory_bytes"] > 0
    assert facts["seconds"]["training"] > 0
    again = json.loads(medusa(*words_of(run, model, *words, "--dry-run", "--json")).stdout)
    assert again["tokens_to_run"] == 0
    assert (facts["tokens_to_run"] > 0) == (facts["disk_bytes"] > 0)
    text = medusa(*words_of(run, model, *words, "--dry-run")).stdout
    assert f"{facts['answer_tokens']:,}" in text


def test_a_dry_run_leaves_no_folder_and_begins_nothing(
    run: Run, model: str, tmp_path: Path
) -> None:
    words = words_of(run, model, "--dry-run")
    words[words.index("--run") + 1] = str(tmp_path / "new")
    medusa(*words, "--data", run.distill_path)
    assert not (tmp_path / "new").exists()
    medusa(*words, "--resume", exit_code=None)


@pytest.mark.parametrize(("has", "dtype"), [(True, "bf16"), (False, "fp32")])
def test_training_computes_in_the_type_that_the_cpu_has(
    has: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "has_bf16", lambda: has)
    cpu = LoadOptions(device="cpu")
    assert setup.with_dtype(Recipe(), cpu).train.dtype == dtype
    given = replace(Recipe(), train=TrainRecipe(dtype="bf16"))
    assert setup.with_dtype(given, cpu) == given
