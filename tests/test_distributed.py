"""Two processes, each with the whole model or a part of it (train.shard), train what one process trains."""

import json
import shutil
from datetime import timedelta
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import batch_of
from medusa_cli.drafters import Firp, load_drafter
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.adapter import WEIGHTS
from medusa_cli.model import Backbone, lora
from medusa_cli.model.distributed import Distributed, split_layers
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.train.losses import drafter_loss
from medusa_cli.train.setup import check_loading
from tests import forked, helpers
from tests.helpers import attach, save_conversations, save_model, tiny_model
from tests.test_firp import backbone_of

COMMON = [
    "--device",
    "cpu",
    "--dtype",
    "fp32",
    "--json",
    "drafter.num_heads=2",
    "drafter.vocabulary=own",
]
SMALL = [
    "train.batch_tokens=64",
    "train.accumulation=2",
    "train.validation_every=2",
    "train.lora_rank=4",
]


def training(model: str, run: Path, *words: str) -> list[str]:
    return [
        "train",
        "--run-dir",
        str(run),
        "--model",
        model,
        "train.epochs=1",
        *COMMON,
        *SMALL,
        *words,
    ]


def train(size: int, model: str, run: Path, *words: str) -> CompletedProcess[str]:
    """Trains by so many processes: forked, as each would else spend seconds on its imports."""
    return forked.run(training(model, run, *words), run.parent / f"{run.name}-output", size)


def losses(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def assert_equal_losses(split: Path, whole: Path) -> None:
    ours, theirs = losses(split), losses(whole)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert len(ours) > 3
    for line, expected in zip(ours, theirs, strict=True):
        for key in {"loss", "accuracies", "grad_norm", "positions"} & set(line):
            assert line[key] == pytest.approx(expected[key], rel=1e-4), key
        assert line["parts"] == pytest.approx(expected["parts"], rel=1e-3, abs=1e-6)


@pytest.mark.quick("uneven")
@pytest.mark.parametrize(
    "words",
    [
        ["train.accumulation=1"],
        ["train.accumulation=3"],
        ["--stage", "2", "--schedule", "sine", "train.lora_dropout=0.3"],
    ],
    ids=["fewer", "uneven", "stage-2"],
)
def test_two_processes_equal_one(tmp_path: Path, words: list[str]) -> None:
    model = save_model(tmp_path / "model")
    warned = []
    for name, size in (("one", 1), ("two", 2)):
        run = save_conversations(tmp_path / name)
        done = train(size, model, run, *words)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["steps"] > 2  # one document: the second process is silent
        assert (run / "drafter" / "config.json").is_file()
        warned.append("1 of 2 processes have nothing to do" in done.stderr)
    assert warned == [False, words == ["train.accumulation=1"]]
    assert_equal_losses(tmp_path / "two", tmp_path / "one")
    # Whoever computed them, the states are the same.
    kept = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "cache").glob("*")}
        for name in ("one", "two")
    ]
    assert kept[0] == kept[1]
    assert len(kept[0]) == ("--stage" not in words)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The second of two processes on a machine with GPUs, and what it asks of them and of torch."""
    asked: dict[str, Any] = {"gpus": 2}
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: asked["gpus"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(device=device))
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda name, **more: asked.update(name=name, **more),
    )
    return asked


@pytest.mark.parametrize(
    ("device", "backend", "name", "place"),
    [
        ("auto", None, "cpu:gloo,cuda:nccl", "cuda:1"),
        ("cuda", "gloo", "gloo", "cuda:1"),
        ("cpu", None, "gloo", "cpu"),
        ("cuda:0", None, "gloo", "cuda:0"),
    ],
)
def test_processes_talk_where_the_asked_device_is(
    joined: dict[str, Any], device: str, backend: str | None, name: str, place: str
) -> None:
    assert Distributed.join(device, backend).device(device) == place
    assert joined["name"] == name
    assert joined.get("device") == (1 if place == "cuda:1" else None)
    assert joined["timeout"] > timedelta(days=1)  # a first pass over real data takes hours


def test_more_processes_than_gpus_are_refused(joined: dict[str, Any]) -> None:
    joined["gpus"] = 1
    with pytest.raises(UsageError, match=r"process 2 .*--nproc_per_node 1"):
        Distributed.join()
    assert Distributed.join("cpu").rank == 1


JOINT = ["--stage", "2", "train.lora_dropout=0", "train.backbone_lr=0.01"]
FIRP = [
    "drafter=firp",
    "drafter.num_heads=1",
    "drafter.vocabulary=draft",
    "drafter.draft_vocab_size=40",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "words"),
    [("llama", []), ("llama", FIRP), ("qwen2", [*JOINT, "train.gradient_checkpointing=true"])],
    ids=["stage-1", "firp", "stage-2"],
)
def test_split_training_equals_whole_training(
    tmp_path: Path, family: str, words: list[str]
) -> None:
    model = save_model(tmp_path / "model", family=family)
    whole, split = save_conversations(tmp_path / "whole"), save_conversations(tmp_path / "split")
    # One micro-batch to validate on, and one conversation alone in the last step: two processes cannot share them.
    words = [*words, "train.validation_tokens=20"]
    for run, size, flags in ((whole, 1, []), (split, 2, ["train.shard=true"])):
        done = train(size, model, run, *words, *flags)
        assert done.returncode == 0, done.stderr
    assert_equal_losses(split, whole)
    adapter = split / "adapter" if "--stage" in words else None
    backbone = load_backbone(model, LoadOptions(dtype="fp32"), adapter=adapter)
    assert load_drafter(split / "drafter", backbone).num_heads >= 1
    if adapter is not None:
        ours, theirs = (load_file(run / "adapter" / WEIGHTS) for run in (split, whole))
        assert set(ours) == set(theirs)
        assert any("layers.1" in name for name in ours)
        assert all(torch.allclose(weight, theirs[name], atol=1e-4) for name, weight in ours.items())
    for path in (whole / "drafter").glob("*.safetensors"):
        ours, theirs = load_file(split / "drafter" / path.name), load_file(path)
        assert all(
            torch.allclose(ours[name], weight, rtol=0.01, atol=1e-3)
            for name, weight in theirs.items()
        )


@pytest.mark.slow
def test_killed_training_resumes_split_and_whole(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    whole, split = (save_conversations(tmp_path / name) for name in ("whole", "split"))
    resumed = tmp_path / "resumed"
    words = [*JOINT, "train.epochs=5", "train.checkpoint_every=1"]
    assert train(1, model, whole, *words).returncode == 0
    log = split / "train.jsonl"
    forked.run_and_kill(
        [*training(model, split, *words), "train.shard=true"],
        lambda: log.is_file() and log.read_text().count('"saved"') >= 3,
    )
    assert len(losses(split)) < len(losses(whole))
    shutil.copytree(split, resumed)
    for run, size, flag in ((split, 2, "train.shard=true"), (resumed, 1, "train.shard=false")):
        done = train(size, model, run, *words, flag, "--resume")
        assert done.returncode == 0, done.stderr
        assert_equal_losses(run, whole)


def check_families() -> None:
    """Compares split with whole models in one of two processes."""
    torch.distributed.init_process_group("gloo")
    tokens = torch.randint(5, 60, (2, 24))
    for family in ("llama", "mistral-window", "gemma3"):
        (name, states, gradients), (split_name, split_states, split_gradients) = (
            computed(family, tokens, split) for split in (False, True)
        )
        assert name == split_name
        assert all(
            torch.allclose(*pair, atol=1e-5) for pair in zip(states, split_states, strict=True)
        )
        assert not torch.allclose(states[0], states[1], atol=1e-2)
        for key, gradient in gradients.items():  # the lm_head's is not reached by the states
            pair = (gradient, split_gradients[key])
            assert pair == (None, None) or torch.allclose(*pair, rtol=1e-4, atol=1e-5), key
        assert sum(gradient is not None for gradient in gradients.values()) > 20


def computed(
    family: str, tokens: torch.Tensor, split: bool
) -> tuple[dict, list[torch.Tensor], dict]:
    """Returns a model's identity, states with and without its adapter and taps, and the adapter's gradients."""
    network = tiny_model(family)
    if split:
        split_layers(network, "cpu")
        parts = [weight for weight in network.parameters() if isinstance(weight, DTensor)]
        assert parts
        assert 2 * sum(part.to_local().numel() for part in parts) == sum(
            part.numel() for part in parts
        )
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
    return (
        backbone.identity,
        [states, original, tapped],
        {key: weight.grad for key, weight in weights.items()},
    )


@pytest.mark.slow
def test_split_layers_hold_half_and_compute_the_same(tmp_path: Path) -> None:
    done = forked.run(check_families, tmp_path, 2)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_processes_take_the_same_number_of_batches_and_each_item_counts_once(
    count: int, size: int
) -> None:
    items = [f"i{n}" for n in range(count)]
    batches = [Distributed(rank, size).micro_batches(items) for rank in range(size)]
    assert len({len(batch) for batch in batches}) == 1
    assert sorted(item for batch in batches for item, new in batch if new) == items


def test_heads_without_a_target_still_run_backward() -> None:
    backbone = backbone_of()
    drafter = Firp.create(backbone, 2, vocabulary="draft", draft_ids=torch.tensor([7, 8]))
    # No token of the draft vocabulary.
    item = Conversation("c", tokens=[5, 6, 9, 10, 11, 12], spans=[(3, 6)])
    loss = drafter_loss(drafter, backbone, batch_of(backbone, drafter, [item]), TrainRecipe()).total
    assert float(loss.detach()) == 0
    assert loss.requires_grad
    loss.backward()
    assert not any(weight.grad.any() for weight in drafter.parameters() if weight.requires_grad)


@pytest.mark.parametrize(
    ("words", "options", "size", "match"),
    [
        ([], {}, 1, "shard"),
        (["train.stage=2", "train.tuning=full"], {}, 2, "train.tuning=full"),
        (["train.stage=2", "train.tuning=qlora"], {}, 2, "cannot split"),
        ([], {"quantize": "bnb.nf4"}, 2, "cannot split"),
        ([], {"quantize": "bnb.int8"}, 2, "cannot split"),
    ],
)
def test_shard_is_refused_with_other_settings(
    words: list[str], options: dict, size: int, match: str
) -> None:
    loading = LoadOptions(**options)
    check_loading(load_recipe(None, words).train, loading, Distributed(0, size))
    with pytest.raises(UsageError, match=match):
        check_loading(
            load_recipe(None, [*words, "train.shard=true"]).train, loading, Distributed(0, size)
        )


def test_qlora_refuses_eight_bits() -> None:
    train = load_recipe(None, ["train.stage=2", "train.tuning=qlora"]).train
    check_loading(train, LoadOptions(quantize="bnb.nf4"), Distributed(0, 1))
    with pytest.raises(UsageError, match="quantize bnb.int8"):
        check_loading(train, LoadOptions(quantize="bnb.int8"), Distributed(0, 1))


def test_engines_and_networks_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(UsageError, match="shard"):
        load_backbone("x", LoadOptions(engine="native"), shard=True)
    text = SimpleNamespace(num_hidden_layers=2)
    config = SimpleNamespace(model_type="odd", get_text_config=lambda: text)
    base = nn.Linear(2, 2)
    base.config = text  # type: ignore[assignment]
    with pytest.raises(UserError, match="'odd'"):
        split_layers(SimpleNamespace(base_model=base, config=config), "cpu")
