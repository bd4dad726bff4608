"""Files from anywhere, JSON and drafters' weights: bounded, of the types that are declared, refused in one line."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.data.conversation import read_conversations
from medusa_cli.distill import Records
from medusa_cli.drafters import DRAFTERS, load_drafter
from medusa_cli.drafters.io import save_drafter
from medusa_cli.errors import LONGEST, UserError
from medusa_cli.files.io import read_json, read_jsonl
from medusa_cli.runs.run import Run, provenance
from medusa_cli.train.log import Validated, read_log
from tests.helpers import FRESH, change_json, medusa, save_model, save_run, tiny_backbone

DEEP = "[" * 50_000 + "]" * 50_000
LONG = "9" * 5000


@pytest.mark.parametrize(
    "text", [DEEP, LONG, "1e999", "NaN", '{"a": {"b": "\\ud800"}}', "{", "  ", "{} {}"]
)
def test_bad_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(
        UserError, match=r"the file .*a\.json is empty, cut off or not JSON"
    ) as raised:
        read_json(tmp_path / "a.json", "the file")
    assert len(str(raised.value)) < 2 * LONGEST


def test_what_is_no_file_or_too_large_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "pipe", "not a JSON text file"),
        (tmp_path, "not a JSON text"),
        (tmp_path / "x", "exist"),
    ):
        with pytest.raises(UserError, match=message):
            read_json(path)
    (tmp_path / "large.json").write_text("[]" + " " * 100)
    monkeypatch.setattr("medusa_cli.files.io.MAX_BYTES", 100)
    with pytest.raises(UserError, match="is larger than"):
        read_json(tmp_path / "large.json")


def test_a_line_that_is_too_large_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.files.io.MAX_BYTES", 100)
    path = tmp_path / "lines.jsonl"
    path.write_text("1\n" + "2" * 250 + "\n3\nno\n")
    bad: list[int] = []
    assert list(read_jsonl(path, lambda number, reason: bad.append(number))) == [1, 3]
    assert bad == [2, 4]


@pytest.mark.parametrize("text", ["1\n2\n", "[1, 2]"])
def test_a_byte_order_mark_costs_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("\ufeff" + text, encoding="utf-8")
    assert list(read_jsonl(path, array=True)) == [1, 2]


def record_of(number: int) -> dict[str, Any]:
    """A line of two answers."""
    return {
        "id": f"c{number}",
        "messages": [],
        "tokens": [1, 2, 3, 4, 5, 6],
        "spans": [[1, 3], [4, 6]],
    }


CHANGES = [
    *({"id": id} for id in (["x"], {"a": 1}, 1.5)),
    *({"spans": spans} for spans in (["ab"], [None], [[1, None]], [[0, 2.5]])),
    *({"state_rows": rows} for rows in ([-3, 5], [0.5, 1], [0, 10**30], "ab")),
    *({"tokens": tokens} for tokens in ([1, -2], "abc")),
]
LINES = [
    *(json.dumps(record_of(1) | change) for change in CHANGES),
    DEEP,
    LONG,
    '{"id": "a", "id": "b"}',
]
LINES += ['{"tokens": ' + LONG + "}", '{"id": "torn", "mess', '{"conversations": []}', "[1]"]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[-30:])
def test_a_bad_line_is_passed_over_in_training_and_named_in_distilling(
    tmp_path: Path, line: str
) -> None:
    run = Run.open(f"{tmp_path}/run", create=True)
    lines = [json.dumps(record_of(0)), line, json.dumps(record_of(2))]
    run.distill_path.write_text("\n".join(lines) + "\n")
    before = run.distill_path.read_bytes()
    records, report = read_conversations(run.distill_path, tiny_backbone())
    assert len(records) == 2
    assert sum(report.skipped.values()) == 1
    with pytest.raises(UserError, match=r"distill\.jsonl line 2"):
        Records(run, 32, {})
    assert run.distill_path.read_bytes() == before


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("distill.jsonl", "states.bin"):
        run = Run.open(f"{tmp_path}/{name}", create=True)
        os.mkfifo(run.path / name)
        with pytest.raises(UserError, match="regular file"):
            Records(run, 32, {"seed": "x", "settings": {}})


def test_a_log_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    step = {"event": "validated", **dataclasses.asdict(Validated(1, 1.0, [1.0], [0.5], 3, 9, {}))}
    path = tmp_path / "train.jsonl"
    wrong = (
        {"step": "2"},
        {"head_losses": []},
        {"accuracies": [0.5, 0.5]},
        {"event": ["saved"]},
        {"event": "rested"},
    )
    without = ({key: value for key, value in step.items() if key != missing} for missing in step)
    for bad in (
        "[1]",
        DEEP,
        *map(json.dumps, without),
        *(json.dumps(step | fields) for fields in wrong),
    ):
        path.write_text(f"{json.dumps(step)}\n{bad}\n{json.dumps(step)}\n")
        assert read_log(path) == [step]
    path.write_bytes(b'{"event": "saved", "step": 1}\n\xff\xfe\n')
    assert read_log(path) == [{"event": "saved", "step": 1}]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return save_run(tmp_path / "run", save_model(tmp_path / "model"), calibrated=True)


FILES = {
    "run.json": ("chat", "--prompt", "w1"),
    "drafter/config.json": ("chat", "--prompt", "w1"),
    "tree.json": ("chat", "--prompt", "w1", "--tree", "static"),
    "calibration.json": ("tree", "--budget", "4"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "text", [DEEP, LONG, "[3]", "3", '{"backbone": 3, "accuracies": "x", "parents": 1}', "\udcff"]
)
def test_every_file_of_a_run_is_refused_in_one_line(run: Run, name: str, text: str) -> None:
    (run.path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    done = medusa(*FILES[name], "--run", run.path, exit_code=1)
    assert done.stderr.count("error: ") == 1, done.output
    assert "internal error" not in done.stderr
    assert str(run.path) in done.stderr.replace("\n", "")


Tensors = dict[str, Tensor]


def save(folder: Path, name: str = "medusa", int8: bool = False) -> Path:
    """Saves a drafter with a draft vocabulary; returns the path of its weights."""
    backbone, kind = tiny_backbone(), DRAFTERS[name]
    save_drafter(
        kind.create(backbone, 2, 1, "draft", torch.arange(7, 27)),
        folder,
        provenance(backbone.identity),
        int8,
    )
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
    "equal ids": (with_ids(torch.full((20,), 3, dtype=torch.int32)), "draft_ids"),
    "ids out of range": (with_ids(torch.arange(60, 80, dtype=torch.int32)), "draft_ids"),
    "ids below 0": (with_ids(torch.arange(-1, 19, dtype=torch.int32)), "draft_ids"),
    "float ids": (with_ids(torch.arange(20).float()), "is of type F32, not I(32|64)"),
    "too few ids": (with_ids(torch.arange(1, dtype=torch.int32)), r"is of shape \[1\], not \[20\]"),
}


@pytest.mark.quick("firp")
@pytest.mark.parametrize("name", FRESH)
def test_saved_weights_load(tmp_path: Path, name: str) -> None:
    weights = load_file(save(tmp_path, name))
    loaded = load_drafter(tmp_path, tiny_backbone()).named_weights()
    assert all(torch.equal(weight, weights[key].float()) for key, weight in loaded.items())


@pytest.mark.quick("eagle")
@pytest.mark.parametrize("name", FRESH)
def test_weights_in_8_bits_load_within_half_a_step(tmp_path: Path, name: str) -> None:
    exact = load_file(save(tmp_path / "bf16", name))
    rounded = load_file(save(tmp_path / "int8", name, int8=True))
    assert any(weight.dtype == torch.int8 for weight in rounded.values())
    for key, weight in load_drafter(tmp_path / "int8", tiny_backbone()).named_weights().items():
        groups = F.pad(weight.detach(), (0, -weight.shape[-1] % 32)).unflatten(-1, (-1, 32))
        half_a_step = groups.abs().amax(-1, keepdim=True) / 127 / 2 + 2**-8 * groups.abs()
        half_a_step = half_a_step.flatten(-2)[..., : weight.shape[-1]]
        assert ((weight - exact[key].float()).abs() <= half_a_step * 1.01).all(), key


@pytest.mark.quick("<lambda>-not finite")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scales: None, "is of type I8"),
        (lambda scales: scales[:1], "scale' is of shape"),
        (lambda scales: scales.float(), "scale' is of type F32"),
        (lambda scales: scales * torch.nan, "not finite"),
    ],
)
def test_damaged_scales_are_refused(
    tmp_path: Path, change: Callable[[Tensor], Tensor | None], message: str
) -> None:
    path = save(tmp_path, int8=True)
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith(".scale"))
    scales = change(tensors.pop(name))
    if scales is not None:
        tensors[name] = scales.contiguous()
    save_file(tensors, path)
    with pytest.raises(UserError, match=message):
        load_drafter(tmp_path, tiny_backbone())


@pytest.mark.quick(
    "eagle-missing",
    "eagle-too narrow",
    "hydra-float ids",
    "hydra-ids below 0",
    "medusa-missing",
    "medusa-nan",
    "medusa-too narrow",
)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FRESH)
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
        ("medusa", "medusa_num_layers", 10**12, "num_layers"),
        ("medusa", "medusa_num_heads", 2.5, "expected int | null, got float at medusa_num_heads"),
        ("medusa", "medusa_num_heads", 3, "tensor '2.1.weight' is missing"),
        ("medusa", "draft_vocab_size", 10**9, "draft_vocab_size"),
        ("medusa", "draft_vocab_size", 21, r"is of shape \[20"),
        ("medusa", "vocabulary", "all", "invalid enum value 'all' at vocabulary"),
        ("medusa", "hidden_size", "32", "expected int, got str at hidden_size"),
        ("medusa", "hidden_size", 10**12, "[1000000000000, 1000000000000]"),
        ("medusa", "provenance", "x", "expected object, got str at provenance"),
        ("medusa", "provenance", {"backbone": {"id": ["x"]}}, "got array at provenance.backbone"),
        ("medusa", "drafter", ["medusa"], "got array at drafter"),
        ("hydra", "prefix_layers", 10**9, "prefix_layers"),
        ("eagle", "taps", [9], "drafter.taps=[9]"),
        ("amphista", "attention_layers", -1, "attention_layers"),
        ("firp", "layers", [1], "names 1 layers for 2 heads"),
        ("firp", "layers", ["x", "y"], "expected int, got str at layers"),
    ],
)
def test_impossible_config_is_refused_by_its_field(
    tmp_path: Path, kind: str, field: str, value: object, message: str
) -> None:
    save(tmp_path, kind)
    change_json(tmp_path / "config.json", **{field: value})
    with pytest.raises(UserError) as raised:
        load_drafter(tmp_path, tiny_backbone())
    assert message.replace("\\", "") in str(raised.value)
