"""Weights as files hold them: lm_heads beside tied configs, published layouts, and packed files that follow them."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from medusa_cli.drafters.eagle import Eagle
from medusa_cli.drafters.io import load_drafter, load_kind, save_drafter
from medusa_cli.engine import describe, load_backbone, packed, packed_cache, packed_drafter
from medusa_cli.errors import UserError
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import Unsupported, usable_positions
from medusa_cli.model.weights import NetworkWeights, open_weights
from medusa_cli.runs.load_options import LoadOptions
from tests.helpers import attach, change_json, forward, save_network, tiny_model
from tests.models import WRAPPERS, tiny_network

TEXT = torch.arange(3, 33)
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
NATIVE = re.findall(r"^\| `(\w+)` \| `native`", PAGE.read_text(), re.MULTILINE)
# The native types whose published files transformers converts.
CONVERTED = (
    "qwen2_moe", "qwen3_moe", "mixtral", "phimoe", "olmoe", "flex_olmo", "glm4_moe", "exaone_moe",
    "ernie4_5_moe", "hunyuan_v1_moe", "dots1", "mellum", "solar_open", "sarvam_moe", "granitemoe",
    "granitemoeshared", "cohere2_moe", "flint", "qwen3_5_text", "qwen3_5_moe_text", "gemma3", "qwen3_vl_moe",
    "qwen3_5", "qwen2_5_vl", "mistral3", "lfm2_vl", "internvl", "llava",
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the cache folder, which is empty."""
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def load(path: str | Path, **options: Any) -> Backbone:
    return load_backbone(str(path), LoadOptions(dtype="fp32", **options))


def logits_of(backbone: Backbone) -> Tensor:
    return forward(backbone, TEXT).logits.clone()


@torch.inference_mode()
def own_logits(network: Any) -> Tensor:
    """Returns a network's own logits, before a backbone gives it other attention."""
    logits: Tensor = network(TEXT[None]).logits[0]
    return logits


def assert_computes(backbone: Backbone, network: Any) -> None:
    """Asserts that a backbone gives a network's own logits."""
    assert_close(backbone, own_logits(network))


def assert_close(backbone: Backbone, expected: Tensor) -> None:
    assert float((logits_of(backbone) - expected).norm() / expected.norm()) < 1e-4


# ---- lm_heads


def rewrite_head(folder: Path, head: str) -> None:
    """Writes a saved network's embeddings as they may be tied: without an lm_head, beside it, or as the lm_head."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    [lm_head] = [name for name in tensors if name.endswith("lm_head.weight")]
    [embeddings] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    if head == "none":
        del tensors[lm_head]
    if head == "same":
        tensors[lm_head] = tensors[embeddings].clone()
    if head == "only":
        tensors[lm_head] = tensors.pop(embeddings)
    save_file(tensors, file, {"format": "pt"})


def set_tied(folder: Path, top: bool | None, inner: bool | None = None) -> None:
    """Sets `tie_word_embeddings` of a saved config and of its text part; None removes it."""

    def put(fields: dict[str, Any], value: bool | None) -> None:
        fields.pop("tie_word_embeddings", None)
        if value is not None:
            fields["tie_word_embeddings"] = value

    def change(fields: dict[str, Any]) -> None:
        put(fields, top)
        if "text_config" in fields:
            put(fields["text_config"], inner)

    change_json(folder / "config.json", change)


@pytest.mark.quick("qwen2")
@pytest.mark.parametrize(
    "kind", ["qwen2", "gemma2", "cohere2", *sorted(set(WRAPPERS) & set(NATIVE))]
)
def test_a_head_of_its_own_is_used_whatever_the_config_says(kind: str, tmp_path: Path) -> None:
    network = tiny_network(kind)
    path = save_network(network, tmp_path / "model")
    for top, inner in ((True, True), (False, None)):
        set_tied(tmp_path / "model", top, inner)
        backbone = load(path, engine="native")
        assert backbone.engine.model.packed.memory is not None
        assert_computes(backbone, network)
        own = network.get_output_embeddings().weight
        assert torch.equal(backbone.lm_head_weight, own)


@pytest.mark.quick("qwen2-same-native")
@pytest.mark.parametrize(
    ("kind", "head", "engine"),
    [
        *(
            ("qwen3_5", "none", "native"),
            ("qwen3_5", "none", "eager"),
            ("gemma3", "none", "native"),
        ),
        *(("llava", "none", "native"), ("lfm2_vl", "none", "native"), ("qwen2", "same", "native")),
        *(("qwen2", "only", "native"), ("qwen3_5", "only", "native"), ("gemma4", "none", "native")),
    ],
)
def test_a_tied_head_is_the_embeddings(kind: str, head: str, engine: str, tmp_path: Path) -> None:
    """Some wrappers are tied at the top alone, and classes of transformers differ in which part they read."""
    network = tiny_network(kind)
    path = save_network(network, tmp_path / "model")
    rewrite_head(tmp_path / "model", head)
    network.get_output_embeddings().weight = network.get_input_embeddings().weight
    for top, inner in ((True, None), (True, False)):
        set_tied(tmp_path / "model", top, inner)
        assert_computes(load(path, engine=engine), network)


def test_a_missing_head_that_nothing_ties_is_named(tmp_path: Path) -> None:
    path = save_network(tiny_network("qwen2"), tmp_path)
    rewrite_head(tmp_path, "none")
    set_tied(tmp_path, False)
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        load(path)


@pytest.mark.quick("False-gemma3", "True-gemma4")
@pytest.mark.parametrize("kind", ["qwen2", "gemma3", "gemma4", "qwen3_5", "lfm2_vl"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_network_in_memory_is_what_it_shares(kind: str, tied: bool) -> None:
    network = tiny_network(kind)
    if tied:
        network.get_output_embeddings().weight = network.get_input_embeddings().weight
    for part in (network.config, network.config.get_text_config()):
        part.tie_word_embeddings = not tied
    expected = own_logits(network)
    backbone = Backbone(network)
    attach(backbone, "native")
    assert_close(backbone, expected)


# ---- published layouts


def published(network: Any) -> dict[str, Tensor]:
    """Returns a network's tensors in the layout of its maker's files: transformers' conversions, reversed."""
    conversions = get_model_conversion_mapping(network, add_legacy=False)
    for conversion in conversions:
        for operation in getattr(conversion, "operations", ()):
            operation.check_dims = False  # so that saving transposes, too
    network._weight_conversions = conversions
    tensors = revert_weight_conversion(network, network.state_dict())
    return {name: values.clone().contiguous() for name, values in tensors.items()}


@pytest.mark.quick("mixtral", "qwen3_vl_moe")
@pytest.mark.parametrize("kind", CONVERTED)
def test_published_layouts_are_read_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    network = tiny_network(kind)
    for name, values in network.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            values.copy_(torch.linspace(-1, 1, values.numel()).view_as(values))
    path = save_network(network, tmp_path / "model")
    save_file(published(network), tmp_path / "model" / "model.safetensors", {"format": "pt"})
    backbone = load(path, engine="native")
    assert backbone.engine.model.packed.memory is not None
    assert_computes(backbone, network)


@pytest.mark.slow
def test_no_native_type_with_a_published_layout_is_left_out() -> None:
    with_layout = {
        kind
        for kind in NATIVE
        if get_model_conversion_mapping(tiny_network(kind), add_legacy=False)
    }
    assert with_layout == set(CONVERTED)


# ---- packed files


def packed_files(cache: Path) -> list[Path]:
    folder = cache / "packed"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def save_llama(folder: Path, seed: int = 0) -> str:
    return save_network(tiny_model(seed=seed, vocab=128), folder)


def edit(path: str, name: str, times: tuple[int, int] = (0, 0)) -> None:
    """Negates one tensor of a saved model in its place, and sets the times of its file."""
    file = Path(path) / "model.safetensors"
    with safe_open(file, "pt") as whole:
        values = whole.get_tensor(name)
    before, after = (own.view(torch.uint8).numpy().tobytes() for own in (values, -values))
    data = bytearray(file.read_bytes())
    place = data.find(before)
    assert place > 0
    data[place : place + len(before)] = after
    file.write_bytes(data)
    os.utime(file, times)


def test_an_edit_that_keeps_size_and_time_is_packed_anew(tmp_path: Path, cache: Path) -> None:
    path = save_llama(tmp_path / "model")
    os.utime(Path(path) / "model.safetensors", (0, 0))
    before = load(path)
    for name in ("model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        edit(path, name)
        after = load(path)
        network = AutoModelForCausalLM.from_pretrained(path).eval()
        assert_computes(after, network)
        assert not torch.equal(logits_of(before), logits_of(after))
        assert before.identity["weights"] != after.identity["weights"]
        assert len(packed_files(cache)) == 1
        before = after


def test_a_copy_with_the_same_times_has_packed_weights_of_its_own(
    tmp_path: Path, cache: Path
) -> None:
    first, second = (save_llama(tmp_path / name) for name in "ab")
    edit(second, "model.layers.1.self_attn.o_proj.weight")
    os.utime(Path(first) / "model.safetensors", (0, 0))
    assert not torch.equal(logits_of(load(first)), logits_of(load(second)))
    assert len(packed_files(cache)) == 2


def test_another_config_for_the_same_files_is_packed_anew(tmp_path: Path, cache: Path) -> None:
    path = save_llama(tmp_path / "model")
    load(path)
    fields = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}
    change_json(
        Path(path) / "config.json", **fields, hidden_activation="silu", tie_word_embeddings=False
    )
    network = AutoModelForCausalLM.from_pretrained(path).eval()
    assert type(network).__name__ == "GemmaForCausalLM"
    assert_computes(load(path, engine="native"), network)


def test_a_mended_reader_packs_anew(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_llama(tmp_path / "model")
    load(path)
    [earlier] = packed_files(cache)
    (cache / "packed" / f"{'0' * 24}.bin").write_bytes(b"of an earlier version")
    for name in packed_cache.DRAFTER_CODE:
        assert list(Path(packed_cache.__file__).parent.parent.glob(name))
    monkeypatch.setattr(packed_cache, "_code_stamp", lambda code: "mended")
    load(path)
    [later] = packed_files(cache)
    assert later != earlier


@pytest.mark.slow
def test_packed_weights_of_a_model_that_is_gone_are_removed(tmp_path: Path, cache: Path) -> None:
    first, second = (save_llama(tmp_path / name, seed) for seed, name in enumerate("ab"))
    load(first)
    load(first, quantize="int8")
    shutil.rmtree(first)
    load(second)
    assert len(packed_files(cache)) == 1


def flip(file: Path) -> None:
    """Changes one byte in the middle of a file, and keeps its time of modification."""
    stat = file.stat()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_flipped_bit_of_packed_weights_is_noticed(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_llama(tmp_path / "model")
    expected = logits_of(load(path))
    [file] = packed_files(cache)
    whole = file.read_bytes()
    flip(file)
    assert torch.equal(logits_of(load(path)), expected)
    assert file.read_bytes() == whole
    assert len([line for line in caplog.messages if "damaged" in line]) == 1


def test_digests_of_packed_weights_are_checked_once_per_start_of_the_machine(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[int] = []
    check = packed._check_digests
    monkeypatch.setattr(packed, "_check_digests", lambda *args: checks.append(1) or check(*args))
    path = save_llama(tmp_path / "model")
    load(path)
    load(path)
    assert not checks
    boot = tmp_path / "boot_id"
    boot.write_text("another")
    monkeypatch.setattr(packed_cache, "BOOT", boot)
    load(path)
    load(path)
    assert len(checks) == 1
    shutil.rmtree(cache / "checked")
    (cache / "checked").write_text("a file in the folder's place")
    load(path)
    load(path)
    assert len(checks) == 3


def test_a_model_that_the_engine_refuses_is_not_packed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_network(tiny_network("qwen3_moe"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "experts" in name]:
        tensors[name] = tensors[name].T.contiguous()  # as no file of this type has them
    save_file(tensors, file, {"format": "pt"})
    monkeypatch.setattr(packed, "keep_packed", None)
    with pytest.raises(UserError, match="experts"):
        load(path, engine="native")
    assert not packed_files(cache)


def test_packed_weights_of_damaged_models_are_removed(tmp_path: Path, cache: Path) -> None:
    path = save_llama(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][:] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match="not finite"):
        load(path)
    assert not packed_files(cache)


@pytest.mark.quick("gpt_oss")
@pytest.mark.parametrize(
    "kind", ["llama", "phi3", "gpt_oss", "mixtral", "qwen3_5", "gemma4", "stablelm"]
)
def test_shapes_before_packing_are_those_of_packed_weights(kind: str, tmp_path: Path) -> None:
    path = save_network(tiny_network(kind), tmp_path / "model")
    backbone = load(path, engine="native")
    model = backbone.engine.model
    for weights in (
        open_weights(ModelSource.of(path), backbone.model),
        NetworkWeights(backbone.model),
    ):
        shapes = packed.shapes_of(model.description, weights)
        assert shapes.matrices == model.shapes.matrices
        assert shapes.vectors == model.shapes.vectors


def test_packed_weights_are_checked_by_name(tmp_path: Path, cache: Path) -> None:
    backbone = load(save_llama(tmp_path / "model"))
    file = backbone.engine.model.packed.path
    packed.check_packed(file)
    flip(file)
    with pytest.raises(ValueError, match="changed"):
        packed.check_packed(file)
    assert not packed_files(cache)


def save_eagle(backbone: Backbone, folder: Path, matrices: str) -> Path:
    """Writes an untrained drafter with a draft vocabulary, which scores by the lm_head if it has no matrices."""
    torch.manual_seed(1)
    drafter = Eagle.create(backbone, 3, 1, "draft", torch.arange(1, 128, 2), matrices=matrices)
    save_drafter(drafter, folder, {})
    return folder


def tiles_of(drafter: Any, backbone: Backbone) -> list[bytes]:
    """Returns the packed matrices of an EAGLE drafter."""
    drafter.score(backbone, 0, torch.zeros(1, drafter.config.hidden_size))
    linear = [drafter.packed("fc"), *drafter._scorers]
    layer, _ = drafter.packed("midlayer")._owned
    matrices = [*(part.matrix for part in linear), *layer.values()]
    return [matrix.tiles.tobytes() for matrix in matrices]


@pytest.mark.slow
@pytest.mark.parametrize("matrices", ["none", "one"])
def test_a_drafter_is_packed_once_into_the_same_bits(
    matrices: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load(save_network(tiny_model(layers=4, hidden=64, vocab=128), tmp_path / "model"))
    folder = save_eagle(backbone, tmp_path / "drafter", matrices)
    expected = tiles_of(load_kind(Eagle, folder, backbone), backbone)
    assert len(packed_files(cache)) == 1
    assert tiles_of(load_drafter(folder, backbone), backbone) == expected
    files = [file for file in packed_files(cache) if file != backbone.engine.packed_path]
    assert len(files) == 3
    with monkeypatch.context() as patch:
        patch.setattr(packed_drafter, "drafting_matrix", None)
        assert tiles_of(load_drafter(folder, backbone), backbone) == expected
    for file in files:
        flip(file)
    assert tiles_of(load_drafter(folder, backbone), backbone) == expected
    for file in files:
        packed.check_packed(file)


@pytest.mark.slow
def test_a_changed_drafter_is_packed_anew(tmp_path: Path, cache: Path) -> None:
    backbone = load(save_network(tiny_model(layers=4, hidden=64, vocab=128), tmp_path / "model"))
    folder = save_eagle(backbone, tmp_path / "drafter", "one")
    before = tiles_of(load_drafter(folder, backbone), backbone)
    files = packed_files(cache)
    edit(str(folder), "lm_head.weight")
    drafter = load_drafter(folder, backbone)
    after = tiles_of(drafter, backbone)
    assert after == tiles_of(load_kind(Eagle, folder, backbone), backbone) != before
    assert len({*files} & {*packed_files(cache)}) == 1
    # Weights that may change in memory are no longer those of the files.
    drafter.train().requires_grad_(False).fc.weight.neg_()
    assert tiles_of(drafter.eval(), backbone) != after
    assert tiles_of(load_drafter(folder, backbone), backbone) == after
    shutil.rmtree(folder)
    load(save_llama(tmp_path / "other"))
    assert len(packed_files(cache)) == 2


# ---- layers that the config does not count


@pytest.mark.quick("gpt2")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_layers_that_the_config_does_not_count_are_told(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_network(tiny_network(kind), tmp_path)
    load(path)
    assert not caplog.messages or "layers up to" not in caplog.text

    def cut(fields: dict[str, Any]) -> None:
        text = fields.get("text_config", fields)
        text["n_layer" if kind == "gpt2" else "num_hidden_layers"] = 2
        text["layer_types"] = (text.get("layer_types") or [])[:2] or None

    change_json(tmp_path / "config.json", cut)
    load(path)
    load(path)
    [line] = [line for line in caplog.messages if "layers up to" in line]
    assert "3" in line
    assert "2" in line
    assert "num_hidden_layers" in line


@pytest.mark.slow
def test_a_layer_that_predicts_later_tokens_is_left_out_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_network(tiny_network("glm4_moe"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
    tensors["model.layers.4.self_attn.q_proj.weight"] = torch.zeros(64, 64)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    load(path)
    assert "layers up to" not in caplog.text


# ---- configs


def test_positions_end_where_the_rope_of_some_layers_changes() -> None:
    config = tiny_network("gemma3_text").config
    assert usable_positions(config) == 512
    kinds = dict(config.rope_parameters)
    changing = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    original = {"original_max_position_embeddings": 128}
    config.rope_parameters = kinds | {"full_attention": changing | original}
    assert usable_positions(config) == 128
    config.rope_parameters = kinds | {"full_attention": changing}
    assert usable_positions(config) == 512


def test_keys_narrower_than_a_head_are_not_described() -> None:
    network = tiny_network("llama")
    network.model.layers[0].self_attn.k_proj = torch.nn.Linear(64, 8, bias=False)
    reader = describe._Reader(network)
    parts = reader._parts_of(network.model.layers[0], None)
    with pytest.raises(Unsupported, match="heads"):
        reader._heads_of(parts, None)
