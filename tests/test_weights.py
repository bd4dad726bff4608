"""Damaged weights are found at load, by name, and nothing is allocated for sizes that no file has."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_cli.drafters import DRAFTERS, load_drafter
from medusa_cli.errors import UserError
from medusa_cli.runs.run import provenance
from tests.helpers import tiny_backbone

Tensors = dict[str, Tensor]


def saved(folder: Path, name: str = "medusa") -> Path:
    """The weights of a drafter with a draft vocabulary."""
    backbone, kind = tiny_backbone(), DRAFTERS[name]
    kind.create(backbone, 2, 1, "draft", torch.arange(7, 27)).save(folder, provenance(backbone.identity))
    return folder / kind.weights_file


def first(tensors: Tensors) -> str:
    """A matrix of the drafter's."""
    return next(name for name, one in sorted(tensors.items()) if one.dim() == 2)


def alter(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({first(tensors): change(tensors[first(tensors)])})


def poison(number: float) -> Callable[[Tensor], Tensor]:
    def change(one: Tensor) -> Tensor:
        one[0, 0] = number
        return one

    return change


def renamed(ids: Tensor) -> Callable[[Tensors], object]:
    """Other tokens for the draft vocabulary; EAGLE-3's files say them as distances from their places."""

    def change(tensors: Tensors) -> None:
        if "d2t" not in tensors:
            tensors.update(draft_ids=ids)
        else:
            tensors.update(d2t=ids if ids.is_floating_point() else ids.long() - torch.arange(len(ids)))

    return change


DAMAGE: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "nan": (alter(poison(float("nan"))), "numbers that are not finite"),
    "inf": (alter(poison(float("inf"))), "numbers that are not finite"),
    "int8": (alter(lambda one: one.to(torch.int8)), "is of type I8, not BF16"),
    "one row": (alter(lambda one: one[:1]), r"is of shape \[1, "),
    "transposed": (alter(lambda one: one[:, :3].contiguous()), "is of shape"),
    "missing": (lambda tensors: tensors.pop(first(tensors)), "is missing"),
    "ids equal": (renamed(torch.full((20,), 3, dtype=torch.int32)), "(draft_ids|d2t).* no set"),
    "ids out of range": (renamed(torch.arange(60, 80, dtype=torch.int32)), "(draft_ids|d2t).* no set"),
    "ids below 0": (renamed(torch.arange(-1, 19, dtype=torch.int32)), "(draft_ids|d2t).* no set"),
    "ids of floats": (renamed(torch.arange(20).float()), "is of type F32, not I(32|64)"),
    "ids too few": (renamed(torch.arange(1, dtype=torch.int32)), r"is of shape \[1\], not \[20\]"),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_whole_weights_load(tmp_path: Path, name: str) -> None:
    weights = load_file(saved(tmp_path, name))
    loaded = load_drafter(tmp_path, tiny_backbone()).named_weights()
    assert all(torch.equal(one, weights[key].float()) for key, one in loaded.items())


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", DRAFTERS)
def test_damaged_weights_are_named_and_refused(tmp_path: Path, name: str, damage: str) -> None:
    path = saved(tmp_path, name)
    change, message = DAMAGE[damage]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(UserError, match=message) as raised:
        load_drafter(tmp_path, tiny_backbone())
    assert path.name in str(raised.value)


def test_bytes_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for data in (b"", b"x" * 100_000, whole[:-1], (2**60).to_bytes(8, "little") + whole[8:]):
        path.write_bytes(data)
        with pytest.raises(UserError, match="cannot be read"):
            load_drafter(tmp_path, tiny_backbone())
    path.unlink()
    with pytest.raises(UserError, match="does not exist"):
        load_drafter(tmp_path, tiny_backbone())


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("medusa", "medusa_num_layers", 10**12, "expected int <= 16 at num_layers"),
        ("medusa", "medusa_num_heads", 2.5, "expected int | null, got float at medusa_num_heads"),
        ("medusa", "medusa_num_heads", 3, "tensor '2.1.weight' is missing"),
        ("medusa", "draft_vocab_size", 10**9, "draft_vocab_size"),
        ("medusa", "draft_vocab_size", 21, r"is of shape \[20"),
        ("medusa", "vocabulary", "all", "invalid enum value 'all' at vocabulary"),
        ("medusa", "hidden_size", "32", "expected int | null, got str at hidden_size"),
        ("medusa", "provenance", "x", "expected object, got str at provenance"),
        ("medusa", "provenance", {"backbone": {"id": ["x"]}}, "got array at provenance.backbone"),
        ("medusa", "drafter", ["medusa"], "got array at drafter"),
        ("hydra", "prefix_layers", 10**9, "expected int <= 4 at prefix_layers"),
        ("eagle", "taps", [9], "drafter.taps=[9]"),
        ("amphista", "attention_layers", -1, "expected int >= 0 at attention_layers"),
        ("firp", "layers", [1], "names 1 layers for 2 heads"),
        ("firp", "layers", ["x", "y"], "expected int, got str at layers"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_its_field(
    tmp_path: Path, kind: str, field: str, value: object, message: str
) -> None:
    saved(tmp_path, kind)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError) as raised:
        load_drafter(tmp_path, tiny_backbone())
    assert message.replace("\\", "") in str(raised.value)
