"""Calibration: shares counted as they are, on what was held out, and the command's files."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from medusa_cli.data.packing import Dataset, Example
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.io import ReadReport
from medusa_cli.runs.run import Run
from medusa_cli.train.calibration import calibrate
from tests.helpers import conversation, medusa, tiny_backbone, write_lines
from tests.test_training import model_folder, run, train_words

__all__ = ["model_folder", "run"]  # fixtures


class Oracle(torch.nn.Module):
    """Head k's i-th guess is the token it should guess plus i; where offsets[k] is given, plus that too."""

    num_heads = 2

    def __init__(self, offsets: tuple[int, ...]) -> None:
        super().__init__()
        self.offsets = offsets

        self.draft_ids = torch.arange(64)

    def vocabulary_index(self, device: torch.device) -> Tensor:
        return torch.arange(64)

    def logits(self, backbone: Backbone, batch) -> Iterator[Tensor]:
        for k, offset in enumerate(self.offsets, 1):
            first = batch.next.roll(-k) - offset
            # Scores fall by one from guess to guess, round the whole vocabulary.
            yield -((self.draft_ids - first[:, None]) % 64).float()


def dataset_of(*answers: list[int]) -> Dataset:
    made, row = [], 0
    for i, tokens in enumerate(answers):
        made.append(Example(f"a{i}", torch.tensor(tokens), row))
        row += len(tokens)
    return Dataset([], made, ReadReport(), "", torch.zeros(row, 32).bfloat16())


def test_the_rank_that_is_right_is_counted_within_each_answer_alone() -> None:
    found = calibrate(
        tiny_backbone(),
        Oracle((0, 2)),
        dataset_of([5, 6, 7, 8, 9], [30, 31, 32]),
        top=3,  # type: ignore[arg-type]
    )
    assert found.accuracies == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert found.counted == [4 + 2, 3 + 1]
    assert (found.positions, found.answers) == (8, 2)


def test_conversations_whose_prompts_are_seen_are_not_cut() -> None:
    tokens = torch.randint(0, 64, (700,))
    long = Example("long", tokens, 0, torch.zeros(700, dtype=torch.long))
    short = Example("short", tokens[:3], 700, torch.zeros(3, dtype=torch.long))
    dataset = Dataset([], [long, short], ReadReport(), "", torch.zeros(703, 32).bfloat16())
    found = calibrate(tiny_backbone(), Oracle((0, 0)), dataset, top=1)  # type: ignore[arg-type]
    assert found.counted == [699 + 2, 698 + 1]


class Unsure(Oracle):
    """Logits that are too sure by a factor: the tokens are drawn from their softmax at the temperature `heat`."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__((0,))
        self.num_heads, self.scores = 1, scores

    def logits(self, backbone: Backbone, batch) -> Iterator[Tensor]:
        yield self.scores[batch.hidden[:, 0].float().long()]


@pytest.mark.parametrize("heat", [0.7, 1.0, 1.6])
def test_the_temperature_that_fits_is_found(heat: float) -> None:
    torch.manual_seed(0)
    count = 255
    scores = 2 * torch.randn(count, 64)
    tokens = torch.multinomial((scores / heat).softmax(-1), 16, replacement=True)  # [count, 16]
    # Answers of two tokens: head 1 guesses the second from the first's state, which names its row of scores.
    answers = [
        Example(f"{i}.{j}", torch.stack([tokens[i, j], tokens[i, j]]), 2 * i) for i in range(count) for j in range(16)
    ]
    states = torch.arange(count).repeat_interleave(2)[:, None].expand(-1, 32).bfloat16()
    dataset = Dataset([], answers, ReadReport(), "", states)
    found = calibrate(tiny_backbone(), Unsure(scores), dataset, top=1)  # type: ignore[arg-type]
    assert found.temperatures[0] == pytest.approx(heat, abs=0.101)


def test_what_cannot_be_measured_is_refused() -> None:
    oracle = Oracle((0, 0))
    backbone = tiny_backbone()
    with pytest.raises(UsageError, match="top 0 is too small"):
        calibrate(backbone, oracle, dataset_of([1, 2, 3]), top=0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="top 65 is more than the 64 tokens"):
        calibrate(backbone, oracle, dataset_of([1, 2, 3]), top=65)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no conversation is held out"):
        calibrate(backbone, oracle, dataset_of(), top=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="too short to calibrate 2 heads"):
        calibrate(backbone, oracle, dataset_of([1, 2]), top=3)  # type: ignore[arg-type]


def test_the_command_writes_accuracies_and_a_heat_map(run: Run, model_folder: str) -> None:
    assert medusa(*train_words(run, model_folder, "--quiet")).exit_code == 0
    words = ["calibrate", "--run", str(run.path), "--dtype", "fp32"]
    result = medusa(*words, "--json", "--top", "4")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == json.loads(run.calibration_path.read_text())
    assert (document["heads"], document["top"]) == (2, 4)
    assert [len(row) for row in document["accuracies"]] == [4, 4]
    assert all(0 <= value <= 1 for row in document["accuracies"] for value in row)
    assert document["backbone"]["id"] == model_folder
    # The same split as the training's: top-1 accuracy is what the last validation said.
    log = [json.loads(line) for line in (run.path / "train.jsonl").read_text().splitlines()]
    last = [line for line in log if line["event"] == "validated"][-1]
    assert document["positions"] == last["positions"]
    assert [row[0] for row in document["accuracies"]] == pytest.approx(last["accuracies"], abs=0.05)
    assert (run.path / "calibration.png").read_bytes().startswith(b"\x89PNG")
    result = medusa(*words)
    assert result.exit_code == 0 and "top 10" in result.stdout and "medusa tree" in result.stdout
    assert "held-out part of" in result.stderr.splitlines()[0]


@pytest.mark.parametrize("flag", ["--data", "--from"])
def test_a_run_that_learnt_from_conversations_elsewhere_is_measured_on_those_it_held_out(
    run: Run, model_folder: str, tmp_path: Path, flag: str
) -> None:
    second = Run(tmp_path / "second")
    source = run.path if flag == "--from" else run.distill_path
    done = medusa(*train_words(second, model_folder, flag, str(source), "--json"))
    assert done.exit_code == 0, done.output
    second.recipe_path.unlink()  # the drafter itself says what was held out
    found = medusa("calibrate", "--run", str(second.path), "--dtype", "fp32", "--json")
    assert found.exit_code == 0, found.output
    assert f"the held-out part of {run.distill_path}" in found.stderr
    assert json.loads(found.stdout)["positions"] == json.loads(done.stdout)["validation"]["positions"]
    assert second.calibration_path.is_file()


def test_other_data_is_used_whole_and_can_be_limited(run: Run, model_folder: str, tmp_path: Path) -> None:
    assert medusa(*train_words(run, model_folder, "--quiet")).exit_code == 0
    data = write_lines(tmp_path / "other.jsonl", [conversation(n) for n in range(60, 70)])
    words = ["calibrate", "--run", str(run.path), "--dtype", "fp32", "--json", "--data", str(data)]
    assert json.loads(medusa(*words).stdout)["answers"] == 10
    assert json.loads(medusa(*words, "--max-samples", "3").stdout)["answers"] == 3
    folder = medusa("calibrate", "--run", str(run.path), "--data", str(tmp_path))
    assert folder.exit_code == 2 and "is a directory" in folder.stderr


def test_states_are_computed_of_what_is_measured_alone(run: Run, model_folder: str, tmp_path: Path) -> None:
    assert medusa(*train_words(run, model_folder, "--quiet")).exit_code == 0
    words = ["calibrate", "--run", str(run.path), "--dtype", "fp32", "--json"]
    whole = json.loads(medusa(*words).stdout)
    (made,) = (run.path / "cache").iterdir()
    size = made.stat().st_size
    made.unlink()
    again = json.loads(medusa(*words).stdout)
    for key in ("accuracies", "answers", "data"):
        assert again[key] == whole[key]
    (made,) = (run.path / "cache").iterdir()
    assert made.stat().st_size < size / 2
    data = write_lines(tmp_path / "other.jsonl", [conversation(n) for n in range(60, 70)])
    assert json.loads(medusa(*words, "--data", str(data), "--max-samples", "3").stdout)["answers"] == 3
    few = max((run.path / "cache").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert few.stat().st_size == 3 * 10 * 32 * 2  # answers of ten tokens


def test_where_nothing_is_held_out_no_states_are_asked_for(run: Run, model_folder: str) -> None:
    write_lines(run.distill_path, [conversation(0)])  # of one conversation none is held out
    assert medusa(*train_words(run, model_folder, "--quiet")).exit_code == 0
    shutil.rmtree(run.path / "cache")
    done = medusa("calibrate", "--run", str(run.path), "--dtype", "fp32", "--quiet")
    assert done.exit_code == 1 and "no conversation is held out for calibration" in done.stderr, done.output
    assert not (run.path / "cache").exists()


def test_the_runs_own_calibration_is_written_for_its_own_drafter_and_held_out_part_alone(
    run: Run, model_folder: str, tmp_path: Path
) -> None:
    assert medusa(*train_words(run, model_folder, "--quiet")).exit_code == 0
    data = write_lines(tmp_path / "other.jsonl", [conversation(n) for n in range(60, 70)])
    other = shutil.copytree(run.drafter_dir, tmp_path / "drafter")
    words = ["calibrate", "--run", str(run.path), "--dtype", "fp32"]
    for more in (["--data", str(data)], ["--drafter", str(other)]):
        shown = medusa(*words, *more)
        assert shown.exit_code == 0 and "not saved; give --output FILE" in shown.stdout, shown.output
        assert not run.calibration_path.exists()
        kept = tmp_path / "kept.json"
        shown = medusa(*words, *more, "--output", str(kept))
        assert shown.exit_code == 0 and f"--calibration {kept}" in "".join(shown.stdout.splitlines())
        assert json.loads(kept.read_text())["accuracies"] and kept.with_suffix(".png").is_file()
        assert not run.calibration_path.exists()
    assert medusa(*words, "--drafter", str(run.drafter_dir)).exit_code == 0  # named, but the run's own
    assert run.calibration_path.is_file()
    run.calibration_path.unlink()
    run.distill_path.unlink()  # a run that learnt from other conversations has these alone to be calibrated on
    assert medusa(*words, "--data", str(data)).exit_code == 0
    assert run.calibration_path.is_file()


def test_bad_words_end_in_one_line(run: Run, model_folder: str) -> None:
    words = ["calibrate", "--run", str(run.path), "--model", model_folder, "--quiet"]
    for more, code, part in (
        (["--top", "0"], 2, "--top"),
        ([], 1, "holds no drafter; run `medusa train` first"),
        (["--run", "no/where"], 1, "does not exist"),
    ):
        result = medusa(*words, *more)
        assert result.exit_code == code
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and part in errors[0] and "Traceback" not in result.stderr
