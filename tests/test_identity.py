"""What names a backbone: the same for every way to load one checkpoint, another for whatever changes its weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.model.identity import weights_of
from medusa_cli.model.load import load_network
from medusa_cli.runs.io import read_json, write_json
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run, check_backbone
from tests.helpers import save_model, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("identity") / "model", hidden=64, vocab=128)


def saved(network: torch.nn.Module, folder: Path, **options) -> str:
    network.save_pretrained(folder, **options)
    tiny_tokenizer(128).save_pretrained(folder)
    return str(folder)


def tuned(model: str, folder: Path) -> str:
    """The model fine-tuned a little in every linear layer and nowhere else: norms and embeddings stay."""
    network, _ = load_network(model, LoadOptions(dtype="fp32"))
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data += 1e-2 * module.weight.data.std() * torch.randn_like(module.weight)
    return saved(network, folder)


def test_a_fine_tune_of_the_linear_layers_is_another_model(model: str, tmp_path: Path) -> None:
    one, other = (
        load_backbone(name, LoadOptions(dtype="fp32")).identity for name in (model, tuned(model, tmp_path / "tuned"))
    )
    assert one["fingerprint"] == other["fingerprint"]  # all that an earlier version looked at
    assert one["weights"] != other["weights"]
    with pytest.raises(UserError, match="was made for the model"):
        check_backbone(one, other, "the drafter")
    in_memory = [
        Backbone(load_network(one["id"], LoadOptions(dtype="fp32"))[0]).identity["weights"] for one in (one, other)
    ]
    assert in_memory[0] != in_memory[1]


def test_every_way_to_load_a_checkpoint_names_it_alike(model: str, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    assert bitsandbytes
    network, _ = load_network(model, LoadOptions(dtype="fp32"))
    adapter.attach(network, rank=4, alpha=8, dropout=0.0)
    for name, weight in network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapter.save(network, tmp_path / "adapter", "tiny")
    ways = [
        LoadOptions(dtype="fp32"),
        LoadOptions(dtype="bf16"),
        LoadOptions(dtype="fp32", engine="fast"),
        LoadOptions(quantize="bnb.nf4"),
        LoadOptions(quantize="bnb.int8"),
    ]
    found = [load_backbone(model, way).identity for way in ways]
    found.insert(3, load_backbone(model, LoadOptions(dtype="fp32"), adapter=tmp_path / "adapter").identity)
    assert len({one["weights"] for one in found}) == 1
    assert [one.get("rounding") for one in found] == [None] * 4 + ["bnb.nf4", "bnb.int8"]
    for one in found:
        check_backbone(found[0], one, "the run")


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the second has a tied lm_head
def test_every_form_of_a_checkpoint_and_the_weights_in_memory_are_named_alike(family: str, tmp_path: Path) -> None:
    network = tiny_model(family, vocab=128)
    forms = [
        saved(network, tmp_path / "whole"),
        saved(network, tmp_path / "parts", max_shard_size="40KB"),
        saved(network.bfloat16(), tmp_path / "half"),
    ]
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    old = tmp_path / "old"  # as before safetensors, with what files of that time hold beside weights
    shutil.copytree(tmp_path / "whole", old)
    weights = load_file(old / "model.safetensors")
    (old / "model.safetensors").unlink()
    torch.save({**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}, old / "pytorch_model.bin")
    digests = {weights_of(one) for one in [*forms, str(old)]}
    assert digests == {Backbone(network).identity["weights"]}
    assert None not in digests


def test_many_tensors_are_thinned_alike_in_any_number_of_files(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = weights_of(model)
    monkeypatch.setattr("medusa_cli.model.identity.MOST", 7)
    parts = saved(load_network(model, LoadOptions(dtype="fp32"))[0], tmp_path / "parts", max_shard_size="60KB")
    assert weights_of(model) == weights_of(parts) != whole


def test_a_checkpoint_of_pickles_is_refused_and_has_no_digest(model: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "legacy"))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert weights_of(str(folder)) is None
    with pytest.raises(UserError, match="could not be loaded: .*model.safetensors"):
        load_backbone(str(folder), LoadOptions(dtype="fp32"))


def test_a_random_model_is_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    for name in ("small", "other"):
        monkeypatch.setitem(__import__("medusa_cli.model.random_model", fromlist=["SHAPES"]).SHAPES, name, shape)
    one, again, other = (
        load_backbone(f"random:{name}", LoadOptions(dtype="fp32", engine="eager"))
        for name in ("small", "small", "other")
    )
    assert one.identity["weights"] == again.identity["weights"] != other.identity["weights"]


def test_a_run_from_before_the_digest_still_opens_and_learns_it(model: str, tmp_path: Path) -> None:
    run, identity = Run.open(f"{tmp_path}/run", create=True), load_backbone(model, LoadOptions(dtype="fp32")).identity
    run.bind(identity)
    marker = run.path / "run.json"
    old = read_json(marker)
    del old["backbone"]["weights"]
    write_json(marker, old)
    run.bind({**identity, "adapter": "an adapter is no part of what a run is bound to"})
    assert read_json(marker)["backbone"] == identity
    other = load_backbone(tuned(model, tmp_path / "tuned"), LoadOptions(dtype="fp32")).identity
    with pytest.raises(UserError, match=json.dumps(str(run.path))[1:-1]):
        run.bind(other)
