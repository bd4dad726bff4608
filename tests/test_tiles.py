"""Quantized weights on the torch engine: tiles as tensors, networks over them, and the kernel with the CPU's bits."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from medusa_cli.engine import (
    exact,
    load,
    load_backbone,
    memory,
    plain_kernels,
    tile_network,
)
from medusa_cli.engine.exact import ExactPath, difference
from medusa_cli.engine.packed import pack_in_memory
from medusa_cli.engine.tile_network import network_of
from medusa_cli.engine.tiles import LAYOUTS, TileLinear, Tiles
from medusa_cli.engine.torch_layers import TorchEngine, stored_bytes
from medusa_cli.engine.twin import verified
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone
from medusa_cli.model.weights import NetworkWeights
from medusa_cli.native import Format, PackedMatrix
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.tree import Tree
from tests.device import NAME, Device
from tests.helpers import (
    PROMPT,
    answer,
    attach,
    decoder_of,
    forward,
    generate_plain,
    medusa,
    medusa_drafter,
    medusa_json,
    save_model,
    tiny_model,
    tiny_tokenizer,
    tokens_of,
)
from tests.test_gguf import Kind, write_gguf
from tests.test_native import random_matrix, random_rows

CPU = torch.device("cpu")
EACH_FORMAT = pytest.mark.parametrize("format", LAYOUTS, ids=lambda format: format.name)
COUNTS = (1, 2, 7, 8, 16, 33, 64)
IDS = torch.arange(5, 30)


def tiles_of(format: Format, outputs: int = 100, inputs: int = 768) -> tuple[PackedMatrix, Tiles]:
    packed = PackedMatrix.pack(random_matrix(format, outputs, inputs), None, int8_rows=True)
    return packed, Tiles.of(packed, CPU)


@EACH_FORMAT
def test_tiles_hold_the_numbers_of_the_packed_matrix_in_its_bytes(format: Format) -> None:
    packed, tiles = tiles_of(format)
    expected = torch.from_numpy(packed.embed(np.arange(100)))
    assert torch.equal(torch.cat([*tiles.blocks(torch.float32)]), expected)
    ids = torch.tensor([99, 0, 17])
    assert torch.equal(tiles.rows(ids, torch.float32), expected[ids])
    assert stored_bytes(tiles) == packed.nbytes


def test_a_format_without_kernels_is_refused() -> None:
    packed = PackedMatrix.pack(random_matrix(Format.MXFP4, 16, 32))
    with pytest.raises(load.Unsupported, match="MXFP4"):
        Tiles.of(packed, CPU)


def small_rows(count: int, inputs: int) -> np.ndarray:
    """Returns random rows of which one is nearly zero, and one has groups of zeros."""
    x = random_rows(count, inputs)
    x[0] = 1e-38
    x[-1, :40] = 0
    return x


@EACH_FORMAT
def test_the_twin_has_the_native_engine_s_bits(format: Format) -> None:
    packed, tiles = tiles_of(format)
    x = small_rows(20, 768)
    ours = plain_kernels.tile_matmul(torch.from_numpy(x), [tiles])
    assert np.array_equal(ours.numpy(), packed.multiply(x))


@pytest.fixture(scope="module")
def tile_matmul() -> Iterator[Any]:
    """Returns the kernel, under Triton's interpreter if there is no GPU."""
    if find_spec("triton") is None or torch.cuda.is_available():
        pytest.skip("needs triton, and stands for a GPU where there is none")
    from triton.runtime.interpreter import _interpreter

    if not hasattr(_interpreter, "fma_fp32"):
        pytest.skip("this Triton's interpreter rounds twice where a GPU rounds once")
    from medusa_cli.engine import tile_kernels

    yield tile_kernels.tile_matmul


@pytest.mark.quick("IQ4_XS", "Q4_1")
@EACH_FORMAT
def test_the_kernel_has_the_native_engine_s_bits_at_any_number_of_rows(
    format: Format, tile_matmul: Any
) -> None:
    packed, tiles = tiles_of(format, 40, 256 if LAYOUTS[format].units > 1 else 96)
    # The other formats differ only in how they are unpacked.
    counts = COUNTS if format == Format.Q4_K else (1, 17)
    x = small_rows(counts[-1], tiles.shape[1])
    expected = torch.from_numpy(packed.multiply(x))
    rows = torch.from_numpy(x)
    for count in counts:
        assert torch.equal(tile_matmul(rows[:count], [tiles]), expected[:count])
    assert torch.equal(tile_matmul(rows.roll(7, 0), [tiles]), expected.roll(7, 0))
    halves, bias = rows[:3].bfloat16(), torch.randn(40)
    biased = PackedMatrix(packed.format, packed.shape, packed.tiles, bias.numpy(), True)
    expected = torch.from_numpy(biased.multiply(halves.float().numpy()))
    assert torch.equal(tile_matmul(halves, [tiles], bias), expected)
    assert torch.equal(tile_matmul(halves, [tiles], bias, torch.half), expected.half())


def test_joined_layers_are_the_layers_one_after_another(tile_matmul: Any) -> None:
    kinds = (Format.Q4_K, Format.Q4_K, Format.Q6_K)
    tiles = [
        tiles_of(kind, outputs, 256)[1] for kind, outputs in zip(kinds, (32, 16, 40), strict=True)
    ]
    x = torch.from_numpy(random_rows(3, 256))
    for multiply in (None, plain_kernels.tile_matmul, tile_matmul):
        biases = [None, torch.randn(16), torch.randn(40)]
        linears = [
            TileLinear([part], bias, multiply) for part, bias in zip(tiles, biases, strict=True)
        ]
        joined = TileLinear.joined(linears)
        assert len(joined.parts) == 2
        assert torch.equal(joined(x), torch.cat([linear(x) for linear in linears], dim=1))


def test_a_layer_reads_nothing_from_the_device() -> None:
    _, tiles = tiles_of(Format.IQ4_XS, 40, 256)
    x = torch.from_numpy(random_rows(3, 256))
    expected = TileLinear([tiles], torch.ones(40))(x)
    with Device() as device:
        layer = device.put(TileLinear([tiles], torch.ones(40)))
        remote = x.to(NAME)
        with device.capture():
            ours = layer(remote)
        assert torch.equal(ours.cpu(), expected)


def backbone_over_tiles(family: str, quantize: str, int8_rows: bool = False) -> Backbone:
    """Returns a tiny model on the torch engine over packed weights."""
    network = tiny_model(family)
    packed = pack_in_memory(verified(network), NetworkWeights(network), quantize, True)
    tiled, head = network_of(
        network.config, verified(network), packed, torch.float32, CPU, int8_rows
    )
    tiled.generation_config = network.generation_config
    backbone = Backbone(tiled, tiny_tokenizer(), lm_head=head)
    attach(backbone, "torch")
    return backbone


def native_backbone(family: str, quantize: str, rows: str) -> Backbone:
    backbone = Backbone(tiny_model(family), tiny_tokenizer())
    attach(backbone, "native", quantize=quantize, rows=rows)
    return backbone


@pytest.fixture
def int8_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets layers over tiles multiply by the kernel's twin."""
    monkeypatch.setattr(tile_network, "_kernel_for", lambda *args: plain_kernels.tile_matmul)


def close(ours: Tensor, expected: Tensor, error: float) -> bool:
    return bool((ours - expected).norm() <= error * expected.norm())


@pytest.mark.quick("qwen2-int8")
@pytest.mark.parametrize("quantize", ["int4", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_logits_are_those_of_the_native_engine(family: str, quantize: str, int8_rows: None) -> None:
    for int8, rows in ((False, "fp32"), (True, "int8")):
        backbone = backbone_over_tiles(family, quantize, int8)
        native = native_backbone(family, quantize, rows)
        assert close(
            forward(backbone, IDS).logits, forward(native, IDS).logits, 1e-2 if int8 else 1e-4
        )
        ids = torch.tensor([3, 40])
        weight, _ = backbone.lm_head_rows(ids)
        assert torch.equal(weight, torch.from_numpy(native.engine.model.head.embed(ids.numpy())))


def test_layers_hold_four_bits_and_nothing_is_kept_twice() -> None:
    engine = backbone_over_tiles("llama", "int4").engine
    whole = sum(weight.numel() for weight in tiny_model().model.layers.parameters())
    layers = sum(layer.nbytes for layer in engine.layers)
    assert layers < 0.65 * whole
    assert engine.weight_bytes == layers + stored_bytes(engine.head)
    kept = stored_bytes(engine.backbone.model.model.layers)
    assert kept < 0.1 * layers


@pytest.mark.quick("True")
@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_answers_with_drafts_are_those_of_plain_decoding(graphs: bool) -> None:
    backbone = backbone_over_tiles("qwen3", "int4")
    plain = tokens_of(generate_plain(backbone, PROMPT, max_new_tokens=20, stop_ids=()))
    decoder = decoder_of(backbone, medusa_drafter(backbone), Tree.dense([3, 2]), cuda_graphs=graphs)
    drafted = answer(decoder, PROMPT, max_new_tokens=20, stop_ids=())
    assert tokens_of(drafted) == plain


def test_the_exact_path_runs_over_tiles(int8_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "BEFORE", 70)
    engine = backbone_over_tiles("qwen3", "int4", True).engine
    assert isinstance(engine, TorchEngine)
    engine.exact = ExactPath(engine, plain_kernels)
    assert difference(engine) is None


def test_a_kernel_that_does_not_run_or_is_wrong_is_not_used(
    tile_matmul: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = tiny_model()
    packed = pack_in_memory(verified(network), NetworkWeights(network), "int4", True)
    _, tiles = tiles_of(Format.Q4_K)
    assert tile_network.difference(plain_kernels.tile_matmul, tiles) is None
    wrong = tile_network.difference(
        lambda x, parts: 1.1 * plain_kernels.tile_matmul(x, parts), tiles
    )
    assert wrong is not None
    assert "%" in wrong
    assert tile_network._kernel_for(packed, CPU) is None
    # A GPU's driver is missing here.
    assert tile_network._kernel_for(packed, torch.device("cuda")) is None
    assert "dequantized" in caplog.text


@pytest.mark.quick("Q4_1")
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q5_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_gguf_file_is_loaded_in_tiles(tmp_path: Path, kind: Kind) -> None:
    path = tmp_path / "tiny.gguf"
    network = write_gguf(path, kind)
    source = ModelSource.of(str(path))
    backbone = load._load_tiles(load._Inputs(source, LoadOptions(dtype="fp32")), CPU)
    assert isinstance(backbone.engine, TorchEngine)
    assert close(forward(backbone, IDS).logits, network(IDS[None]).logits[0], 1e-4)
    assert type(backbone.engine.layers[0].down) is TileLinear
    assert backbone.identity == load_backbone(str(path)).identity


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_checkpoint_is_quantized_as_on_a_cpu(tmp_path: Path, quantize: str) -> None:
    path = save_model(tmp_path / "model")
    options = LoadOptions(dtype="fp32", quantize=quantize)
    source = ModelSource.of(path)
    backbone = load._load_tiles(load._Inputs(source, options), CPU)
    assert backbone.engine.quantize == quantize
    assert close(
        forward(backbone, IDS).logits, forward(load_backbone(path, options), IDS).logits, 1e-4
    )


def test_options_choose_the_engine_of_the_device() -> None:
    int4 = LoadOptions(quantize="int4")
    assert load._engine_of(int4, CPU) == "native"
    assert load._engine_of(int4, torch.device("cuda")) == "torch"
    assert load._engine_of(LoadOptions(kv="fp16"), torch.device("cuda")) == "native"
    LoadOptions(engine="torch", quantize="int4", exact=True)
    for refused in ({"engine": "torch", "kv": "fp16"}, {"engine": "eager", "quantize": "int4"}):
        with pytest.raises(UsageError):
            LoadOptions(**refused)  # type: ignore[arg-type]


def needs(path: str, **options: Any) -> int:
    needed = memory.memory_of(ModelSource.of(path), LoadOptions(dtype="bf16", **options), CPU)
    assert needed is not None
    assert needed.total > needed.weights
    return needed.weights


def test_memory_is_told_before_loading(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", hidden=64)
    network = load_backbone(path, LoadOptions(engine="eager", dtype="bf16")).model
    whole = sum(weight.nbytes for weight in network.parameters())
    assert needs(path) == whole
    for quantize in ("int4", "int8"):
        source, options = ModelSource.of(path), LoadOptions(quantize=quantize, dtype="bf16")
        engine = load._load_tiles(load._Inputs(source, options), CPU).engine
        held = engine.weight_bytes + engine.backbone.embedding.weight.nbytes
        assert abs(needs(path, quantize=quantize) - held) < 0.05 * held
    assert needs(path, quantize="bnb.nf4") < 0.7 * whole
    file = tmp_path / "tiny.gguf"
    write_gguf(file, Kind.Q4_0)
    inputs = load._Inputs(ModelSource.of(str(file)), LoadOptions(dtype="bf16"))
    engine = load._load_tiles(inputs, CPU).engine
    held = engine.weight_bytes + engine.backbone.embedding.weight.nbytes
    assert abs(needs(str(file)) - held) < 0.05 * held
    assert needs("random:1b") > 2e9


def test_machine_tells_the_memory_on_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("machine", "--model", model, "--context", "9")
    assert medusa_json(*words)["memory"] is None
    # The model itself is loaded on the CPU.
    monkeypatch.setattr("medusa_cli.model.load.resolve_device", lambda device: "cuda")
    assert medusa_json(*words)["memory"]["weights"] > 0
    assert "GB (weights" in medusa(*words).stdout


def test_a_model_that_does_not_fit_is_refused_with_numbers_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path / "model")
    monkeypatch.setattr(load, "resolve_device", lambda device: "cuda")
    monkeypatch.setattr(memory, "free_memory", lambda device: 10_000_000)
    monkeypatch.setattr(load, "load_network", None)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "model.safetensors").write_bytes(bytes(20_000_000))
    with pytest.raises(UserError, match=r"0\.01 GB free") as refused:
        load_backbone(path, drafter=drafter)
    assert "drafter 0.02" in refused.value.message
    assert refused.value.remedy
    with pytest.raises(UserError, match="GB"):
        load_backbone("random:1b")
