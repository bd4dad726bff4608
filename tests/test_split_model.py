"""A model split over two processes (--shard) trains as a whole one does, and leaves the same files."""

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
from medusa_cli.model import Backbone, lora
from medusa_cli.model.distributed import Distributed, split_layers
from medusa_cli.runs.recipe import TrainRecipe, load_recipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.train.losses import drafter_loss
from medusa_cli.train.setup import check_loading
from tests import helpers
from tests.helpers import save_conversations, save_model, tiny_model
from tests.test_distributed import TWO, assert_equal_losses, losses, train, training
from tests.test_firp import backbone_of
from tests.test_sharding import _children, _environment

JOINT = ["--stage", "2", "train.lora_dropout=0", "train.backbone_lr=0.01"]
FIRP = ["drafter=firp", "drafter.num_heads=1", "drafter.vocabulary=draft", "drafter.draft_vocab_size=40"]


@pytest.mark.parametrize(
    ("family", "words"),
    [("llama", []), ("llama", FIRP), ("qwen2", [*JOINT, "train.gradient_checkpointing=true"])],
    ids=["stage-1", "firp", "stage-2"],
)
def test_split_training_equals_whole_training(tmp_path: Path, family: str, words: list[str]) -> None:
    model = save_model(tmp_path / "model", family=family)
    whole, split = save_conversations(tmp_path / "whole"), save_conversations(tmp_path / "split")
    # One micro-batch to validate on, and one conversation alone in the last step: two processes cannot share them.
    words = [*words, "train.validation_tokens=20"]
    for run, size, flags in ((whole, 1, []), (split, 2, ["--shard"])):
        done = train(size, model, run, *words, *flags)
        assert done.returncode == 0, done.stderr
    assert_equal_losses(split, whole)
    adapter = split / "adapter" if "--stage" in words else None
    backbone = load_backbone(model, LoadOptions(dtype="fp32"), adapter=adapter)
    assert load_drafter(split / "drafter", backbone).num_heads >= 1
    if adapter is not None:
        ours, theirs = (load_file(run / "adapter" / lora.WEIGHTS) for run in (split, whole))
        assert set(ours) == set(theirs) and any("layers.1" in name for name in ours)
        assert all(torch.allclose(weight, theirs[name], atol=1e-4) for name, weight in ours.items())
    for path in (whole / "drafter").glob("*.safetensors"):
        ours, theirs = load_file(split / "drafter" / path.name), load_file(path)
        assert all(torch.allclose(ours[name], weight, rtol=0.01, atol=1e-3) for name, weight in theirs.items())


@pytest.mark.slow
def test_killed_training_resumes_split_and_whole(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    whole, split = (save_conversations(tmp_path / name) for name in ("whole", "split"))
    resumed = tmp_path / "resumed"
    words = [*JOINT, "train.epochs=5", "train.checkpoint_every=1"]
    assert train(1, model, whole, *words).returncode == 0
    command = [*TWO, "-m", "medusa_cli", *training(model, split, *words), "--shard"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline, log = time.monotonic() + 120, split / "train.jsonl"
    while time.monotonic() < deadline and child.poll() is None:
        if log.is_file() and log.read_text().count('"saved"') >= 3:
            break
        time.sleep(0.01)
    for pid in [pid for pid in _children(child.pid) if "RANK" in _environment(pid)]:
        os.kill(pid, signal.SIGKILL)
    assert child.wait(timeout=60) != 0 and len(losses(split)) < len(losses(whole))
    shutil.copytree(split, resumed)
    for run, size, flag in ((split, 2, "--shard"), (resumed, 1, "--no-shard")):
        done = train(size, model, run, *words, flag, "--resume")
        assert done.returncode == 0, done.stderr
        assert_equal_losses(run, whole)


# The check of each of two processes, run by torchrun with this folder's parent as the working directory.
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
        (name, states, gradients), (split_name, split_states, split_gradients) = (
            computed(family, tokens, split) for split in (False, True)
        )
        assert name == split_name
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(states, split_states, strict=True))
        assert not torch.allclose(states[0], states[1], atol=1e-2)
        for key, gradient in gradients.items():  # the lm_head's is not reached by the states
            pair = (gradient, split_gradients[key])
            assert pair == (None, None) or torch.allclose(*pair, rtol=1e-4, atol=1e-5), key
        assert sum(gradient is not None for gradient in gradients.values()) > 20


def computed(family: str, tokens: torch.Tensor, split: bool) -> tuple[dict, list[torch.Tensor], dict]:
    """Returns a model's identity, states with and without its adapter and taps, and the adapter's gradients."""
    network = tiny_model(family)
    if split:
        split_layers(network, "cpu")
        parts = [weight for weight in network.parameters() if isinstance(weight, DTensor)]
        assert parts and 2 * sum(part.to_local().numel() for part in parts) == sum(part.numel() for part in parts)
        for layer in (network.get_input_embeddings(), network.get_output_embeddings()):
            assert not isinstance(layer.weight, DTensor)
    torch.manual_seed(0)
    lora.attach(network, rank=4, alpha=8, dropout=0.0)
    backbone = Backbone(network)
    attach(backbone)
    lora.unfreeze(network)
    weights = lora.trained_weights(network)
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(0.05 * torch.randn_like(weight))
    states = backbone.states(tokens)
    with lora.adapter_off(network), torch.no_grad():
        original = backbone.states(tokens)
    (states * states.detach().sin()).sum().backward()
    tapped = helpers.forward(backbone, tokens[0], taps=(0, -1)).hidden
    return backbone.identity, [states, original, tapped], {key: weight.grad for key, weight in weights.items()}


def test_split_layers_hold_half_and_compute_the_same(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    folder = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([*TWO, str(script)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_processes_take_the_same_number_of_batches_and_each_item_counts_once(count: int, size: int) -> None:
    items = [f"i{n}" for n in range(count)]
    batches = [Distributed(rank, size, sharded=True).micro_batches(items) for rank in range(size)]
    assert len({len(batch) for batch in batches}) == 1
    assert sorted(item for batch in batches for item, new in batch if new) == items
    assert [Distributed(0, size).micro_batches(items)] == [[(item, True) for item in items[::size]]]


def test_heads_without_a_target_still_run_backward() -> None:
    backbone = backbone_of()
    drafter = Firp.create(backbone, 2, vocabulary="draft", draft_ids=torch.tensor([7, 8]))
    item = Conversation("c", tokens=[5, 6, 9, 10, 11, 12], spans=[(3, 6)])  # no token of the draft vocabulary
    loss = drafter_loss(drafter, backbone, batch_of(backbone, drafter, [item]), TrainRecipe()).total
    assert float(loss.detach()) == 0 and loss.requires_grad
    loss.backward()
    assert not any(weight.grad.any() for weight in drafter.parameters() if weight.requires_grad)


@pytest.mark.parametrize(
    ("words", "options", "size", "match"),
    [
        ([], {}, 1, "shard"),
        (["train.stage=2", "train.tuning=full"], {}, 2, "train.tuning=full"),
        (["train.stage=2", "train.tuning=qlora"], {}, 2, "shard cannot split"),
        ([], {"quantize": "bnb.nf4"}, 2, "shard cannot split"),
        ([], {"quantize": "bnb.int8"}, 2, "shard cannot split"),
    ],
)
def test_shard_is_refused_with_other_settings(words: list[str], options: dict, size: int, match: str) -> None:
    loading = LoadOptions(**options)
    check_loading(load_recipe(None, words).train, loading, Distributed(0, size))
    with pytest.raises(UsageError, match=match):
        check_loading(load_recipe(None, [*words, "train.shard=true"]).train, loading, Distributed(0, size))


def test_engines_and_networks_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(UsageError, match="shard"):
        load_backbone("x", LoadOptions(engine="fast"), shard=True)
    config = SimpleNamespace(model_type="odd", get_text_config=lambda: SimpleNamespace(num_hidden_layers=2))
    with pytest.raises(UserError, match="'odd'"):
        split_layers(SimpleNamespace(base_model=nn.Linear(2, 2), config=config), "cpu")
