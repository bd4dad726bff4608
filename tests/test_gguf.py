"""GGUF files as models: decoded as the bits that they hold, refused if damaged or not read whole."""

import json
import os
import shutil
import struct
import tracemalloc
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from transformers.convert_slow_tokenizer import bytes_to_unicode

from medusa_cli import Medusa
from medusa_cli.bench.methods import LLAMA
from medusa_cli.bench.peers import llama_method
from medusa_cli.drafters import Eagle, MedusaHeads
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.files.gguf_header import read_header
from medusa_cli.files.gguf_names import READABLE
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model.digest import weights_of
from medusa_cli.native import Format
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.tree import Tree
from tests.helpers import (
    CHAT_TEMPLATE,
    PROMPT,
    forward,
    generate,
    generate_plain,
    medusa,
    medusa_json,
    python,
    save_run,
    tiny_model,
    tokens_of,
)
from tests.models import FULL, OUT, SLIDING, tiny_config

FP32 = LoadOptions(dtype="fp32")
VOCAB, HEADS, KV_HEADS = 288, 4, 2
# All that the gguf package can write.
KINDS = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
END = VOCAB - 1
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
# llama.cpp's names of the parts around a layer that predicts later tokens.
OF_LATER = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
    "embed_tokens": "embed_tokens",
}
Change = Callable[[gguf.GGUFWriter], Any]
Weights = dict[str, torch.Tensor]


def write_gguf(
    path: Path, kind: Kind = Kind.F32, *, arch: str = "llama", template: str | None = CHAT_TEMPLATE,
    change: Change = lambda writer: None, leave_out: str = "nothing", seed: int = 0, network: Any = None,
    **split: Any,
) -> Any:  # fmt: skip
    """Writes a tiny llama as a GGUF file; returns its network with the weights that the file holds, in fp32.

    split: how gguf's writer splits it into several files.
    """
    network = tiny_model(vocab=VOCAB, seed=seed) if network is None else network
    config, writer = network.config, gguf.GGUFWriter(path, arch, **split)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_vocab_size(VOCAB)
    add_tokenizer(writer)
    if template:
        writer.add_chat_template(template)
    change(writer)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if leave_out in name:
                continue
            of_heads = {"q_proj": HEADS, "k_proj": KV_HEADS} if arch == "llama" else {}
            heads = of_heads.get(name.split(".")[-2])
            for stored, part in parts_of(name, weight):
                own = Kind.F32 if part.dim() == 1 or "_inp" in stored else kind
                values = part.numpy() if heads is None else interleaved(part.numpy(), heads)
                packed = gguf.quantize(np.ascontiguousarray(values), own)
                writer.add_tensor(stored, packed, raw_dtype=own)
                values = gguf.dequantize(packed, own).reshape(values.shape)
                kept = np.array(values if heads is None else halves(values, heads))
                part.copy_(torch.from_numpy(kept))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return network


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    special = ["<start>", "<end>"]
    letters = list(bytes_to_unicode().values())
    words = [*letters, "ab", *(f"<unused{i}>" for i in range(VOCAB - len(letters) - 3)), *special]
    writer.add_token_list(words)
    writer.add_token_types([1] * (len(letters) + 1) + [3] * (VOCAB - len(letters) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(END)


def write_experts(path: Path, family: str, kind: Kind) -> Any:
    """Writes a tiny mixture of experts as a GGUF file; returns its network with the weights that the file holds."""
    arch = family.replace("_", "")
    # As llama.cpp takes it for each.
    config = tiny_config(family, vocab_size=VOCAB, num_experts=6, norm_topk_prob=arch == "qwen3moe")
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if family == "qwen2_moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)

    return write_gguf(path, kind, arch=arch, change=change, network=network)


def parts_of(name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of a file that a weight is stored in."""
    layer = ".".join(name.split(".")[2:3])
    if name.endswith("experts.gate_up_proj"):
        gate, up = weight.chunk(2, dim=1)
        return [
            (f"blk.{layer}.ffn_gate_exps.weight", gate),
            (f"blk.{layer}.ffn_up_exps.weight", up),
        ]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{layer}.ffn_down_exps.weight", weight)]
    return [(gguf_name(name), weight)]


def gguf_name(name: str) -> str:
    layer = name.split(".")[2] if name.startswith("model.layers.") else None
    module, _, kind = name.rpartition(".")
    for theirs, own in NAMES.items():
        if module == theirs or (layer and module.endswith(f".{layer}.{theirs}")):
            return f"blk.{layer}.{own}.{kind}" if layer else f"{own}.{kind}"
    raise KeyError(name)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns query or key rows in llama.cpp's order, where the halves that rotate together alternate."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(UserError) as raised:
        load_backbone(str(path), FP32)
    text = str(raised.value)
    assert str(path) in text, text
    assert len(text.splitlines()) == 1, text
    assert raised.value.remedy, text
    assert all(part in text for part in parts), text


@pytest.mark.slow
@EACH_KIND
def test_a_file_is_decoded_as_the_weights_that_it_holds(file: Path, kind: Kind) -> None:
    network = write_gguf(file, kind)
    ids = network.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    backbone = load_backbone(str(file), FP32)
    steps = generate_plain(backbone, PROMPT, max_new_tokens=24, stop_ids=())
    assert tokens_of(steps) == ids[0, len(PROMPT) :].tolist()
    assert backbone.eos_ids == {END}
    assert backbone.tokenizer.decode(backbone.tokenizer.encode("ab c")) == "ab c"


@pytest.mark.slow
def test_factors_of_rotary_frequencies_are_read(file: Path) -> None:
    factors = np.array([1, 1.5, 4, 8], np.float32)
    network = write_gguf(
        file, change=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    network.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    backbone, ids = load_backbone(str(file), FP32), torch.arange(5, 55)
    assert backbone.max_positions == network.config.max_position_embeddings
    torch.testing.assert_close(
        forward(backbone, ids).logits, network(ids[None]).logits[0], rtol=1e-4, atol=1e-5
    )
    plain = tokens_of(generate_plain(backbone, PROMPT, max_new_tokens=24, stop_ids=()))
    write_gguf(file)
    assert plain != tokens_of(
        generate_plain(load_backbone(str(file), FP32), PROMPT, max_new_tokens=24, stop_ids=())
    )


@pytest.mark.slow
@EACH_KIND
def test_the_bits_of_a_file_are_multiplied_as_they_are(file: Path, kind: Kind) -> None:
    network = write_gguf(file, kind)
    backbone = load_backbone(str(file), LoadOptions(activations="fp32"))
    packed = backbone.engine.model.packed.matrices
    assert backbone.engine.name == "native"
    assert {matrix.format.name for matrix in packed.values()} == {kind.name}
    for name, weight in network.named_parameters():
        if weight.dim() == 2:
            ours = packed[name.removesuffix(".weight")].embed(np.arange(len(weight)))
            assert np.array_equal(ours, weight.detach().numpy()), name
    ids = torch.arange(5, 55)
    torch.testing.assert_close(
        forward(backbone, ids).logits, network(ids[None]).logits[0], rtol=1e-4, atol=1e-4
    )
    rounded = load_backbone(str(file))  # rows of 8 bits, where weights have few
    with torch.inference_mode():
        expected = network(ids[None]).logits[0]
    assert float((forward(rounded, ids).logits - expected).norm() / expected.norm()) < 0.1
    drafter = MedusaHeads.create(rounded, 2, 1, "own").eval()
    for tree in (Tree.dense([2, 1]), Tree.dense([4, 2])):
        drafted = generate(rounded, drafter, tree, PROMPT, max_new_tokens=24, stop_ids=())
        assert tokens_of(drafted) == tokens_of(
            generate_plain(rounded, PROMPT, max_new_tokens=24, stop_ids=())
        )


@pytest.mark.quick("BF16")
@EACH_KIND
def test_other_engines_read_the_same_numbers(file: Path, kind: Kind) -> None:
    network = write_gguf(file, kind)
    backbone = load_backbone(str(file), LoadOptions(dtype="fp32", engine="eager"))
    ids = torch.arange(5, 30)
    torch.testing.assert_close(
        forward(backbone, ids).logits, network(ids[None]).logits[0], rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_experts_are_read_from_the_file(
    file: Path, tmp_path: Path, family: str, kind: Kind
) -> None:
    network = write_experts(file, family, kind)
    ids = torch.tensor(PROMPT)
    expected = network(ids[None]).logits[0]
    for engine in ("native", "eager"):
        backbone = load_backbone(str(file), LoadOptions(dtype="fp32", engine=engine))
        torch.testing.assert_close(forward(backbone, ids).logits, expected, rtol=1e-3, atol=1e-3)
    if kind == Kind.F32:
        folder = Path(ModelSource.of(str(file)).folder)
        assert not list(folder.glob("*.safetensors"))
        network.save_pretrained(tmp_path / "whole")
        assert weights_of(ModelSource.of(str(file))) == weights_of(
            ModelSource.of(str(tmp_path / "whole"))
        )


def write_lfm2(path: Path, kind: Kind) -> Any:
    """Writes a tiny LFM2 as llama.cpp's converter does; returns its network with the weights that the file holds."""
    config = tiny_config("lfm2", vocab_size=VOCAB, conv_bias=False, block_auto_adjust_ff_dim=False)
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    writer = gguf.GGUFWriter(path, "lfm2")
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([KV_HEADS * own for own in attends])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    weights = dict(network.named_parameters())
    return write_hybrid(writer, network, weights, kind)


def tiny_qwen35(value_heads: int = 4, experts: bool = False) -> Any:
    """Returns a tiny Qwen 3.5 with random gains."""
    config = tiny_config(
        "qwen3_5_moe_text" if experts else "qwen3_5_text",
        vocab_size=VOCAB,
        linear_num_key_heads=2,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.endswith(("norm.weight", "dt_bias", "A_log")):
                weight += torch.randn_like(weight) / 10
    return network


def write_qwen35(
    path: Path,
    kind: Kind,
    value_heads: int = 4,
    experts: bool = False,
    network: Any = None,
    later: Weights | None = None,
) -> Any:
    """Writes a tiny Qwen 3.5 as llama.cpp's converter does; returns its network with the weights that the file holds.

    later: the weights of a layer that predicts later tokens, by the converter's names.
    """
    if network is None:
        network = tiny_qwen35(value_heads, experts)
    config = network.config
    later = later or {}
    value_heads = config.linear_num_value_heads
    experts = hasattr(config, "num_experts")
    writer = gguf.GGUFWriter(path, "qwen35moe" if experts else "qwen35")
    if experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    rotary = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    writer.add_rope_dimension_sections([1, 1, 0, 0])  # of the rotary // 2 pairs
    writer.add_rope_dimension_count(rotary)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(2)
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_inner_size(16 * value_heads)
    writer.add_uint32(f"{writer.arch}.full_attention_interval", 2)
    writer.add_uint32(f"{writer.arch}.nextn_predict_layers", int(bool(later)))

    # The first value head of each key head comes first, then the second ones.
    heads = [key * (value_heads // 2) + own for own in range(value_heads // 2) for key in range(2)]
    wide = [16 * head + number for head in heads for number in range(16)]
    after_keys = [*range(64), *(64 + row for row in wide)]
    rows = {
        "in_proj_qkv.weight": after_keys,
        "conv1d.weight": after_keys,
        "in_proj_z.weight": wide,
        "in_proj_a.weight": heads,
        "in_proj_b.weight": heads,
        "A_log": heads,
        "dt_bias": heads,
    }
    stored = {}
    for name, weight in [*network.named_parameters(), *later.items()]:
        values = weight.detach()
        own = name.rpartition("linear_attn.")[2] if "linear_attn." in name else ""
        values = values[rows[own]] if own in rows else values
        if own == "out_proj.weight":
            values = values[:, wide]
        if own == "A_log":
            values = -values.exp()
        if name.endswith("norm.weight") and own != "norm.weight":
            values = values + 1
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        stored |= by_expert(name.replace("dt_bias", "dt_proj.bias"), values)
    return write_hybrid(writer, network, stored, kind)


def write_hybrid(writer: gguf.GGUFWriter, network: Any, weights: Weights, kind: Kind) -> Any:
    """Adds sizes, a tokenizer and weights, by the names of the converter's table, to a file; returns the network."""
    config = network.config
    layers = len({name.split(".")[2] for name in weights if name.startswith("model.layers.")})
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(layers)
    writer.add_embedding_length(config.hidden_size)
    if getattr(config, "use_double_wide_mlp", False):
        widths = [layer.mlp.up_proj.out_features for layer in network.model.layers]
        writer.add_feed_forward_length(widths)
    elif hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get(FULL, rope)["rope_theta"])
    writer.add_vocab_size(VOCAB)
    add_tokenizer(writer)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == writer.arch)
    names = gguf.get_tensor_name_map(arch, layers)
    for name, values in weights.items():
        module, _, part = name.rpartition(".")
        known = names.get_name(module)
        if (own := ".".join(module.split(".")[3:])) in OF_LATER:
            known = f"blk.{module.split('.')[2]}.nextn.{OF_LATER[own]}"
        stored = names.get_name(name) if known is None else f"{known}.{part}"
        assert stored is not None, name
        is_matrix = values.dim() == 2 or "experts" in name
        numbers = values.detach() if values.dim() < 3 or is_matrix else values.detach().squeeze(1)
        own = kind if part == "weight" and is_matrix else Kind.F32
        if kind == Kind.MXFP4 and "experts" not in name:
            own = Kind.F32
        packed = gguf.quantize(np.ascontiguousarray(numbers.numpy()), own)
        writer.add_tensor(stored, packed, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return network


def tiny_network(model_type: str, **own: Any) -> Any:
    """Returns a tiny random network of a type, in which no two layers or heads do the same."""
    config = tiny_config(model_type, vocab_size=VOCAB, **own)
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() == 1:
                weight += torch.randn_like(weight) / 10
        for name, weight in network.named_buffers():
            if name.endswith("layer_scalar"):
                weight *= 0.8
    return network


def by_expert(name: str, values: torch.Tensor, turned: bool = False) -> dict[str, torch.Tensor]:
    """Returns a weight by its name, or the parts that a converter makes of the weights of all experts.

    turned: experts have transposed matrices, with gate and up in turn, and biases.
    """
    module, _, own = name.rpartition(".")
    if own in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias") and turned:
        values = values if own.endswith("bias") else values.mT
        part = "bias" if own.endswith("bias") else "weight"
        if own.startswith("down"):
            return {f"{module}.down_proj.{part}": values}
        gate, up = values[:, ::2], values[:, 1::2]
        return {f"{module}.gate_proj.{part}": gate, f"{module}.up_proj.{part}": up}
    if own == "gate_up_proj":
        gate, up = values.chunk(2, dim=1)
        return {f"{module}.gate_proj.weight": gate, f"{module}.up_proj.weight": up}
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": values}
    return {name: values}


def write_as_converter(
    path: Path, kind: Kind, arch: str, network: Any, add: Change, later: Weights | None = None
) -> Any:
    """Writes a network as llama.cpp's converter does for an architecture; returns it with the file's weights.

    add: adds the metadata that only this architecture has. later: the weights of a layer that predicts later tokens.
    """
    config = network.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add(writer)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            matrix = weight.mT if arch == "gpt-oss" and weight.dim() == 3 else weight
            is_kept = kind == Kind.MXFP4 and weight.dim() < 3
            if weight.dim() > 1 and not is_kept and not name.endswith("bias"):
                packed = gguf.quantize(np.ascontiguousarray(matrix.numpy()), kind)
                matrix.copy_(torch.from_numpy(gguf.dequantize(packed, kind).copy()))
    stored = {}
    for name, weight in [*network.state_dict().items(), *(later or {}).items()]:
        values = weight.detach()
        of_heads = {"q_proj": HEADS, "k_proj": KV_HEADS} if arch in INTERLEAVED else {}
        if heads := of_heads.get(name.split(".")[-2]):
            values = torch.from_numpy(interleaved(values.numpy(), heads))
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith(("layer_scalar", "sinks")):
            name += ".weight"
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("block_sparse_moe.router", "mlp.gate")
        name = name.replace("block_sparse_moe", "mlp")
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            stored |= by_expert(name, values, turned=arch == "gpt-oss")
    return write_hybrid(writer, network, stored, kind)


INTERLEAVED = ("granite", "granitemoe", "llama", "mistral3", "smollm3")


def write_granite(path: Path, kind: Kind) -> Any:
    network = tiny_network("granite")
    return write_as_converter(path, kind, "granite", network, add_granite(network.config))


def add_granite(config: Any) -> Change:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_dimension_count(config.hidden_size // HEADS)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)

    return add


def write_granite_experts(path: Path, kind: Kind) -> Any:
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0}
    network = tiny_network("granitemoe", attention_multiplier=0.1, **factors)
    config = network.config

    def add(writer: gguf.GGUFWriter) -> None:
        add_granite(config)(writer)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)

    return write_as_converter(path, kind, "granitemoe", network, add)


def write_smollm3(path: Path, kind: Kind) -> Any:
    network = tiny_network("smollm3", no_rope_layers=OUT)
    return write_as_converter(
        path, kind, "smollm3", network, lambda writer: writer.add_head_count_kv(KV_HEADS)
    )


def write_olmo2(path: Path, kind: Kind) -> Any:
    network = tiny_network("olmo2")
    return write_as_converter(
        path, kind, "olmo2", network, lambda writer: writer.add_head_count_kv(KV_HEADS)
    )


def add_yarn(writer: gguf.GGUFWriter, trained: int = 128) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(8.0)
    writer.add_rope_scaling_orig_ctx_len(trained)


# The same in transformers' words.
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 1e4,
}


def write_mistral3(path: Path, kind: Kind) -> Any:
    """Writes a tiny Ministral 3, whose queries grow with every 128 positions."""
    rope = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.2}
    rope |= {"beta_fast": 4.0, "beta_slow": 0.5, "max_position_embeddings": 512}
    network = tiny_network("ministral3", rope_parameters=rope, sliding_window=None)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(16)
        writer.add_rope_dimension_count(16)
        add_yarn(writer)
        writer.add_rope_scaling_yarn_beta_fast(4.0)
        writer.add_rope_scaling_yarn_beta_slow(0.5)
        writer.add_rope_scaling_yarn_log_mul(0.5)
        writer.add_attn_temperature_scale(0.2)

    return write_as_converter(path, kind, "mistral3", network, add)


def write_llama(path: Path, kind: Kind) -> Any:
    """Writes a tiny Llama with positions scaled by YaRN."""
    network = tiny_network("llama", rope_parameters=YARN, pretraining_tp=1)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_dimension_count(16)
        add_yarn(writer)

    return write_as_converter(path, kind, "llama", network, add)


def write_phi3(path: Path, kind: Kind) -> Any:
    """Writes a tiny Phi 4 mini, which rotates three quarters of each head, with other frequencies in long texts."""
    short, long = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    rope |= {"short_factor": short, "long_factor": long, "attention_factor": 1.2}
    network = tiny_network(
        "phi3",
        rope_parameters={**rope, "original_max_position_embeddings": 512},
        original_max_position_embeddings=512,
        max_position_embeddings=1024,
        sliding_window=None,
    )

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_dimension_count(12)
        writer.add_rope_scaling_orig_ctx_len(512)
        writer.add_rope_scaling_attn_factors(1.2)
        writer.add_tensor("rope_factors_short.weight", np.array(short, np.float32))
        writer.add_tensor("rope_factors_long.weight", np.array(long, np.float32))

    return write_as_converter(path, kind, "phi3", network, add)


def write_qwen3(path: Path, kind: Kind) -> Any:
    """Writes a tiny Qwen 3 with linearly scaled positions."""
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    network = tiny_network("qwen3", rope_parameters=rope, head_dim=128, use_sliding_window=False)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(128)
        writer.add_value_length(128)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    return write_as_converter(path, kind, "qwen3", network, add)


def write_gemma3(path: Path, kind: Kind, factor: float = 8.0) -> Any:
    """Writes a tiny Gemma 3, whose layers with full attention divide their positions by a factor."""
    full = {"rope_type": "linear", "factor": factor, "rope_theta": 1e6}
    network = tiny_network(
        "gemma3_text",
        num_hidden_layers=6,
        layer_types=[*[SLIDING] * 5, FULL],
        sliding_window=16,
        query_pre_attn_scalar=16,
        rope_parameters={FULL: full, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
        tie_word_embeddings=True,
    )

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_sliding_window(16)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)

    return write_as_converter(path, kind, "gemma3", network, add)


def write_gemma4(path: Path, kind: Kind, same_values: bool = False) -> Any:
    """Writes a tiny Gemma 4.

    The last three of its six layers use keys and values of earlier ones. same_values: instead, in layers
    with full attention, values are keys, of which there are fewer heads, and no layer has its own
    inputs; as in the largest models.
    """
    network = tiny_network(
        "gemma4_text",
        num_hidden_layers=6,
        layer_types=[SLIDING, SLIDING, FULL] * 2,
        num_kv_shared_layers=0 if same_values else 3,
        use_double_wide_mlp=not same_values,
        attention_k_eq_v=same_values,
        num_global_key_value_heads=1 if same_values else None,
        hidden_size_per_layer_input=0 if same_values else 32,
        vocab_size_per_layer_input=VOCAB,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    )
    config = network.config
    shared = config.num_kv_shared_layers

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv([KV_HEADS, KV_HEADS, 1] * 2 if same_values else KV_HEADS)
        writer.add_shared_kv_layers(shared)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
        writer.add_sliding_window_pattern([own == SLIDING for own in config.layer_types])
        writer.add_sliding_window(config.sliding_window)
        writer.add_key_length(32)
        writer.add_value_length(32)
        writer.add_key_length_swa(16)
        writer.add_value_length_swa(16)
        writer.add_rope_dimension_count(32)
        writer.add_rope_dimension_count_swa(16)
        writer.add_rope_freq_base_swa(1e4)
        writer.add_final_logit_softcapping(30.0)
        # A quarter of a head's 16 pairs rotates.
        factors = np.array([1.0] * 4 + [1e30] * 12, np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
        if shared:  # a checkpoint has them, and they are not used
            writer.add_tensor("blk.5.attn_k.weight", np.ones((64, 64), np.float32))
            writer.add_tensor("blk.5.attn_k_norm.weight", np.ones(32, np.float32))

    return write_as_converter(path, kind, "gemma4", network, add)


def write_gpt_oss(path: Path, kind: Kind, theta: float = 1e4, trained: int = 128) -> Any:
    """Writes a tiny gpt-oss; of MXFP4, only experts are.

    trained: positions of the first training. llama.cpp rounds the bounds between frequencies that are
    scaled and those that are not. The network does not, which makes no difference if both bounds lie
    beyond all frequencies, as with a theta of 5 and 190 positions.
    """
    rope = {**YARN, "rope_theta": theta, "truncate": False}
    rope["original_max_position_embeddings"] = trained
    network = tiny_network("gpt_oss", rope_parameters=rope, head_dim=32)
    config = network.config
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.endswith("proj_bias"):
                weight += torch.randn_like(weight)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(32)
        writer.add_value_length(32)
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        add_yarn(writer, trained)

    return write_as_converter(path, kind, "gpt-oss", network, add)


def write_glm4_moe(
    path: Path, kind: Kind, network: Any = None, later: Weights | None = None
) -> Any:
    """Writes a tiny GLM 4.5.

    later: the weights of a layer that predicts later tokens, by the converter's names.
    """
    if network is None:
        own = {"routed_scaling_factor": 2.5, "n_shared_experts": 2, "head_dim": 32}
        network = tiny_network("glm4_moe", use_qk_norm=True, attention_bias=True, **own)
        with torch.no_grad():
            for name, values in network.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    values += torch.randn_like(values) / 10
    config = network.config
    head_dim = network.model.layers[0].self_attn.head_dim

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim // 2)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_nextn_predict_layers(int(bool(later)))

    return write_as_converter(path, kind, "glm4moe", network, add, later)


HYBRIDS: dict[str, Callable[[Path, Kind], Any]] = {
    "lfm2": write_lfm2,
    "qwen35": write_qwen35,
    "qwen35 with a value head for each key head": lambda path, kind: write_qwen35(path, kind, 2),
    "qwen35 with experts": lambda path, kind: write_qwen35(path, kind, experts=True),
}


OTHERS: dict[str, Callable[[Path, Kind], Any]] = {
    "granite": write_granite,
    "granite with experts": write_granite_experts,
    "smollm3": write_smollm3,
    "olmo2": write_olmo2,
    "mistral3": write_mistral3,
    "phi3 with factors": write_phi3,
    "llama with YaRN": write_llama,
    "qwen3 with linear scaling": write_qwen3,
    "gemma3": write_gemma3,
    "gemma4": write_gemma4,
    "gemma4 with keys as values": lambda path, kind: write_gemma4(path, kind, same_values=True),
    "glm4moe": write_glm4_moe,
    "gpt-oss": lambda path, kind: write_gpt_oss(path, kind, 5.0, 190),
}


@pytest.mark.quick(
    "granite with experts-Q8_0", "mistral3-F32", "olmo2-F32", "phi3 with factors-F32", "smollm3-F32"
)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", OTHERS)
def test_other_architectures_are_read_from_the_file(file: Path, family: str, kind: Kind) -> None:
    network = OTHERS[family](file, kind)
    folder = Path(ModelSource.of(str(file)).folder)
    assert not list(folder.glob("*.safetensors"))
    ids = torch.tensor([*PROMPT, *range(5, 55)])  # longer than a window
    with torch.inference_mode():
        expected = network(ids[None]).logits[0]
    for engine in ("native", "eager"):
        backbone = load_backbone(str(file), LoadOptions(dtype="fp32", engine=engine))
        logits = forward(backbone, ids).logits
        assert float((logits - expected).norm() / expected.norm()) < 1e-4, engine
    assert weights_of(ModelSource.of(str(file))) is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.Q8_0, Kind.F16], ids=lambda kind: kind.name)
def test_experts_of_gpt_oss_are_multiplied_as_they_are(file: Path, kind: Kind) -> None:
    network = write_gpt_oss(file, kind)
    ids = torch.tensor([*PROMPT, *range(5, 55)])  # longer than a window
    with torch.inference_mode():
        expected = network(ids[None]).logits[0]
    backbone = load_backbone(str(file), LoadOptions(activations="fp32"))
    packed = backbone.engine.model.packed.matrices
    layers = network.config.num_hidden_layers
    experts = {name: own for name, own in packed.items() if ".experts." in name}
    assert {own.format.name for own in experts.values()} == {kind.name}
    assert len(experts) == 3 * layers
    logits = forward(backbone, ids).logits
    assert float((logits - expected).norm() / expected.norm()) < 1e-4
    rounded = load_backbone(str(file))  # rows of 8 bits, where weights have few
    logits = forward(rounded, ids).logits
    assert float((logits - expected).norm() / expected.norm()) < 0.3  # some rows change experts
    drafter = MedusaHeads.create(rounded, 2, 1, "own").eval()
    drafted = generate(rounded, drafter, Tree.dense([2, 1]), PROMPT, max_new_tokens=24, stop_ids=())
    assert tokens_of(drafted) == tokens_of(
        generate_plain(rounded, PROMPT, max_new_tokens=24, stop_ids=())
    )
    eager = load_backbone(str(file), LoadOptions(dtype="fp32", engine="eager"))
    logits = forward(eager, ids).logits
    assert float((logits - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.quick("255-eager")
@pytest.mark.parametrize("engine", ["native", "eager"])
@pytest.mark.parametrize("scale", [253, 255])
def test_scales_of_experts_that_are_too_large_are_refused(
    file: Path, scale: int, engine: str
) -> None:
    write_gpt_oss(file, Kind.MXFP4)
    tensor = read_header(file).tensors["blk.1.ffn_up_exps.weight"]
    data = bytearray(file.read_bytes())
    data[tensor.end - 17] = scale
    file.write_bytes(data)
    with pytest.raises(UserError, match="not finite"):
        load_backbone(str(file), LoadOptions(dtype="fp32", engine=engine))


def test_a_file_of_gpt_oss_without_biases_of_experts_is_refused(file: Path) -> None:
    write_gpt_oss(file, Kind.MXFP4)
    name = b"blk.1.ffn_up_exps.bias"
    file.write_bytes(file.read_bytes().replace(name, name[:-1] + b"~"))
    refused(file, name.decode())


@pytest.mark.quick("gpt-oss-ends1")
@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("gemma4", ["<turn|>", "<|tool_response>", "<eos>"]),
        ("gpt-oss", ["<|return|>", "<|call|>", "<|endoftext|>"]),
    ],
)
def test_all_ends_of_a_family_end_an_answer(
    file: Path, monkeypatch: pytest.MonkeyPatch, family: str, ends: list[str]
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        letters = list(bytes_to_unicode().values())
        unused = [f"<unused{i}>" for i in range(VOCAB - len(letters) - 4)]
        writer.add_token_list([*letters, "ab", *unused, *ends])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(END - 2)

    monkeypatch.setattr("tests.test_gguf.add_tokenizer", add)
    OTHERS[family](file, Kind.F32)
    assert load_backbone(str(file), FP32).eos_ids == {END - 2, END - 1, END}


def rope_off(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_finetuned(False)


def with_window(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(16)


def with_experts(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(4)


def endless_caps(writer: gguf.GGUFWriter) -> None:
    writer.add_final_logit_softcapping(float("inf"))


def of_another_layer(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.2.attn_k_norm.bias", np.ones(32, np.float32))


@pytest.mark.parametrize(
    ("family", "change", "part"),
    [
        ("granite", rope_off, "rotate"),
        ("olmo2", with_window, "Olmo 3"),
        ("gemma4", with_experts, "experts"),
        ("gemma3", endless_caps, "final_logit_softcapping"),
        ("gemma4", of_another_layer, "blk.2.attn_k_norm.bias"),
    ],
)
def test_files_of_others_that_would_not_be_read_whole_are_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, family: str, change: Change, part: str
) -> None:
    with monkeypatch.context() as patch:

        def add(writer: gguf.GGUFWriter, add: Change = add_tokenizer) -> None:
            add(writer)
            change(writer)

        patch.setattr("tests.test_gguf.add_tokenizer", add)
        OTHERS[family](file, Kind.F32)
    refused(file, part)


@pytest.mark.quick(
    "gemma3-rope.scaling.factor", "gpt-oss-attention.sliding_window", "granite-embedding_length"
)
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("granite", "embedding_length"),
        ("granite", "attention.head_count"),
        ("gemma3", "attention.sliding_window"),
        ("gemma3", "rope.scaling.factor"),
        ("gemma4", "attention.sliding_window_pattern"),
        ("gemma4", "attention.key_length_swa"),
        ("gpt-oss", "attention.sliding_window"),
        ("gpt-oss", "expert_count"),
        ("gpt-oss", "expert_feed_forward_length"),
    ],
)
def test_files_of_others_without_a_size_are_refused(file: Path, family: str, key: str) -> None:
    OTHERS[family](file, Kind.F32)
    data, name = file.read_bytes(), f"{family}.{key}".encode()
    length = struct.pack("<Q", len(name))  # no other key that begins like it
    file.write_bytes(data.replace(length + name, length + name[:-1] + b"~"))
    refused(file, key)


def asked(path: Path, call: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """Returns what llama.cpp's server answers about a file."""
    xllamacpp = pytest.importorskip("xllamacpp")
    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx, settings.n_parallel = 512, 1
    settings.verbosity, settings.cache_ram_mib = 0, 0
    # Threads that wait for each other spin.
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(settings)  # in fp32 throughout

    def answer(call: str, body: dict[str, Any]) -> Any:
        address = f"{server.listening_address}/{call}"
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(address, json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    answer("completion", {"prompt": PROMPT, "n_predict": 1})  # or its end may wait for its begin
    return [answer(call, body) for body in bodies]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*HYBRIDS, *OTHERS])
def test_llama_cpp_gives_the_same_probabilities(file: Path, family: str) -> None:
    (HYBRIDS | OTHERS)[family](file, Kind.F32)
    ids = [*PROMPT, *range(5, 55)]
    body = {"prompt": ids, "n_predict": 1, "temperature": -1.0, "n_probs": 20}
    [answer] = asked(file, "completion", [body])
    first = answer["completion_probabilities"][0]["top_logprobs"]
    backbone = load_backbone(str(file), FP32)
    ours = forward(backbone, torch.tensor(ids)).logits[-1].log_softmax(-1)
    numbers = [own["id"] for own in first]
    theirs = torch.tensor([own["logprob"] for own in first])
    assert theirs.max() - theirs.min() > 0.5  # they depend on the layers
    assert ours.argmax() == numbers[0]
    bound = 0.01 if family.startswith("gemma") else 2e-4  # its GELU is in fp16
    torch.testing.assert_close(ours[numbers], theirs, rtol=0, atol=bound)


@pytest.mark.slow
def test_llama_cpp_multiplies_mxfp4_alike(file: Path) -> None:
    write_gpt_oss(file, Kind.MXFP4, 5.0, 190)
    body = {"prompt": PROMPT, "n_predict": 1, "temperature": -1.0, "n_probs": 20}
    [answer] = asked(file, "completion", [body])
    first = answer["completion_probabilities"][0]["top_logprobs"]
    backbone = load_backbone(str(file), LoadOptions(activations="int8"))  # as llama.cpp rounds them
    ours = forward(backbone, torch.tensor(PROMPT)).logits[-1].log_softmax(-1)
    theirs = torch.tensor([own["logprob"] for own in first])
    assert theirs.max() - theirs.min() > 2
    torch.testing.assert_close(ours[[own["id"] for own in first]], theirs, rtol=0, atol=0.2)


def add_pieces(writer: gguf.GGUFWriter, kind: str) -> None:
    """Adds a tiny vocabulary of Gemma's kind, which llama.cpp calls llama or gemma4, to a file."""
    special, letters = ["<pad>", "<eos>", "<bos>", "<unk>"], [f"<0x{i:02X}>" for i in range(256)]
    pieces = ["\u2581", "a", "b", "c", "\u2581a", "ab", "\u2581ab", "\u2581\u2581", "\n", "1", "bc"]
    unused = [f"<unused{i}>" for i in range(VOCAB - 260 - len(pieces))]
    writer.add_tokenizer_model(kind)
    writer.add_token_list([*special, *letters, *pieces, *unused])
    writer.add_token_types([3, 3, 3, 2, *[6] * 256, *[1] * len(pieces), *[3] * len(unused)])
    writer.add_token_scores([0.0] * 260 + [-float(number) for number in range(VOCAB - 260)])
    if kind == "gemma4":
        merges = ["\u2581 a", "a b", "\u2581a b", "\u2581 \u2581", "b c"]
        writer.add_token_merges(merges)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def add_digits(writer: gguf.GGUFWriter, kind: str) -> None:
    """Adds a tiny vocabulary with merges of digits and of spaces, split as a kind of llama.cpp's."""
    letters = list(bytes_to_unicode().values())
    words = [*letters, "ab", "12", "\u01201", "\u0120\u0120"]
    unused = [f"<unused{i}>" for i in range(VOCAB - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list([*words, *unused])
    writer.add_token_types([1] * len(words) + [3] * len(unused))
    writer.add_token_merges(["a b", "1 2", "\u0120 1", "\u0120 \u0120"])
    writer.add_eos_token_id(END)


TEXTS = ("ab c", "bc  ab a\n\n b1 22 \u00e9", " ab 12", "  12 it's 121", "a\t b <unused3>   c\n \n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "add", "kind"),
    [
        ("granite", add_digits, "refact"),
        ("granite", add_digits, "dbrx"),
        ("smollm3", add_digits, "llama-bpe"),
        ("gemma3", add_pieces, "llama"),
        ("gemma4", add_pieces, "gemma4"),
        ("gpt-oss", add_digits, "gpt-4o"),
    ],
)
def test_words_of_other_architectures_are_split_as_llama_cpp_does(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    add: Callable[[gguf.GGUFWriter, str], None],
    kind: str,
) -> None:
    monkeypatch.setattr("tests.test_gguf.add_tokenizer", lambda writer: add(writer, kind))
    OTHERS[family](file, Kind.F32)
    tokenizer = load_backbone(str(file), FP32).tokenizer
    bodies = [{"content": own, "parse_special": True} for own in TEXTS]
    for own, answer in zip(TEXTS, asked(file, "tokenize", bodies), strict=True):
        assert tokenizer.encode(own, add_special_tokens=False) == answer["tokens"], own
        assert tokenizer.decode(answer["tokens"]) == own


def test_digits_of_a_llama_s_file_are_split_as_llama_cpp_does(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.test_gguf.add_tokenizer", lambda writer: add_digits(writer, "smollm")
    )
    write_gguf(file)
    tokenizer = load_backbone(str(file), FP32).tokenizer
    bodies = [{"content": own, "parse_special": True} for own in TEXTS]
    for own, answer in zip(TEXTS, asked(file, "tokenize", bodies), strict=True):
        assert tokenizer.encode(own, add_special_tokens=False) == answer["tokens"], own


@pytest.mark.quick("qwen35 with a value head for each key head-F32", "qwen35 with experts-F32")
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_with_a_running_state_are_read_from_the_file(
    file: Path, family: str, kind: Kind
) -> None:
    network = HYBRIDS[family](file, kind)
    assert not list(Path(ModelSource.of(str(file)).folder).glob("*.safetensors"))
    ids = torch.tensor(PROMPT)
    expected = network(ids[None]).logits[0]
    bound = 1e-3 if kind == Kind.F32 else 0.1
    for engine in ("native", "eager"):
        backbone = load_backbone(str(file), LoadOptions(dtype="fp32", engine=engine))
        logits = forward(backbone, ids).logits
        assert float((logits - expected).norm() / expected.norm()) < bound, engine
    assert weights_of(ModelSource.of(str(file))) is not None


LATER = {"model.layers.4.eh_proj.weight": torch.ones(64, 128)}


@pytest.mark.slow
def test_layers_that_predict_later_tokens_are_left_out(file: Path) -> None:
    network = write_qwen35(file, Kind.F32, later=LATER)
    backbone = load_backbone(str(file), FP32)
    assert backbone.num_layers == network.config.num_hidden_layers
    ids = torch.tensor(PROMPT)
    expected = network(ids[None]).logits[0]
    torch.testing.assert_close(forward(backbone, ids).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_drafts_over_a_hybrid_s_file_are_plain_decoding(file: Path) -> None:
    write_qwen35(file, Kind.Q8_0)
    backbone = load_backbone(str(file))
    drafter = MedusaHeads.create(backbone, 2, 1, "own").eval()
    drafted = generate(
        backbone, drafter, Tree.dense([2, 1]), PROMPT, max_new_tokens=24, stop_ids=()
    )
    plain = generate_plain(backbone, PROMPT, max_new_tokens=24, stop_ids=())
    assert tokens_of(drafted) == tokens_of(plain)


@pytest.mark.parametrize("key", ["ssm.group_count", "rope.dimension_count", "embedding_length"])
def test_a_hybrid_s_file_without_a_size_is_refused(file: Path, key: str) -> None:
    write_qwen35(file, Kind.F32)
    data = file.read_bytes()
    name = f"qwen35.{key}".encode()
    file.write_bytes(data.replace(name, name[:-1] + b"_"))
    refused(file)


def test_a_hybrid_s_file_with_a_negative_number_of_layers_is_refused(file: Path) -> None:
    write_qwen35(file, Kind.F32, later=LATER)
    data = file.read_bytes()
    key = b"qwen35.nextn_predict_layers"
    place = data.index(key) + len(key)
    as_int32 = struct.pack("<Ii", 5, -1_000_000)
    file.write_bytes(data[:place] + as_int32 + data[place + 8 :])
    refused(file, "layers")


@pytest.mark.slow
def test_words_of_qwen35_s_file_are_split_as_its_own(file: Path) -> None:
    write_qwen35(file, Kind.F32)
    tokenizer = load_backbone(str(file), FP32).tokenizer
    assert type(tokenizer) is transformers.Qwen3_5Tokenizer
    marked = "ab\u0301b"  # a mark within a word, at which an earlier Qwen's tokenizer ends it
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(marked)
    assert len(words) == 1


@pytest.mark.quick("eager")
@pytest.mark.parametrize("engine", ["native", "eager"])
def test_a_file_without_an_lm_head_shares_the_embeddings(file: Path, engine: str) -> None:
    write_gguf(file, leave_out="lm_head")
    backbone = load_backbone(str(file), LoadOptions(dtype="fp32", engine=engine))
    embeddings = gguf.GGUFReader(file).tensors[0].data
    torch.testing.assert_close(backbone.lm_head_weight, torch.from_numpy(np.array(embeddings)))


@pytest.mark.quick("BF16")
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_the_same_weights_in_another_file_have_the_same_digest(
    file: Path, tmp_path: Path, kind: Kind
) -> None:
    network = write_gguf(file, kind)
    folder = Path(ModelSource.of(str(file)).folder)
    assert not list(folder.glob("*.safetensors"))  # weights are read from the file
    dtype = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]
    for name in folder.iterdir():
        (tmp_path / "whole").mkdir(exist_ok=True)
        (tmp_path / "whole" / name.name).write_bytes(name.read_bytes())
    network.to(dtype).save_pretrained(tmp_path / "whole")
    assert weights_of(ModelSource.of(str(file))) == weights_of(
        ModelSource.of(str(tmp_path / "whole"))
    )
    write_gguf(file, kind, seed=1)
    assert weights_of(ModelSource.of(str(file))) != weights_of(
        ModelSource.of(str(tmp_path / "whole"))
    )


@pytest.mark.slow
def test_commands_and_python_take_a_file_and_name_it_by_its_path(file: Path) -> None:
    write_gguf(file)
    words = ["chat", "--model", file, "--dtype", "fp32", "--prompt", "ab", "--max-new-tokens", "8"]
    drafted, plain = medusa_json(*words, "--lookup"), medusa_json(*words, "--baseline")
    loaded = Medusa.from_pretrained(file, drafter=None, dtype="fp32")
    answer = loaded.generate([{"role": "user", "content": "ab"}], max_new_tokens=8)
    assert drafted["answer"] == plain["answer"] == answer.text
    assert plain["tokens"] > 0
    identity = loaded.backbone.identity
    assert identity["id"] == str(file)
    assert identity["weights"] == weights_of(ModelSource.of(str(file)))
    assert ModelSource.of(str(file)).gguf == file


@pytest.mark.slow
def test_metadata_is_written_once_and_again_when_the_file_changes(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(file)
    before, digest = Path(ModelSource.of(str(file)).folder), weights_of(ModelSource.of(str(file)))
    with monkeypatch.context() as patch:
        patch.setattr(
            "medusa_cli.files.gguf.write_metadata", lambda *_: pytest.fail("it was written again")
        )
        assert ModelSource.of(str(file)).folder == str(before)
    write_gguf(file, seed=1)
    after = Path(ModelSource.of(str(file)).folder)
    assert after != before
    assert weights_of(ModelSource.of(str(file))) != digest
    (after / "config.json").unlink()
    after.rename(after.with_name(after.name + ".part"))  # what a killed process leaves
    assert (Path(ModelSource.of(str(file)).folder) / "config.json").is_file()
    assert sorted(path.suffix for path in cache.iterdir() if path.suffix != ".lock") == ["", ""]


@pytest.mark.slow
def test_files_beside_it_are_not_read(file: Path) -> None:
    write_gguf(file)
    for name in (
        "adapter_config.json",
        "config.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        file.with_name(name).write_text("{")
    load_backbone(str(file), FP32)


@pytest.mark.slow
def test_the_end_of_a_turn_ends_an_answer(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(file, change=lambda writer: writer.add_eot_token_id(END - 1))
    assert load_backbone(str(file), FP32).eos_ids == {END, END - 1}
    # A file that does not name it.
    monkeypatch.setattr("medusa_cli.files.gguf.ENDS_OF_TURNS", ("<unused2>",))
    other = file.with_name("other.gguf")
    write_gguf(other, template="{{ messages }} ")
    ends = load_backbone(str(other), FP32).eos_ids
    assert len(ends) == 2
    assert END in ends


def test_factors_in_another_file_of_a_split_model_are_read(file: Path) -> None:
    factors = np.array([1, 1.5, 4, 8], np.float32)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    write_gguf(file, change=add)
    ids = torch.tensor(PROMPT)
    whole = forward(load_backbone(str(file), FP32), ids).logits
    write_gguf(file, change=add, split_max_tensors=8, small_first_shard=True)
    first, *_ = split_files(file)
    assert read_header(first).tensors["rope_freqs.weight"].file > 0
    assert torch.equal(forward(load_backbone(str(first), FP32), ids).logits, whole)


def test_positions_are_scaled_by_the_key_of_older_files(file: Path) -> None:
    write_gguf(file, change=lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0))
    assert load_backbone(str(file), FP32).config.rope_parameters["factor"] == 4


@pytest.mark.slow
def test_chat_needs_a_template(file: Path) -> None:
    write_gguf(file, template=None)
    done = medusa("chat", "--model", file, "--lookup", "--prompt", "ab", exit_code=1)
    assert "template" in done.stderr
    assert "Traceback" not in done.stderr


def integers(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.1.ffn_up.weight", np.ones((64, 32), np.int32))


def of_sums(writer: gguf.GGUFWriter) -> None:
    rows = np.zeros((64, 40), np.uint8)
    writer.add_tensor("blk.1.ffn_up.weight", rows, raw_dtype=Kind.Q8_1)


def turned(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.1.ffn_up.weight", np.ones((32, 64), np.float32))


@pytest.mark.quick(
    "options10-scaled",
    "options12-00001-of-00003",
    "options14-alignment",
    "options2-ffn_up",
    "options6-Q8_1",
    "options7-rope_freqs",
    "options8-rope_freqs",
    "options9-rope_freqs.bias",
)
@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"arch": "clip"}, "mmproj"),
        ({"arch": "no_such"}, "no_such"),
        ({"leave_out": "layers.1.mlp.up_proj"}, "ffn_up"),
        ({"change": lambda writer: writer.add_tokenizer_model("no_such")}, "no_such"),
        ({"leave_out": "layers.1.mlp.up_proj", "change": integers}, "ffn_up"),
        ({"leave_out": "layers.1.mlp.up_proj", "change": turned}, "ffn_up"),
        ({"leave_out": "layers.1.mlp.up_proj", "change": of_sums}, "Q8_1"),
        (
            {
                "change": lambda writer: writer.add_tensor(
                    "rope_freqs.weight", np.ones(3, np.float32)
                )
            },
            "rope_freqs",
        ),
        (
            {
                "change": lambda writer: writer.add_tensor(
                    "rope_freqs.weight", np.zeros(4, np.float32)
                )
            },
            "rope_freqs",
        ),
        (
            {"change": lambda writer: writer.add_tensor("rope_freqs.bias", np.ones(4, np.float32))},
            "rope_freqs.bias",
        ),
        ({"change": lambda writer: writer.add_string("llama.rope.scaling.type", "su")}, "scaled"),
        ({"change": lambda writer: writer.add_string("llama.rope.scaling.type", "yarn")}, "factor"),
        ({"change": lambda writer: writer.add_uint16("split.count", 3)}, "00001-of-00003"),
        ({"change": lambda writer: writer.add_string("split.count", "3")}, "first"),
        ({"change": lambda writer: writer.add_uint32("general.alignment", 0)}, "alignment"),
        ({"change": lambda writer: writer.add_uint64("other.block_count", 10**9)}, "1000000000"),
    ],
)
def test_files_that_would_not_be_read_whole_are_refused(
    file: Path, cache: Path, options: dict[str, Any], part: str
) -> None:
    write_gguf(file, **options)
    refused(file, part)
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(("number", "part"), [(31, "Q4_0_4_4"), (38, "IQ4_NL_8_8"), (999, "999")])
def test_types_that_llama_cpp_gave_up_are_named(file: Path, number: int, part: str) -> None:
    write_gguf(file)
    data = file.read_bytes()
    name = b"blk.1.ffn_up.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8  # behind the dimensions
    file.write_bytes(data[:place] + struct.pack("<I", number) + data[place + 4 :])
    refused(file, part, name.decode())


def test_types_that_are_read_are_those_of_the_library() -> None:
    assert set(READABLE) == set(Format.__members__)


def split_files(file: Path) -> list[Path]:
    return sorted(file.parent.glob(f"{file.stem}-*-of-*.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize("first_is_small", [False, True])
def test_a_model_in_several_files_is_that_of_one(file: Path, first_is_small: bool) -> None:
    write_gguf(file)
    whole = load_backbone(str(file), FP32)
    write_gguf(file, split_max_tensors=8, small_first_shard=first_is_small)
    files = split_files(file)
    assert len(files) > 2
    split = load_backbone(str(files[0]), FP32)
    ids = torch.tensor(PROMPT)
    assert torch.equal(forward(split, ids).logits, forward(whole, ids).logits)
    assert split.identity["weights"] == whole.identity["weights"]


@pytest.mark.slow
def test_a_change_in_any_of_several_files_is_seen(file: Path) -> None:
    write_gguf(file, split_max_tensors=8)
    first, *others = split_files(file)
    ids = torch.tensor(PROMPT)
    before = forward(load_backbone(str(first), FP32), ids).logits  # its weights are cached now
    kept = first.read_bytes()
    time = first.stat().st_mtime_ns
    write_gguf(file, split_max_tensors=8, seed=1)
    first.write_bytes(kept)
    os.utime(first, ns=(time, time))
    assert not torch.equal(forward(load_backbone(str(first), FP32), ids).logits, before)


@pytest.mark.quick("adapter.type-lora-LoRA adapter")
@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("general.type", "adapter", "LoRA adapter"),
        ("adapter.type", "lora", "LoRA adapter"),
        ("general.type", "mmproj", "mmproj"),
        ("general.type", "imatrix", "importance matrix"),
    ],
)
def test_files_that_hold_no_model_are_named(file: Path, key: str, value: str, part: str) -> None:
    write_gguf(file, change=lambda writer: writer.add_string(key, value))
    words = ("chat", "--model", file, "--prompt", "a")
    assert part in medusa(*words, exit_code=1).stderr


@pytest.mark.parametrize(
    ("arch", "part"),
    [("clip", "mmproj"), ("llama", "vocabulary"), ("gemma4-assistant", "assistant")],
)
def test_files_without_a_model_s_weights_are_named(file: Path, arch: str, part: str) -> None:
    writer = gguf.GGUFWriter(file, arch)
    add_tokenizer(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=part):
        load_backbone(str(file), FP32)


def test_files_of_a_split_model_that_do_not_fit_are_refused(file: Path) -> None:
    write_gguf(file, split_max_tensors=8)
    first, second, *others = split_files(file)
    load_backbone(str(first), FP32)  # what is cached now hides nothing
    refused(second, "first")
    kept = second.read_bytes()
    second.write_bytes(others[0].read_bytes())
    refused(first, second.name)
    second.write_bytes(kept[:300])
    with pytest.raises(UserError, match=f"{second.name}.*ends too early"):
        load_backbone(str(first), FP32)
    second.unlink()
    refused(first, second.name, "missing")
    first.rename(file)
    refused(file, "first")


def test_a_split_model_with_fewer_tensors_than_it_states_is_refused(file: Path) -> None:
    write_gguf(file, split_max_tensors=8)
    first = split_files(file)[0]
    key = b"split.tensors.count"
    data = first.read_bytes()
    place = data.index(key) + len(key) + 4  # behind the type
    first.write_bytes(data[:place] + struct.pack("<i", 1000) + data[place + 4 :])
    refused(first, "of 1000 tensors")


def test_a_split_model_that_must_be_dequantized_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.files.gguf.DIRECT", ())
    write_gguf(file, split_max_tensors=8)
    refused(split_files(file)[0], "llama-gguf-split --merge")


@pytest.mark.quick("context_length", "feed_forward_length")
@pytest.mark.parametrize(
    "name",
    [
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "context_length",
    ],
)
def test_impossible_sizes_are_refused(file: Path, name: str) -> None:
    write_gguf(file)
    data, key = file.read_bytes(), f"llama.{name}".encode()
    place = data.index(key) + len(key) + 4  # behind the type
    file.write_bytes(data[:place] + struct.pack("<I", 2**31 - 1) + data[place + 4 :])
    refused(file)


def text(data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(data) if length is None else length) + data


def header(tensors: int = 0, entries: int = 1, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


def hostile() -> Iterator[tuple[str, bytes]]:
    key = text(b"general.architecture")
    yield "version", header(version=99)
    yield "other byte order", header(version=3 << 24)
    yield "tensors", header(2**62, 0)
    yield "entries", header(0, 2**62)
    yield "key", header(rest=text(b"a", 2**62))
    yield "text", header(rest=key + struct.pack("<I", 8) + text(b"llama", 2**40))
    yield "no utf-8", header(rest=key + struct.pack("<I", 8) + text(b"\xff\xfe"))
    yield "unknown type", header(rest=key + struct.pack("<I", 77))
    yield "array", header(rest=key + struct.pack("<IIQ", 9, 0, 2**62))
    yield "array of texts", header(rest=key + struct.pack("<IIQ", 9, 8, 2**62))
    yield "array of arrays", header(rest=key + struct.pack("<IIQ", 9, 9, 1) * 1000)
    yield "dimensions", header(1, 0, text(b"a") + struct.pack("<I", 2**31))
    yield "shape", header(1, 0, text(b"a") + struct.pack("<I4QIQ", 4, *[2**62] * 4, 0, 0))
    yield "offset", header(1, 0, text(b"a") + struct.pack("<I1QIQ", 1, 32, 0, 2**63))
    yield "type of tensor", header(1, 0, text(b"a") + struct.pack("<I1QIQ", 1, 32, 250, 0))


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in hostile()])
def test_hostile_headers_are_refused_before_they_take_memory(file: Path, data: bytes) -> None:
    file.write_bytes(data + bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(UserError):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    refused(file)


def test_a_file_that_ends_too_early_is_refused(file: Path) -> None:
    write_gguf(file)
    data = file.read_bytes()
    for size in (5, 20, 30, 200, 2000, len(data) // 2, len(data) - 64):
        file.write_bytes(data[:size])
        refused(file, "ends too early")


@pytest.mark.parametrize("data", [b"", b"GGU", b"PK\x03\x04 anything else"])
def test_other_files_are_no_models(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    done = medusa("chat", "--model", file, "--lookup", "--prompt", "ab", exit_code=1)
    assert str(file) in done.stderr
    assert done.stderr.count("\n") == 1
    with pytest.raises(UserError, match=r"missing\.gguf"):
        str(ModelSource.of("missing.gguf").folder)


@pytest.mark.quick("llama.cpp-ngram")
@pytest.mark.parametrize("name", LLAMA)
def test_llama_cpp_decodes_the_same_file(file: Path, name: str) -> None:
    pytest.importorskip("xllamacpp")
    write_gguf(file)
    backbone = load_backbone(str(file), FP32)
    plain = tokens_of(generate_plain(backbone, PROMPT, max_new_tokens=48))
    [answer] = llama_method(name, file, backbone)([PROMPT], 48, lambda tokens: None)
    assert answer.turns[0][:8] == plain[:8]
    assert answer.tokens == len(plain)
    assert len(answer.first_token_s) == 1
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match=file.name):
        llama_method(name, file, backbone)


@pytest.mark.slow
def test_no_end_token_follows_a_raw_prompt(file: Path) -> None:
    write_gguf(file, change=lambda writer: writer.add_add_eos_token(True))
    medusa = Medusa.from_pretrained(str(file), drafter=None, dtype="fp32")
    assert medusa.encode("ab", raw=True) == [256]
    assert END not in medusa.encode("", raw=True)


@pytest.mark.slow
def test_the_first_token_still_precedes_a_raw_prompt(file: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(END - 1)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    write_gguf(file, change=change)
    medusa = Medusa.from_pretrained(str(file), drafter=None, dtype="fp32")
    assert medusa.encode("ab", raw=True) == [END - 1, 256]
    assert medusa.encode("", raw=True) == [END - 1]


def test_ids_without_a_token_have_no_text(tmp_path: Path) -> None:
    unused = range(257, VOCAB - 2)

    def change(writer: gguf.GGUFWriter) -> None:
        types = writer.kv_data[0].pop("tokenizer.ggml.token_type").value
        writer.add_token_types([5 if id in unused else kind for id, kind in enumerate(types)])
        # A vocabulary of this kind holds it; transformers would add it in a gap.
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[END - 1] = "<|endoftext|>"

    path = tmp_path / "t.gguf"
    write_gguf(path, change=change)
    tokenizer = load_backbone(str(path), FP32).tokenizer
    assert tokenizer.decode([97, *unused, 98]) == tokenizer.decode([97, 98]) != ""
    assert tokenizer.decode(tokenizer("ab <unused0>")["input_ids"]) == "ab <unused0>"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gguf", "index"])
def test_a_later_start_of_chat_reads_each_file_of_the_model_once(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    network = write_gguf(file)
    model = file
    if kind == "index":
        model = tmp_path / "parts"
        shutil.copytree(ModelSource.of(str(file)).folder, model)
        network.save_pretrained(model, max_shard_size="60KB")
    words = ("--model", model, "--prompt", "ab", "--max-new-tokens", 2, "--quiet")
    medusa("chat", *words)
    reads: Counter[str] = Counter()
    original = Path.open

    def counting(path: Path, *rest: Any, **named: Any) -> Any:
        reads[str(path)] += 1
        return original(path, *rest, **named)

    def no_header(path: Path, **_: Any) -> None:
        raise AssertionError(f"the header of {path} is read again")

    monkeypatch.setattr(Path, "open", counting)
    monkeypatch.setattr("medusa_cli.files.model_source.read_header", no_header)
    medusa("chat", *words)
    opened = reads[str(file)]
    folder = Path(ModelSource.of(str(model)).folder)
    metadata = {
        path.name: reads[str(path)] for path in folder.glob("*") if path.suffix != ".safetensors"
    }
    assert metadata["config.json"] == 1, metadata
    assert max(metadata.values()) == 1, metadata
    if kind == "index":
        assert metadata["model.safetensors.index.json"] == 1
    else:
        # Its first bytes say its format, and samples of its content make its stamp.
        assert opened == 2


# Compilers, training and tables of data: a start for decoding needs none of them.
UNUSED = {
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "mpmath"),
    *("accelerate", "datasets", "matplotlib", "pandas", "peft", "pyarrow", "scipy", "sklearn"),
    *("gguf", "starlette", "transformers.modeling_utils", "uvicorn", "xgrammar"),
    *("triton", "medusa_cli.engine.exact", "medusa_cli.engine.plain_kernels"),
}
CHATTING = """
import sys
from medusa_cli.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_later_start_imports_nothing_that_it_does_not_need(file: Path) -> None:
    # transformers' config of a Llama imports some of these modules itself.
    write_gguf(file, arch="qwen2", network=tiny_network("qwen2"))
    run = save_run(file.parent / "run", str(file), kind=Eagle)
    words = ("chat", "--run", str(run.path), "--prompt", "ab", "--max-new-tokens", "4")
    medusa(*words)
    done = python(f"import sys; sys.argv[1:] = {words!r}\n{CHATTING}", check=True)
    loaded = set(done.stderr.split())
    assert "torch" in loaded
    assert loaded & UNUSED == set()
