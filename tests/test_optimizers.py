"""Muon: which weights it takes, at which rate, in both stages, and resuming it bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from medusa_cli.drafters import DRAFTERS
from medusa_cli.errors import UsageError
from medusa_cli.runs.io import ReadReport
from medusa_cli.runs.recipe import load_recipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run
from medusa_cli.train import Stepped, Trainer, split_conversations
from medusa_cli.train.checkpoint import checkpoint_path
from medusa_cli.train.optim import CombinedOptimizer, optimizer_of
from medusa_cli.train.setup import check_drafter, joint_backbone
from medusa_cli.train.stage1 import Group
from tests.helpers import conversation, save_model, tiny_backbone, write_lines
from tests.test_joint import SETTINGS, records
from tests.test_training import crash_at, trainer

MUON = ("train.optimizer=muon", "train.weight_decay=0.1")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run.open(f"{tmp_path}/run", create=True)
    write_lines(found.distill_path, [conversation(n) for n in range(20)])
    return found


@pytest.mark.parametrize("kind", sorted(DRAFTERS))
def test_muon_takes_the_matrices_inside_every_drafter_and_adamw_all_else(kind: str) -> None:
    backbone = tiny_backbone(layers=6)
    vocabulary = "own" if "own" in DRAFTERS[kind].vocabularies else "shared"
    drafter = DRAFTERS[kind].create(backbone, 2, 1, vocabulary)
    everything = list(drafter.parameters())
    train = load_recipe(None, [*MUON, "train.muon_lr=0.03"]).train
    found = optimizer_of([Group(everything, 2e-3)], drafter, train, "cpu")
    assert isinstance(found, CombinedOptimizer)
    adamw, muon = (found._parts[name].param_groups for name in ("adamw", "muon"))
    taken = [p for group in muon for p in group["params"]]
    assert taken and all(p.dim() == 2 and max(p.shape) < backbone.vocab_size * 6 for p in taken)
    vocabularies = {id(p) for p in drafter.matrices}
    assert not vocabularies & {id(p) for p in taken}
    both = [id(p) for group in (*adamw, *muon) for p in group["params"]]
    assert sorted(both) == sorted(map(id, everything))  # each once
    assert {group["lr"] for group in muon} == {0.03} and {group["lr"] for group in adamw} == {2e-3}
    assert [group["weight_decay"] for group in adamw] == [0.1, 0.0]


def test_a_step_of_muon_is_orthogonal_and_as_large_as_adamws() -> None:
    torch.manual_seed(0)
    drafter = nn.Sequential(nn.Linear(64, 64, bias=False))
    weight = drafter[0].weight
    before = weight.detach().clone()
    train = load_recipe(None, ["train.optimizer=muon"]).train
    found = optimizer_of([Group([weight], 1e-2)], drafter, train, "cpu")  # type: ignore[arg-type]
    left, right = (torch.linalg.qr(torch.randn(64, 64)).Q for _ in range(2))
    weight.grad = left * torch.linspace(1, 0.05, 64) @ right
    found.step()
    moved = weight.detach() - before
    sizes = torch.linalg.svdvals(moved)
    assert sizes[0] / sizes[-1] < 4  # of the gradient it is 20
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.2 * 1e-2, rel=0.3)
    found.zero_grad()
    assert weight.grad is None


def test_a_resumed_training_with_muon_is_the_same_bit_for_bit(run: Run) -> None:
    words = (*MUON, "train.muon_lr=0.02")
    whole = [e.loss for e in trainer(run, tiny_backbone(), *words).events() if isinstance(e, Stepped)]
    checkpoint_path(run).unlink()
    crash_at(trainer(run, tiny_backbone(), *words).events(), 5)
    again = trainer(run, tiny_backbone(), *words, resume=True)
    assert again.step == 4
    assert [e.loss for e in again.events() if isinstance(e, Stepped)] == whole[4:]
    plain = [e.loss for e in trainer(run, tiny_backbone(), *words[1:2]).events() if isinstance(e, Stepped)]
    assert whole[0] == plain[0] and whole[-1] != plain[-1]


def test_in_stage_2_the_adapter_stays_with_adamw_at_its_own_rate(tmp_path: Path) -> None:
    words = [*SETTINGS, *MUON, f"model={save_model(tmp_path / 'model')}", "train.lr=1e-3", "train.epochs=1"]
    recipe = load_recipe(None, [*words, "train.schedule=constant", "train.batch_tokens=64", "train.max_tokens=120"])
    backbone = joint_backbone(recipe, LoadOptions(device="cpu", dtype="fp32"))
    heads = DRAFTERS["hydra"].create(backbone, 2, 1, "own")
    data = split_conversations(records(12), ReadReport(), max_length=24, fraction=0.2)
    made = Trainer(backbone, heads, data, recipe, Run(tmp_path / "run"))
    assert made.peaks == [1e-3, 1e-3, 2.5e-4, 2.5e-4, 1e-3]
    taken = {id(p) for p in made.optimizer.param_groups[-1]["params"]}
    assert taken and not taken & {id(p) for p in backbone.model.parameters()}
    before = [p.detach().clone() for p in made.parameters]
    run = Run.open(f"{tmp_path}/run", create=True)
    assert run and [e.loss for e in made.events() if isinstance(e, Stepped)]
    assert all(not torch.equal(*pair) for pair in zip(made.parameters, before, strict=True))


def test_a_rate_for_muon_without_it_is_refused() -> None:
    check_drafter(load_recipe(None, ["train.optimizer=muon", "train.muon_lr=0.02"]))
    with pytest.raises(UsageError, match=r"train.muon_lr=0.02 says nothing to train.optimizer=adamw; leave it out"):
        check_drafter(load_recipe(None, ["train.muon_lr=0.02"]))
    with pytest.raises(UsageError, match=r"train.muon_lr=-1.0 is too small"):
        load_recipe(None, ["train.muon_lr=-1"])
    with pytest.raises(UsageError, match="train.optimizer='sgd' is unknown; use one of adamw, adamw8bit, muon"):
        load_recipe(None, ["train.optimizer=sgd"])
