"""A backbone's identity: the same for every way to load a checkpoint, another one for other weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.files.io import read_json, write_json
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import load
from medusa_cli.model import lora as adapter
from medusa_cli.model.digest import weights_of
from medusa_cli.model.load import load_network
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.run import Run, check_backbone
from tests.helpers import attach_adapter, save_model, tiny_model, tiny_tokenizer

FP32 = LoadOptions(dtype="fp32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("identity") / "model", hidden=64, vocab=128)


def saved(network: torch.nn.Module, folder: Path, **options) -> str:
    network.save_pretrained(folder, **options)
    tiny_tokenizer(128).save_pretrained(folder)
    return str(folder)


def fine_tuned(model: str, folder: Path) -> str:
    """Saves the model with noise in its linear layers alone."""
    network, _ = load_network(ModelSource.of(model), FP32)
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data += 1e-2 * module.weight.data.std() * torch.randn_like(module.weight)
    return saved(network, folder)


@pytest.mark.slow
def test_fine_tune_of_linear_layers_has_another_identity(model: str, tmp_path: Path) -> None:
    original, tuned = (
        load_backbone(name, FP32).identity
        for name in (model, fine_tuned(model, tmp_path / "tuned"))
    )
    assert original["weights"] != tuned["weights"]
    with pytest.raises(UserError, match="the drafter"):
        check_backbone(original, tuned, "the drafter")


@pytest.mark.slow
def test_every_way_to_load_a_checkpoint_gives_the_same_digest(model: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    network, _ = load_network(ModelSource.of(model), FP32)
    attach_adapter(network)
    adapter.save(network, tmp_path / "adapter", "tiny")
    options = [FP32, LoadOptions(dtype="bf16"), LoadOptions(dtype="fp32", engine="native")]
    identities = [load_backbone(model, option).identity for option in options]
    identities.append(load_backbone(model, FP32, adapter=tmp_path / "adapter").identity)
    rounded = [LoadOptions(quantize=method) for method in ("bnb.nf4", "bnb.int8")]
    identities += [load_backbone(model, option).identity for option in rounded]
    assert len({identity["weights"] for identity in identities}) == 1
    assert [identity.get("rounding") for identity in identities] == [None] * 4 + [
        "bnb.nf4",
        "bnb.int8",
    ]
    for identity in identities:
        check_backbone(identities[0], identity, "the run")


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the second has a tied lm_head
def test_every_form_of_a_checkpoint_has_the_same_digest(family: str, tmp_path: Path) -> None:
    network = tiny_model(family, vocab=128)
    forms = [
        saved(network, tmp_path / "whole"),
        saved(network, tmp_path / "parts", max_shard_size="40KB"),
        saved(network.bfloat16(), tmp_path / "half"),
    ]
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert len({weights_of(ModelSource.of(form)) for form in forms}) == 1
    assert weights_of(ModelSource.of(forms[0]))


def test_sampled_tensors_do_not_depend_on_the_number_of_files(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = weights_of(ModelSource.of(model))
    monkeypatch.setattr("medusa_cli.model.digest.MAX_TENSORS", 7)
    parts = saved(
        load_network(ModelSource.of(model), FP32)[0], tmp_path / "parts", max_shard_size="60KB"
    )
    assert weights_of(ModelSource.of(model)) == weights_of(ModelSource.of(parts)) != whole


@pytest.mark.parametrize(
    "files", [[], {}, {"a": 3}, {"a": None, "b": "x"}, {"a": ["x"]}, {"a": "x" * 5000}, {"a": ""}]
)
def test_hostile_index_is_refused_by_its_name(model: str, tmp_path: Path, files: object) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "parts"))
    (folder / "model.safetensors").unlink()
    write_json(folder / "model.safetensors.index.json", {"weight_map": files} if files else {})
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        load_backbone(str(folder), FP32)


def test_pickled_checkpoint_is_refused_and_has_no_digest(model: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "pickled"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert weights_of(ModelSource.of(str(folder))) is None
    with pytest.raises(UserError, match=r"model.safetensors"):
        load_backbone(str(folder), FP32)


def test_random_model_is_identified_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("small", "other"):
        monkeypatch.setitem(load.SHAPES, name, (64, 32, 64, 2, 4, 2, 128))
    options = LoadOptions(dtype="fp32", engine="eager")
    small, again, other = (
        load_backbone(f"random:{name}", options) for name in ("small", "small", "other")
    )
    assert small.identity["weights"] == again.identity["weights"] != other.identity["weights"]


def test_run_without_a_digest_learns_it(model: str, tmp_path: Path) -> None:
    run, identity = Run.open(f"{tmp_path}/run", create=True), load_backbone(model, FP32).identity
    run.bind(identity)
    marker = run.path / "run.json"
    unbound = read_json(marker)
    del unbound["backbone"]["weights"]
    write_json(marker, unbound)
    run.bind({**identity, "adapter": "a run is not bound to an adapter"})
    assert read_json(marker)["backbone"] == identity
    other = load_backbone(fine_tuned(model, tmp_path / "tuned"), FP32).identity
    with pytest.raises(UserError, match=json.dumps(str(run.path))[1:-1]):
        run.bind(other)
