"""Every kind of drafter in training: one that is cut off and taken up again ends as if it had not been."""

from pathlib import Path

import pytest
import torch

from medusa_cli.runs.recipe import load_recipe
from medusa_cli.runs.run import Run
from medusa_cli.train import Stepped, Stopped, Trainer, build_drafter, load_dataset
from medusa_cli.train.setup import drafter_class, taps_of
from tests.helpers import conversation, tiny_backbone, write_lines
from tests.test_training import SETTINGS

KINDS = {
    "medusa": ["drafter=medusa"],
    "hydra": ["drafter=hydra"],
    "hydra++": ["drafter=hydra", "drafter.prefix_layers=1", "drafter.matrices=one"],
    "hydra++ over answers": ["drafter=hydra", "drafter.prefix_layers=1", "drafter.context=answer"],
    "amphista": ["drafter=amphista", "drafter.matrices=one", "train.soft=0.5"],
    "eagle": ["drafter=eagle", "train.soft=0.5"],
    "amphista-alpha": ["drafter=amphista", "drafter.attention_layers=2"],
}


def run_of(folder: Path) -> Run:
    run = Run.open(f"{folder}/", create=True)
    write_lines(run.distill_path, [conversation(n, turns=1 + n % 2) for n in range(20)])
    return Run(folder)


def trainer(run: Run, *words: str, resume: bool = False, stop=lambda: False) -> Trainer:
    recipe, backbone = load_recipe(None, [*SETTINGS, "train.epochs=2", *words]), tiny_backbone(layers=3)
    fraction, taps = recipe.train.validation_fraction, taps_of(recipe.drafter, backbone)
    prompts = drafter_class(recipe.drafter.name).sees_prompt(recipe.drafter)
    dataset = load_dataset(run, backbone, fraction=fraction, taps=taps, prompts=prompts)
    torch.manual_seed(0)
    drafter = build_drafter(backbone, recipe.drafter, dataset)
    return Trainer(backbone, drafter, dataset, recipe, run, resume=resume, should_stop=stop)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_cut_off_goes_on_as_if_it_had_not_been(kind: str, tmp_path: Path) -> None:
    whole = trainer(run_of(tmp_path / "whole"), *KINDS[kind])
    expected = [event.loss for event in whole.events() if isinstance(event, Stepped)]
    assert len(expected) > 4 and expected[-1] < expected[0]
    run, losses = run_of(tmp_path / "cut"), []
    for event in trainer(run, *KINDS[kind], stop=lambda: len(losses) == 3).events():
        if isinstance(event, Stepped):
            losses.append(event.loss)
    assert isinstance(event, Stopped) and event.step == 3
    resumed = trainer(run, *KINDS[kind], resume=True)
    losses += [event.loss for event in resumed.events() if isinstance(event, Stepped)]
    assert losses == expected
    for name, weight in whole.drafter.state_dict().items():
        assert torch.equal(weight, resumed.drafter.state_dict()[name]), name
