"""Calibration: shares counted within each answer, on held-out conversations, and the command's files."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_cli.data.packing import Dataset
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.io import ReadReport
from medusa_cli.model import Backbone
from medusa_cli.runs.run import Run
from medusa_cli.train.calibration import MISSED, accuracies_at_roots, measure
from tests.helpers import (
    answers_of,
    conversation,
    medusa,
    medusa_json,
    save_model,
    tiny_backbone,
    write_lines,
)


class Oracle(torch.nn.Module):
    """Stub whose i-th guess of head k is the right token plus i, plus offsets[k]."""

    sees_prompt = False

    def __init__(self, *offsets: int) -> None:
        super().__init__()
        self.offsets, self.num_heads = offsets, len(offsets)
        self.draft_ids = torch.arange(64)

    def vocabulary_index(self, device: torch.device) -> Tensor:
        return torch.arange(64)

    def logits(self, backbone: Backbone, batch) -> Iterator[Tensor]:
        for k, offset in enumerate(self.offsets, 1):
            first = batch.next.roll(-k) - offset
            # Scores fall by one from guess to guess, round the whole vocabulary.
            yield -((self.draft_ids - first[:, None]) % 64).float()


def measured(
    drafter: Any, *answers: list[int] | Tensor, states: Tensor | None = None, top: int = 1
) -> Any:
    """Returns the calibration of a stub on answers, whose rows follow one another."""
    states = torch.zeros(sum(map(len, answers)), 32).bfloat16() if states is None else states
    return measure(
        tiny_backbone(), drafter, Dataset([], answers_of(*answers), ReadReport(), "", states), top
    )


def test_right_ranks_are_counted_within_each_answer_alone() -> None:
    result = measured(Oracle(0, 2), [5, 6, 7, 8, 9], [30, 31, 32], top=3)
    assert result["accuracies"] == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert result["counted"] == [4 + 2, 3 + 1]
    assert (result["positions"], result["answers"]) == (8, 2)


class Unlucky(Oracle):
    """Stub of one head that fails at every third position of a text."""

    def logits(self, backbone: Backbone, batch) -> Iterator[Tensor]:
        (scores,) = super().logits(backbone, batch)
        yield torch.where(
            torch.arange(len(scores))[:, None] % 3 == 0, scores.roll(1, dims=1), scores
        )


def test_accuracies_are_those_where_steps_begin() -> None:
    result = measured(Unlucky(0), torch.randint(0, 64, (3001,)))
    # Steps begin at 0 and 1, 3 and 4, ...: two accept three tokens, bonus tokens included.
    assert result["accuracies"][0][0] == pytest.approx(0.5, abs=0.01)
    assert (result["roots"], result["counted"]) == (2001, [3000])


def test_heads_that_few_steps_reach_lean_on_all_positions() -> None:
    asked_never, _ = accuracies_at_roots(torch.tensor([[MISSED, 0], [MISSED, 1]] * 30), 2)
    assert asked_never[1] == pytest.approx([0.5, 0.5])
    # Asked once and wrong: the head's share among all positions tells more.
    ranks = torch.tensor([[MISSED, 0]] * 40 + [[0, 1]] + [[MISSED, 0]] * 40)
    [_, second], _ = accuracies_at_roots(ranks, 2)
    assert 0.9 < second[0] < 80 / 81


class Unsure(Oracle):
    """Stub that is too sure by a factor: the tokens are drawn from its scores' softmax at another temperature."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__(0)
        self.scores = scores

    def logits(self, backbone: Backbone, batch) -> Iterator[Tensor]:
        yield self.scores[batch.hidden[:, 0].float().long()]


@pytest.mark.slow
@pytest.mark.parametrize("heat", [0.7, 1.0, 1.6])
def test_fitted_temperature_is_that_of_the_draws(heat: float) -> None:
    torch.manual_seed(0)
    count, draws = 255, 16
    scores = 2 * torch.randn(count, 64)
    # [count, draws]
    tokens = torch.multinomial((scores / heat).softmax(-1), draws, replacement=True)
    # Answers of two tokens: head 1 guesses the second from the first's state, which names its row of scores.
    answers = tokens.flatten()[:, None].expand(-1, 2)
    states = torch.arange(count).repeat_interleave(2 * draws)[:, None].expand(-1, 32).bfloat16()
    assert measured(Unsure(scores), *answers, states=states)["temperatures"][0] == pytest.approx(
        heat, abs=0.101
    )


def test_impossible_measurements_are_refused() -> None:
    for top in (0, 65):
        with pytest.raises(UsageError, match=f"top {top}"):
            measured(Oracle(0, 0), [1, 2, 3], top=top)
    with pytest.raises(UserError):
        measured(Oracle(0, 0), [1, 2], top=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a tiny model and a run whose heads were trained for a few steps."""
    place = tmp_path_factory.mktemp("calibrate")
    write_lines(
        place / "run" / "distill.jsonl", [conversation(n, turns=1 + n % 2) for n in range(40)]
    )
    train(place / "run", "--model", save_model(place / "model"))
    return place


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Run:
    return Run(shutil.copytree(trained / "run", tmp_path / "run"))


def train(run: Path, *more: Any) -> dict[str, Any]:
    words = ("drafter.num_heads=2", "drafter.draft_vocab_size=40", "train.epochs=1", "train.batch_tokens=64",
             "train.validation_fraction=0.2", "train.warmup_steps=1")  # fmt: skip
    return medusa_json("train", *words, "--run", run, "--dtype", "fp32", *more)


def calibrate(run: Run, *more: Any) -> Any:
    return medusa_json("calibrate", "--run", run.path, "--dtype", "fp32", *more)


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """Returns a file of ten other conversations."""
    return write_lines(tmp_path / "other.jsonl", [conversation(n) for n in range(60, 70)])


@pytest.mark.slow
@pytest.mark.drawn
def test_command_writes_accuracies_and_a_heat_map(run: Run, trained: Path) -> None:
    document = calibrate(run, "--top", "4")
    assert document == json.loads(run.calibration_path.read_text())
    assert (document["heads"], document["top"], document["backbone"]["id"]) == (
        2,
        4,
        str(trained / "model"),
    )
    assert [len(row) for row in document["accuracies"]] == [4, 4]
    assert all(0 <= value <= 1 for row in document["accuracies"] for value in row)
    # The same split as the training's.
    log = [json.loads(line) for line in (run.path / "train.jsonl").read_text().splitlines()]
    last = [line for line in log if line["event"] == "validated"][-1]
    assert document["positions"] == last["positions"]
    assert (run.path / "calibration.png").read_bytes().startswith(b"\x89PNG")
    text = medusa("calibrate", "--run", run.path, "--dtype", "fp32").stdout
    assert str(run.path / "calibration.png") in text.replace("\n", "")


@pytest.mark.quick("--from")
@pytest.mark.parametrize("flag", ["--data", "--from"])
def test_run_that_learned_from_other_data_is_measured_on_its_held_out_part(
    run: Run, trained: Path, tmp_path: Path, flag: str
) -> None:
    second = Run(tmp_path / "second")
    source = run.path if flag == "--from" else run.distill_path
    ended = train(second.path, flag, source, "--model", trained / "model")
    second.recipe_path.unlink()  # the drafter itself names its held-out fraction
    assert calibrate(second)["positions"] == ended["validation"]["positions"]
    assert second.calibration_path.is_file()


def test_states_are_computed_for_measured_conversations_alone(run: Run, others: Path) -> None:
    whole = calibrate(run)
    (cached,) = (run.path / "cache").iterdir()
    size = cached.stat().st_size
    cached.unlink()
    again = calibrate(run)
    assert all(again[key] == whole[key] for key in ("accuracies", "answers", "data"))
    (cached,) = (run.path / "cache").iterdir()
    assert cached.stat().st_size < size / 2
    assert calibrate(run, "--data", others, "--max-samples", "3")["answers"] == 3
    (few,) = set((run.path / "cache").iterdir()) - {cached}
    assert few.stat().st_size < size / 10


def test_quantization_that_the_needed_engine_lacks_is_refused_by_name(run: Run) -> None:
    recipe = run.recipe_path.read_text()
    assert "states: kept" in recipe
    run.recipe_path.write_text(recipe.replace("states: kept", "states: fresh"))
    words = ["--run", run.path, "--dtype", "fp32"]
    refused = medusa("calibrate", *words, "--quantize", "int8", exit_code=2).stderr
    assert "--quantize" in refused
    assert "--engine" not in refused
    medusa("calibrate", *words)


def test_nothing_held_out_is_refused_before_states_are_computed(run: Run) -> None:
    write_lines(run.distill_path, [conversation(0)])  # of one conversation none is held out
    shutil.rmtree(run.path / "cache")
    medusa("calibrate", "--run", run.path, "--dtype", "fp32", exit_code=1)
    assert not (run.path / "cache").exists()


@pytest.mark.slow
def test_runs_calibration_is_written_for_its_own_drafter_and_data_alone(
    run: Run, others: Path, tmp_path: Path
) -> None:
    drafter, kept = shutil.copytree(run.drafter_dir, tmp_path / "drafter"), tmp_path / "kept.json"
    for more in (["--data", others], ["--drafter", drafter]):
        calibrate(run, *more)
        assert not run.calibration_path.exists()
        calibrate(run, *more, "--output", kept)
        assert json.loads(kept.read_text())["accuracies"]
        assert kept.with_suffix(".png").is_file()
        assert not run.calibration_path.exists()
    calibrate(run, "--drafter", run.drafter_dir)  # named, but the run's own
    assert run.calibration_path.is_file()
    run.calibration_path.unlink()
    run.distill_path.unlink()  # a run that learned from other conversations has these alone to be calibrated on
    calibrate(run, "--data", others)
    assert run.calibration_path.is_file()
