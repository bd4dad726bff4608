"""FIRP's maps trained one after another, each for its share of the steps, as the paper trains them."""

from pathlib import Path

import pytest
import torch

from medusa_cli.runs.run import Run
from medusa_cli.train import Stepped, Validated
from medusa_cli.train.schedule import turn_of
from tests.helpers import conversation, medusa, write_lines
from tests.test_firp_training import SETTINGS, trainer


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run.open(f"{tmp_path}/run", create=True)
    write_lines(found.distill_path, [conversation(n, turns=1 + n % 2) for n in range(40)])
    return found


@pytest.mark.parametrize("turns", [1, 2, 3, 5])
def test_turns_are_equal_shares_of_the_steps(turns: int) -> None:
    for steps in (turns, 29, 100, 1000):
        found = [turn_of(step / steps, turns) for step in range(steps)]
        assert found == [step * turns // steps for step in range(steps)] and turn_of(1.0, turns) == turns - 1


def test_each_map_learns_in_its_turn_alone_and_with_a_rate_of_its_own(run: Run) -> None:
    one = trainer(run, "train.heads_in_turn=true", "train.epochs=8")
    start = one.validate(0)
    half = one.steps // 2  # the steps whose share of the training done is below a half
    events, weights, rates = [], [], []
    for event in one.events():
        events.append(event)
        if isinstance(event, Stepped):
            weights.append([step.weight.detach().clone() for step in one.drafter.steps])
            rates.append(event.lr)
    fresh = torch.eye(one.backbone.hidden_size)
    for number, (first, second) in enumerate(weights, 1):
        assert torch.equal(second, fresh) == (number <= half)
        assert torch.equal(first, weights[half - 1][0]) == (number >= half)
    assert rates[half] == max(rates) > 5 * rates[half - 1]
    # Of the head whose turn it is alone, by the share of positions that have a target for it.
    assert 0.5 * events[0].head_losses[0] < events[0].loss <= events[0].head_losses[0]
    last = [event for event in events if isinstance(event, Validated)][-1]
    assert all(after < before for after, before in zip(last.head_losses, start.head_losses, strict=True))


def test_stopped_in_the_second_turn_it_goes_on_as_if_it_had_not_been(run: Run, tmp_path: Path) -> None:
    turns = "train.heads_in_turn=true"
    whole = trainer(run, turns)
    expected = [event.loss for event in whole.events() if isinstance(event, Stepped)]
    other, seen = Run.open(f"{tmp_path}/other", create=True), []
    other.distill_path.write_bytes(run.distill_path.read_bytes())
    cut = len(expected) // 2 + 2
    for event in trainer(other, turns, stop=lambda: len(seen) == cut).events():
        if isinstance(event, Stepped):
            seen.append(event.loss)
    resumed = trainer(other, turns, resume=True)
    seen += [event.loss for event in resumed.events() if isinstance(event, Stepped)]
    assert seen == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(resumed.drafter.parameters(), whole.drafter.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("name", ["medusa", "hydra", "amphista"])
def test_heads_that_learn_at_once_refuse_it(run: Run, name: str) -> None:
    words = ["train", *SETTINGS[1:], f"drafter={name}", "train.heads_in_turn=true", "--run", str(run.path)]
    result = medusa(*words)
    assert result.exit_code == 2
    assert f"train.heads_in_turn=true says nothing to {name}" in result.stderr
