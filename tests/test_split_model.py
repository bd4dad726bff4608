"""A model split over two processes (--shard) trains as a whole one in one process does, and leaves the same files."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import batch_of
from medusa_cli.drafters import Firp, load_drafter
from medusa_cli.engine import attach, load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.model.load import split_layers
from medusa_cli.runs.recipe import TrainRecipe, load_recipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.train import Distributed
from medusa_cli.train.losses import drafter_loss
from medusa_cli.train.setup import check_loading
from tests import helpers
from tests.helpers import save_model, tiny_model
from tests.test_distributed import TWO, prepared, train, training
from tests.test_firp import backbone_of
from tests.test_sharding import _children, _environment

JOINT = ["--stage", "2", "train.lora_dropout=0", "train.backbone_lr=0.01"]
FIRP = ["drafter=firp", "drafter.num_heads=1", "drafter.vocabulary=draft", "drafter.draft_vocab_size=40"]


def losses(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def assert_alike(ours: list[dict], theirs: list[dict]) -> None:
    assert [one["step"] for one in ours] == [one["step"] for one in theirs] and len(ours) > 3
    for one, other in zip(ours, theirs, strict=True):
        for key in {"loss", "accuracies", "grad_norm", "positions"} & set(one):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key
        assert one["parts"] == pytest.approx(other["parts"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "words"),
    [("llama", []), ("llama", FIRP), ("qwen2", [*JOINT, "train.gradient_checkpointing=true"])],
    ids=["stage-1", "firp", "stage-2"],
)
def test_a_part_each_is_as_good_as_the_whole(tmp_path: Path, family: str, words: list[str]) -> None:
    model = save_model(tmp_path / "model", family=family)
    one, two = prepared(tmp_path / "one"), prepared(tmp_path / "two")
    # One micro-batch to validate on, and for whole conversations one alone in the last step: not to be shared by two.
    words = [*words, "train.validation_tokens=20"]
    for run, size, flags in ((one, 1, []), (two, 2, ["--shard"])):
        done = train(size, model, run, *words, *flags)
        assert done.returncode == 0, done.stderr
    assert_alike(losses(two), losses(one))
    held = two / "adapter" if "--stage" in words else None
    whole = load_backbone(model, LoadOptions(dtype="fp32"), adapter=held)
    assert load_drafter(two / "drafter", whole).num_heads >= 1
    if held is not None:
        ours, theirs = (load_file(run / "adapter" / adapter.WEIGHTS) for run in (two, one))
        assert set(ours) == set(theirs) and any("layers.1" in name for name in ours)
        assert all(torch.allclose(weight, theirs[name], atol=1e-4) for name, weight in ours.items())
    for path in (one / "drafter").glob("*.safetensors"):
        ours, theirs = load_file(two / "drafter" / path.name), load_file(path)
        assert all(torch.allclose(ours[name], weight, rtol=0.01, atol=1e-3) for name, weight in theirs.items())


@pytest.mark.slow
def test_a_killed_training_goes_on_in_parts_and_whole(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    one, two, whole = prepared(tmp_path / "one"), prepared(tmp_path / "two"), tmp_path / "whole"
    words = [*JOINT, "train.epochs=5", "train.checkpoint_every=1"]
    assert train(1, model, one, *words).returncode == 0
    command = [*TWO, "-m", "medusa_cli", *training(model, two, *words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [*command, "--shard"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        if (two / "train.jsonl").is_file() and (two / "train.jsonl").read_text().count('"saved"') >= 3:
            break
        time.sleep(0.01)
    for pid in [one for one in _children(child.pid) if "RANK" in _environment(one)]:
        os.kill(pid, signal.SIGKILL)
    assert child.wait(timeout=60) != 0 and len(losses(two)) < len(losses(one))
    shutil.copytree(two, whole)
    for run, size, flag in ((two, 2, "--shard"), (whole, 1, "--no-shard")):
        done = train(size, model, run, *words, flag, "--resume")
        assert done.returncode == 0, done.stderr
        assert_alike(losses(run), losses(one))


# What one of two processes checks: run by torchrun with this folder's parent as the working directory.
CHECK = """
import torch
from tests.test_split_model import check_families
torch.distributed.init_process_group("gloo")
check_families()
torch.distributed.destroy_process_group()
"""


def check_families() -> None:
    tokens = torch.randint(5, 60, (2, 24))
    for family in ("llama", "mistral-window", "gemma3"):
        found = []
        for split in (False, True):
            network = tiny_model(family)
            if split:
                split_layers(network, "cpu")
                parts = [one for one in network.parameters() if isinstance(one, DTensor)]
                held = sum(one.to_local().numel() for one in parts)
                assert parts and held * 2 == sum(one.numel() for one in parts)
                outside = [network.get_input_embeddings().weight, network.get_output_embeddings().weight]
                assert not any(isinstance(one, DTensor) for one in outside)
            torch.manual_seed(0)
            adapter.attach(network, rank=4, alpha=8, dropout=0.0)
            backbone = Backbone(network)
            attach(backbone)
            adapter.unfreeze(network)
            with torch.no_grad():
                for weight in adapter.trained_weights(network).values():
                    weight.add_(0.05 * torch.randn_like(weight))
            states = backbone.states(tokens)
            with adapter.adapter_off(network), torch.no_grad():
                original = backbone.states(tokens)
            (states * states.detach().sin()).sum().backward()
            gradients = {name: one.grad for name, one in adapter.trained_weights(network).items()}
            tapped = helpers.forward(backbone, tokens[0], taps=(0, -1)).hidden
            found.append((backbone.identity, [states, original, tapped], gradients))
        (name, states, gradients), (other, others, more) = found
        assert name == other
        assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(states, others, strict=True))
        assert not torch.allclose(states[0], states[1], atol=1e-2)
        for key, grad in gradients.items():  # the lm_head's is not reached by the states
            both = (grad, more[key])
            assert both == (None, None) or torch.allclose(*both, rtol=1e-4, atol=1e-5), key
        assert sum(grad is not None for grad in gradients.values()) > 20


def test_split_layers_hold_half_and_compute_the_same(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    folder = Path(__file__).parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [*TWO, str(script)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_process_takes_as_many_turns_and_every_item_counts_once(count: int, size: int) -> None:
    items = [f"i{n}" for n in range(count)]
    turns = [Distributed(rank, size, sharded=True).micro_batches(items) for rank in range(size)]
    assert len({len(one) for one in turns}) == 1
    assert sorted(item for one in turns for item, new in one if new) == items
    assert [Distributed(0, size).micro_batches(items)] == [[(item, True) for item in items[::size]]]


def test_heads_without_a_target_still_make_a_pass_back() -> None:
    backbone = backbone_of()
    drafter = Firp.create(backbone, 2, vocabulary="draft", draft_ids=torch.tensor([7, 8]))
    item = Conversation("c", tokens=[5, 6, 9, 10, 11, 12], spans=[(3, 6)])  # no token of the draft vocabulary
    found = drafter_loss(drafter, backbone, batch_of(backbone, [item], traced=True), TrainRecipe())
    assert float(found.total.detach()) == 0 and found.total.requires_grad
    found.total.backward()
    assert all(not one.grad.any() for one in drafter.parameters() if one.requires_grad)


@pytest.mark.parametrize(
    ("words", "place", "size", "said"),
    [
        ([], {}, 1, "there is one"),
        (["train.stage=2", "train.tuning=full"], {}, 2, "train.tuning=full trains them all"),
        (["train.stage=2", "train.tuning=qlora"], {}, 2, "4 or 8 bits"),
        ([], {"quantize": "bnb.nf4"}, 2, "4 or 8 bits"),
        ([], {"quantize": "bnb.int8"}, 2, "4 or 8 bits"),
    ],
)
def test_what_cannot_be_split_is_refused(words: list[str], place: dict, size: int, said: str) -> None:
    options = LoadOptions(**place)
    check_loading(load_recipe(None, words).train, options, Distributed(0, size))
    with pytest.raises(UsageError, match=said):
        check_loading(load_recipe(None, [*words, "train.shard=true"]).train, options, Distributed(0, size))


def test_an_engine_and_a_network_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(UsageError, match="engine fast cannot run layers split"):
        load_backbone("x", LoadOptions(engine="fast"), shard=True)
    config = SimpleNamespace(model_type="odd", get_text_config=lambda: SimpleNamespace(num_hidden_layers=2))
    with pytest.raises(UserError, match="'odd' has no list of layers"):
        split_layers(SimpleNamespace(base_model=nn.Linear(2, 2), config=config), "cpu")
