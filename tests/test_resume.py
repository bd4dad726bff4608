"""Going on with a training: its own draft vocabulary, its own random states, and no other training's checkpoint."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.data.states import StateStore
from medusa_cli.drafters import MedusaHeads
from medusa_cli.drafters.io import load_kind
from medusa_cli.engine import attach
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import encode
from medusa_cli.runs.run import Run
from medusa_cli.train import Stepped
from medusa_cli.train.checkpoint import checkpoint_path, earlier_path, load
from medusa_cli.train.log import TrainLog
from tests.helpers import (
    END_ID,
    conversation,
    medusa,
    save_model,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
    write_lines,
)
from tests.test_training import Crash, crash_at, trainer


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run.open(f"{tmp_path}/run", create=True)
    write_lines(found.distill_path, [conversation(n) for n in range(20)])
    return found


def draft(run: Run, model: str, *words: str, dtype: str = "fp32") -> Any:
    settings = ["drafter.vocabulary=draft", "drafter.draft_vocab_size=12", "drafter.num_heads=2", "train.epochs=1"]
    settings += ["train.batch_tokens=64", "train.checkpoint_every=1", "train.lr=1e-2"]
    place = ["--run", str(run.path), "--model", model, "--dtype", dtype, "--quiet"]
    return medusa("train", *settings, *place, *words)


@pytest.mark.parametrize("stage", ["1", "2"])
def test_the_draft_vocabulary_is_the_givers_after_a_resume_too(
    run: Run, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model")
    assert draft(run, model).exit_code == 0
    given = load_kind(MedusaHeads, run.drafter_dir, tiny_backbone()).draft_ids.tolist()
    other = write_lines(tmp_path / "other.jsonl", [conversation(n) for n in range(25, 45)])
    words = ["--stage", stage, "--from", str(run.path), "--data", str(other)]
    second = Run(tmp_path / "second")
    with monkeypatch.context() as broken:

        def crash(self: TrainLog, event: Any) -> None:
            if isinstance(event, Stepped) and event.step == 2:
                raise Crash

        broken.setattr(TrainLog, "write", crash)
        assert draft(second, model, *words).exit_code != 0
    assert load(checkpoint_path(second)).step == 1
    done = draft(second, model, *words, "--resume")
    assert done.exit_code == 0, done.output
    answers = [conversation(n)["messages"][1]["content"] for n in range(25, 45)]
    said = json.loads((second.drafter_dir / "config.json").read_text())["provenance"]["draft_coverage"]
    learnt = [token for one in answers for token in [*tiny_tokenizer().encode(one), END_ID]]
    assert said == pytest.approx(sum(one in given for one in learnt) / len(learnt), abs=0.05)
    assert load_kind(MedusaHeads, second.drafter_dir, tiny_backbone()).draft_ids.tolist() == given
    fresh = draft(Run(tmp_path / "fresh"), model, "--data", str(other))
    assert fresh.exit_code == 0
    assert load_kind(MedusaHeads, tmp_path / "fresh" / "drafter", tiny_backbone()).draft_ids.tolist() != given


def test_states_made_in_other_numbers_are_not_gone_on_with(run: Run) -> None:
    def made(engine: str) -> Backbone:
        backbone = Backbone(tiny_model().bfloat16(), tiny_tokenizer(), id="tiny-llama")
        attach(backbone, engine)
        return backbone

    crash_at(trainer(run, made("eager")).events(), 5)
    assert trainer(run, made("fast"), resume=True).step == 4
    with pytest.raises(UsageError, match="quantize"):
        trainer(run, made("int8"), resume=True)
    wide = Backbone(made("eager").model.float(), tiny_tokenizer(), id="tiny-llama")
    attach(wide)
    with pytest.raises(UsageError, match="dtype"):
        trainer(run, wide, resume=True)


def stopped(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training with the backbone in the fp32 of its files and train.dtype=bf16, killed after its first checkpoint."""

    def crash(self: TrainLog, event: Any) -> None:
        if isinstance(event, Stepped) and event.step == 2:
            raise Crash

    with monkeypatch.context() as broken:
        broken.setattr(TrainLog, "write", crash)
        assert draft(run, model, dtype="auto").exit_code != 0
    found = load(checkpoint_path(run))
    assert (found.step, found.recipe["train"]["dtype"]) == (1, "bf16")


def test_the_number_type_that_a_refused_resume_names_is_taken(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model")
    stopped(run, model, monkeypatch)
    refused = draft(run, model, "--resume", dtype="bf16")
    assert refused.exit_code == 2 and "give --dtype fp32" in refused.stderr, refused.output
    changed = draft(run, model, str(run.recipe_path), "train.dtype=fp32", "--resume")
    assert changed.exit_code == 2 and "train.dtype changed since the checkpoint" in changed.stderr
    done = draft(run, model, "--resume", dtype="fp32")
    assert done.exit_code == 0, done.output
    assert "dtype: bf16" in run.recipe_path.read_text()


def test_states_kept_by_distilling_are_gone_on_with_by_a_backbone_of_any_type(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, row, lines = save_model(tmp_path / "model"), 0, []
    for number in range(20):
        tokens, spans = encode(tiny_backbone(), conversation(number)["messages"])
        rows = len(tokens) - 1
        lines.append({"id": f"c{number}", "tokens": tokens, "spans": spans, "state_rows": [row, rows]})
        row += rows
    write_lines(run.distill_path, lines)
    with closing(StateStore(run.states_path, tiny_backbone().hidden_size)) as store:
        store.append(torch.randn(row, store.width))
    stopped(run, model, monkeypatch)
    done = draft(run, model, "--resume", dtype="bf16")
    assert done.exit_code == 0, done.output
    assert not (run.path / "cache").exists()


def test_a_start_by_mistake_costs_neither_the_log_nor_the_recipe(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model")
    assert draft(run, model).exit_code == 0
    names = ("checkpoint.pt", "train.jsonl", "recipe.yaml")
    before = {name: (run.path / name).read_bytes() for name in names}
    with monkeypatch.context() as broken:
        broken.setattr(TrainLog, "write", lambda log, event: 1 / 0)
        for words in (["train.seed=1"], ["train.seed=2"]):
            assert draft(run, model, *words).exit_code != 0
    for name in names:
        assert earlier_path(run.path / name).read_bytes() == before[name]
        earlier_path(run.path / name).replace(run.path / name)
    assert draft(run, model, "--resume").exit_code == 0
    assert draft(run, model).exit_code == 0
    assert not list(run.path.glob("*.earlier.*"))


def test_a_validation_alone_leaves_the_checkpoint(run: Run) -> None:
    list(trainer(run, tiny_backbone()).events())
    trainer(run, tiny_backbone()).validate(0)
    assert checkpoint_path(run).is_file()
