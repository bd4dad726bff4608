"""Damaged weights and configs of drafters are refused by name, and nothing is allocated for sizes that no file has."""

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


def save(folder: Path, name: str = "medusa") -> Path:
    """Saves a drafter with a draft vocabulary; returns the path of its weights."""
    backbone, kind = tiny_backbone(), DRAFTERS[name]
    kind.create(backbone, 2, 1, "draft", torch.arange(7, 27)).save(folder, provenance(backbone.identity))
    return folder / kind.weights_file


def changed(change: Callable[[Tensor], Tensor | None]) -> Callable[[Tensors], object]:
    """Returns a change of one matrix; None as its result removes it."""

    def damage(tensors: Tensors) -> None:
        name = next(name for name in sorted(tensors) if tensors[name].dim() == 2)
        matrix = change(tensors.pop(name))
        if matrix is not None:
            tensors[name] = matrix

    return damage


def with_ids(ids: Tensor) -> Callable[[Tensors], object]:
    """Returns a change of the draft vocabulary's ids."""

    def damage(tensors: Tensors) -> None:
        tensors["draft_ids"] = ids

    return damage


DAMAGE: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "nan": (changed(lambda matrix: matrix * torch.nan), "not finite"),
    "inf": (changed(lambda matrix: matrix + torch.inf), "not finite"),
    "int8": (changed(lambda matrix: matrix.to(torch.int8)), "is of type I8, not BF16"),
    "one row": (changed(lambda matrix: matrix[:1]), r"is of shape \[1, "),
    "too narrow": (changed(lambda matrix: matrix[:, :3].contiguous()), "is of shape"),
    "missing": (changed(lambda matrix: None), "is missing"),
    "equal ids": (with_ids(torch.full((20,), 3, dtype=torch.int32)), "draft_ids.* no set"),
    "ids out of range": (with_ids(torch.arange(60, 80, dtype=torch.int32)), "draft_ids.* no set"),
    "ids below 0": (with_ids(torch.arange(-1, 19, dtype=torch.int32)), "draft_ids.* no set"),
    "float ids": (with_ids(torch.arange(20).float()), "is of type F32, not I(32|64)"),
    "too few ids": (with_ids(torch.arange(1, dtype=torch.int32)), r"is of shape \[1\], not \[20\]"),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_saved_weights_load(tmp_path: Path, name: str) -> None:
    weights = load_file(save(tmp_path, name))
    loaded = load_drafter(tmp_path, tiny_backbone()).named_weights()
    assert all(torch.equal(weight, weights[key].float()) for key, weight in loaded.items())


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", DRAFTERS)
def test_damaged_weights_are_refused(tmp_path: Path, name: str, damage: str) -> None:
    path = save(tmp_path, name)
    change, message = DAMAGE[damage]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(UserError, match=message) as raised:
        load_drafter(tmp_path, tiny_backbone())
    assert path.name in str(raised.value)


def test_bytes_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
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
        ("medusa", "hidden_size", "32", "expected int, got str at hidden_size"),
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
def test_impossible_config_is_refused_by_its_field(
    tmp_path: Path, kind: str, field: str, value: object, message: str
) -> None:
    save(tmp_path, kind)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError) as raised:
        load_drafter(tmp_path, tiny_backbone())
    assert message.replace("\\", "") in str(raised.value)
