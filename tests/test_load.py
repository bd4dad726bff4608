"""Loading models and adapters: damaged, unsupported or foreign ones are refused by name, and no pickle is opened."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load, save_file

from medusa_cli import Medusa
from medusa_cli.device import has_cuda
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files import adapter
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import lora
from medusa_cli.model.load import load_network, resolve_device, use_device
from medusa_cli.runs.load_options import LoadOptions
from tests.helpers import (
    change_json,
    forward,
    generate_plain,
    medusa,
    python,
    save_model,
    save_network,
    tokens_of,
)

FP32 = LoadOptions(dtype="fp32")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MATRIX = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(save_model(tmp_path / "model"))


def assert_refused(model: Path, match: str, adapter: Path | None = None) -> None:
    with pytest.raises(UserError, match=match) as raised:
        load_backbone(str(model), FP32, adapter=adapter)
    assert len(str(raised.value).splitlines()) == 1


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[MATRIX][3, 5] = float("inf")


@pytest.mark.quick("infinite-not finite")
@pytest.mark.parametrize(
    ("damage", "match"),
    [(infinite, "not finite"), (lambda tensors: tensors.pop(MATRIX), f"lack 1 tensors.*{MATRIX}")],
)
def test_damaged_tensors_are_refused(
    model: Path, damage: Callable[[dict[str, torch.Tensor]], Any], match: str
) -> None:
    tensors = load((model / WEIGHTS).read_bytes())
    damage(tensors)
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    assert_refused(model, match)


@pytest.mark.parametrize("data", [b"", b"\x07" * 100_000, b"\xff" * 100_000])
def test_bytes_that_are_no_weights_are_refused(model: Path, data: bytes) -> None:
    (model / WEIGHTS).write_bytes(data)
    assert_refused(model, f"{WEIGHTS} is .*download the model again")


def split(model: Path, count: int = 6) -> list[Path]:
    """Splits a model's weights into shards with an index; returns their paths."""
    tensors = load((model / WEIGHTS).read_bytes())
    files = {
        name: f"model-{i % count + 1:05}-of-{count:05}.safetensors"
        for i, name in enumerate(tensors)
    }
    for file in sorted(set(files.values())):
        own = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(own, model / file, metadata={"format": "pt"})
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (model / WEIGHTS).unlink()
    return [model / file for file in sorted(set(files.values()))]


def refused_early(model: Path) -> str:
    """Returns the line that refuses a model before torch is imported."""
    words = ["chat", "--model", str(model), "--prompt", "w1"]
    code = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = {words!r}; from medusa_cli.cli import main; main()"
    done = python(code)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    return done.stderr


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda data: b"", "empty"),
        (lambda data: data[:5], "cut off"),
        (lambda data: data[:40], "cut off"),
        (lambda data: data[: len(data) // 2], "cut off"),
        (lambda data: data[:-1], "cut off"),
        (lambda data: POINTER, "git-lfs"),
        (lambda data: b"<html>" + data, "not a safetensors"),
        (lambda data: data[:8] + b"[" + data[9:], "not a safetensors"),
    ],
)
def test_a_damaged_shard_is_named(
    model: Path, damage: Callable[[bytes], bytes], match: str
) -> None:
    shard = split(model)[3]
    shard.write_bytes(damage(shard.read_bytes()))
    assert_refused(model, f"{shard.name} .*{match}.*download the model again")


@pytest.mark.slow
def test_missing_shards_are_all_named_before_torch_is_imported(model: Path) -> None:
    shards = split(model)
    load_backbone(str(model), FP32)
    shards[1].unlink()
    shards[4].unlink()
    line = refused_early(model)
    assert shards[1].name in line
    assert shards[4].name in line
    assert shards[0].name not in line
    assert "download the model again" in line
    shards[1].write_bytes(b"")
    shards[4].write_bytes(b"")
    assert shards[1].name in refused_early(model)


@pytest.mark.quick("consolidated.safetensors", "m.gguf")
@pytest.mark.parametrize("other", ["pytorch_model.bin", "consolidated.safetensors", "m.gguf"])
def test_weights_of_another_format_are_named(model: Path, other: str) -> None:
    (model / WEIGHTS).rename(model / other)
    assert other in refused_early(model)
    assert_refused(model, other)


def test_an_index_that_is_not_followed_is_told(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = (model / WEIGHTS).read_bytes()
    split(model)
    (model / WEIGHTS).write_bytes(whole)
    load_backbone(str(model), FP32)
    assert [record.message for record in caplog.records if INDEX in record.message]


@pytest.mark.parametrize(
    ("name", "field", "value", "match"),
    [
        ("config.json", "num_hidden_layers", 10**9, "num_hidden_layers"),
        ("config.json", "hidden_size", -1, "hidden_size"),
        ("config.json", "vocab_size", "64", "vocab_size"),
        ("config.json", "hidden_size", 48, "embed_tokens"),
        # Weights of this size would fill any memory.
        (
            "config.json",
            "hidden_size",
            640_000,
            "embed_tokens",
        ),
        ("config.json", "intermediate_size", 10_000_000, "gate_proj"),
        ("config.json", "num_hidden_layers", 900, "could not be loaded"),
        ("config.json", "hidden_act", "no_such", "could not be loaded"),
        ("config.json", "num_attention_heads", 5, "could not be loaded|cannot be run"),
        ("generation_config.json", "eos_token_id", [1, [None]], "eos_token_id|could not be loaded"),
        ("tokenizer_config.json", "model_max_length", "x", "could not be loaded"),
    ],
)
def test_impossible_settings_are_refused(
    model: Path, name: str, field: str, value: Any, match: str
) -> None:
    change_json(model / name, **{field: value})
    assert_refused(model, match)


def test_adapter_beside_a_model_is_refused_unopened(model: Path) -> None:
    (model / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "/etc"}'
    )
    assert_refused(model, "adapter_config.json")


def test_pickled_weights_are_refused_unopened(model: Path, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return Path.touch, (tmp_path / "ran",)

    torch.save(Touch(), model / "pytorch_model.bin")
    (model / WEIGHTS).unlink()
    assert_refused(model, "pytorch_model.bin")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "mps"),
        ("device", "cuda:64"),
        ("device", "cuda:99999999999"),
        ("dtype", None),
        ("engine", None),
        ("device", "tpu9"),
        ("dtype", "int3"),
        ("engine", "slow"),
    ],
)
def test_unknown_devices_types_and_engines_are_usage_errors(name: str, value: str | None) -> None:
    with pytest.raises(UsageError, match=f"{name} {value!r}"):
        load_backbone("x", LoadOptions(**{name: value}))  # type: ignore[arg-type]


def test_folders_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match=str(folder)):
            load_backbone(str(folder))
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(UserError, match=r"config\.json"):
        load_backbone(str(tmp_path))


@pytest.mark.quick(
    "config0-encoder",
    "config1-ALiBi",
    "config5-'recurrent_gemma' .*running state.*Gemma 3",
    "config7-'deepseek_v4' .*indexer.*DeepSeek V3",
)
@pytest.mark.parametrize(
    ("config", "match"),
    [
        (hf.T5Config(), "encoder"),
        (hf.FalconConfig(alibi=True), "ALiBi"),
        (hf.XGLMConfig(), "'xglm' .*mask"),
        (hf.RwkvConfig(), "'rwkv' .*mask.*Mamba-2"),
        (hf.MiniMaxConfig(), "'minimax' .*running state.*MiniMax M2"),
        (hf.RecurrentGemmaConfig(), "'recurrent_gemma' .*running state.*Gemma 3"),
        (hf.GlmMoeDsaConfig(), "'glm_moe_dsa' .*indexer.*GLM-4.5"),
        (hf.DeepseekV4Config(), "'deepseek_v4' .*indexer.*DeepSeek V3"),
    ],
)
def test_models_that_a_tree_cannot_verify_are_refused_by_their_config(
    config: Any, match: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)  # there are no weights
    assert_refused(tmp_path, match)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        (["adapter_config.json"], "adapter"),
        (["weights.gguf"], "weights.gguf"),
        ([], "config.json"),
        (["config.json", "model.safetensors"], "no tokenizer"),
    ],
)
def test_folders_are_named_by_what_they_hold(
    model: Path, tmp_path: Path, files: list[str], match: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for name in files:
        source = model / name
        (folder / name).write_bytes(source.read_bytes() if source.exists() else b"{}")
    assert_refused(folder, match)
    shown = medusa("chat", "--model", folder, "--prompt", "w1", exit_code=1).stderr
    assert match in shown


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_model_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="model"):
        Medusa.from_pretrained(name)
    assert "--model" in medusa("chat", "--model", name, "--prompt", "w1", exit_code=2).stderr


def test_a_model_that_does_not_exist_is_no_model_without_a_drafter(tmp_path: Path) -> None:
    for name in (str(tmp_path / "missing"), "no/such/model"):
        with pytest.raises(UserError, match="model") as raised:
            Medusa.from_pretrained(name)
        assert raised.value.setting == "model"


def set_config(**fields: Any) -> Callable[[Path], None]:
    return lambda model: change_json(model / "config.json", **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flaw", "damage"),
    [
        ("running state", set_config(layer_types=["full_attention", "linear_attention"])),
        ("indexer", set_config(layer_types=["indexed_attention", "full_attention"])),
        ("indexer", set_config(index_topk=2048)),
        ("no_such_kind", set_config(layer_types=["full_attention", "no_such_kind"])),
        ("mask", set_config(model_type="xglm")),
        ("mask", set_config(model_type="rwkv")),
    ],
)
def test_refusals_come_before_torch_is_imported(
    model: Path, flaw: str, damage: Callable[[Path], None]
) -> None:
    damage(model)
    words = ["chat", "--model", str(model), "--baseline", "--prompt", "w1"]
    code = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = {words!r}; from medusa_cli.cli import main; main()"
    done = python(code)
    assert done.returncode == 1
    assert flaw in done.stderr


def test_logits_that_are_not_the_lm_heads_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = hf.LlamaForCausalLM.forward

    def scaled(network: Any, *inputs: Any, **options: Any) -> Any:
        out = forward(network, *inputs, **options)
        out.logits = out.logits * 1.01  # a factor that no field of the config names
        return out

    monkeypatch.setattr(hf.LlamaForCausalLM, "forward", scaled)
    assert_refused(model, "lm_head")


@pytest.mark.slow
@pytest.mark.parametrize("factors", [(12.0, 0.22), (1.0, 0.5), (0.5, 1.0)])
def test_models_with_multipliers_in_their_layers_run_on_the_native_engine(
    tmp_path: Path, factors: tuple[float, float]
) -> None:
    config = hf.GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.4, embedding_multiplier=factors[0], residual_multiplier=factors[1],
        attention_multiplier=0.2, logits_scaling=3.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = hf.GraniteForCausalLM(config).eval(), torch.arange(5, 18)
    with torch.inference_mode():
        theirs = model(ids[None]).logits[0]
    path = save_network(model, tmp_path)
    for engine in ("native", "eager"):
        backbone = load_backbone(path, LoadOptions(dtype="fp32", engine=engine))
        assert torch.allclose(forward(backbone, ids).logits, theirs, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("original", [40, 512])
def test_attention_that_changes_with_the_position_runs_on_the_eager_engine(
    original: int, tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "factor": 1.0}
    config = hf.Ministral3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, initializer_range=0.4, max_position_embeddings=256, sliding_window=None,
        rope_parameters={**rope, "original_max_position_embeddings": original},
    )  # fmt: skip
    torch.manual_seed(0)
    model, prompt = hf.Ministral3ForCausalLM(config).eval(), torch.arange(5, 25)
    ids = model.generate(
        prompt[None], max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    backbone = load_backbone(save_network(model, tmp_path), FP32)
    # Beyond 40 its queries grow.
    assert backbone.engine.name == ("eager" if original == 40 else "native")
    steps = generate_plain(backbone, prompt.tolist(), max_new_tokens=40, stop_ids=())
    assert tokens_of(steps) == ids[0, len(prompt) :].tolist()


@pytest.fixture
def adapted(model: Path, tmp_path: Path) -> Path:
    network, _ = load_network(ModelSource.of(str(model)), FP32)
    lora.attach(network, rank=2, alpha=4.0, dropout=0.0)
    lora.save(network, tmp_path / "adapter", str(model))
    return tmp_path / "adapter"


@pytest.mark.quick("r-3-does not fit the model")
@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("r", "x", "at r"),
        ("r", 3, "does not fit the model"),
        ("peft_type", "LOHA", "LOHA"),
        ("lora_alpha", None, "lora_alpha"),
    ],
)
def test_impossible_adapter_config_is_refused(
    model: Path, adapted: Path, field: str, value: Any, match: str
) -> None:
    change_json(adapted / "adapter_config.json", **{field: value})
    assert_refused(model, match, adapted)


@pytest.mark.quick("{'modules_to_save': ['lm_head']}-modules_to_save")
@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"alpha_pattern": {"q_proj": 32}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 1}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"lora_bias": True}, "lora_bias"),
    ],
    ids=str,
)
def test_adapter_that_is_more_than_plain_lora_is_refused(
    model: Path, adapted: Path, more: dict[str, Any], named: str
) -> None:
    change_json(adapted / "adapter_config.json", **more)
    assert_refused(model, named, adapted)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("targets", "rslora"),
    [
        (["q_proj", "down_proj"], False),
        (["q_proj", "down_proj"], True),
        (r".*\.(q_proj|v_proj)", False),
        ("all-linear", False),
        (["q_proj", "lm_head"], False),
        (["q_proj", "embed_tokens"], False),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2: the lm_head is the embedding
def test_merged_adapter_gives_the_logits_that_peft_gives(
    tmp_path: Path, targets: list[str] | str, rslora: bool, family: str
) -> None:
    import peft

    model = Path(save_model(tmp_path / "base", family=family))
    ids = torch.arange(9)[None]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, use_rslora=rslora)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(load_network(ModelSource.of(str(model)), FP32)[0], config)
    for name, weight in theirs.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    if isinstance(targets, str):  # peft may have written the names that the text stands for
        change_json(tmp_path / "theirs" / "adapter_config.json", target_modules=targets)
    merged = lora.merge(load_network(ModelSource.of(str(model)), FP32)[0], tmp_path / "theirs")
    plain = load_network(ModelSource.of(str(model)), FP32)[0]
    with torch.no_grad():
        expected = theirs(ids).logits
        assert torch.allclose(merged(ids).logits, expected, atol=1e-4)
        assert not torch.allclose(plain(ids).logits, expected, atol=0.1)


def test_an_lm_head_of_an_adapter_that_is_not_the_models_is_refused(
    model: Path, tmp_path: Path
) -> None:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    theirs = peft.get_peft_model(load_network(ModelSource.of(str(model)), FP32)[0], config)
    theirs.base_model.model.lm_head.base_layer.weight.data += 1
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    assert_refused(model, "lm_head.*merge it", tmp_path / "theirs")


@pytest.mark.quick("adapter_model.bin")
@pytest.mark.parametrize("other", ["adapter_model.bin", "adapters.safetensors", "adapters.npz"])
def test_other_files_of_an_adapter_are_named(
    model: Path, adapted: Path, other: str, tmp_path: Path
) -> None:
    (adapted / adapter.WEIGHTS).rename(adapted / other)
    assert_refused(model, other, adapted)
    # A run's adapter without a config is not passed over.
    (adapted / "adapter_config.json").unlink()
    shutil.copytree(adapted, tmp_path / "run" / "adapter")
    words = ("chat", "--run", f"{tmp_path}/run", "--model", model, "--baseline", "--prompt", "w1")
    assert other in medusa(*words, exit_code=1).stderr


@pytest.mark.slow
def test_unknown_keys_of_an_adapter_config_are_ignored(model: Path, adapted: Path) -> None:
    more = {
        "init_lora_weights": "gaussian",
        "lora_dropout": 0.1,
        "megatron_config": {},
        "auto_mapping": {"parent_library": "no.such"},
    }
    change_json(adapted / "adapter_config.json", **more)
    assert load_backbone(str(model), FP32, adapter=adapted).adapter == lora.digest(adapted)


def test_damaged_adapter_weights_are_refused(model: Path, adapted: Path) -> None:
    path = adapted / adapter.WEIGHTS
    whole = path.read_bytes()
    tensors = load(whole)
    name = next(iter(tensors))
    for data in (whole[: len(whole) // 2], b""):
        path.write_bytes(data)
        assert_refused(model, "cannot be read", adapted)
    save_file(tensors | {name: tensors[name] * float("nan")}, path)
    assert_refused(model, "not finite", adapted)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    assert_refused(model, "lack 1 tensors", adapted)
    save_file(tensors | {f"{name}.more": tensors[name].clone()}, path)
    assert_refused(model, "hold 1 tensors", adapted)


def test_hints_of_bitsandbytes_are_silenced() -> None:
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)


def test_a_named_gpu_becomes_the_current_one_and_attends_without_cudnn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[torch.device] = []
    cudnn: list[bool] = []
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr("torch.backends.cuda.enable_cudnn_sdp", cudnn.append)
    for device in ("cpu", "cuda", "cuda:1"):
        use_device(device)
    assert chosen == [torch.device("cuda:1")]
    assert cudnn == [False, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device works")
def test_a_gpu_that_runs_no_kernels_leaves_work_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_cuda.cache_clear()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve_device("auto") == "cpu"
    assert "GPU" in caplog.text
    has_cuda.cache_clear()
