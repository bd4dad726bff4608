"""GGUF files as models: their config and tokenizer, written in the form that transformers reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from medusa_cli.errors import UserError, first_line, shown
from medusa_cli.files.gguf_configs import CONFIGS, Keys
from medusa_cli.files.gguf_header import ELSEWHERE, Header, read_header
from medusa_cli.files.gguf_names import FREQUENCIES, names_of
from medusa_cli.files.gguf_tokenizer import leave_out_unused, own_tokenizer, split_digits
from medusa_cli.files.quiet import without_progress_bars

# Architectures whose tensors have transformers' layout, except for differences that GgufNames
# resolves, such as the order of rows in a Llama model's heads.
DIRECT = (
    *("llama", "qwen2", "qwen3", "gemma2", "starcoder2", "stablelm"),
    *("qwen2moe", "qwen3moe", "lfm2", *CONFIGS),
)
# Texts of tokens that end a turn. They are not searched for in the architectures of ENDS_KNOWN: their
# configs have all end tokens, and one of these texts has another meaning there.
ENDS_OF_TURNS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
ENDS_KNOWN = ("gpt-oss", "gemma4")
# The number of layers of Gemma 2 27B. According to that model's own config, its query_pre_attn_scalar
# is hidden_size / num_attention_heads, as in Gemma 3 27B.
LAYERS_OF_GEMMA2_27B = 46
# The tensor of the lm_head; a file without this tensor uses the embeddings as its lm_head.
HEAD = "output.weight"
# Keys with the sizes of experts, which transformers' reader ignores, and the config fields for them.
EXPERT_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# The name and the remedy of each kind of file that holds no model. The key general.type states the kind; in older
# files, the architecture does.
OWN_FILE = "give the model's own GGUF file"
NO_MODELS = {
    "adapter": (
        "a LoRA adapter",
        "merge it into its model (llama.cpp's llama-export-lora), and give the merged file",
    ),
    "mmproj": ("the part of a model that reads images or sound (mmproj)", OWN_FILE),
    "clip": ("the part of a model that reads images or sound (mmproj)", OWN_FILE),
    "imatrix": ("an importance matrix for quantizing", OWN_FILE),
    "controlvector": ("a control vector", OWN_FILE),
    "gemma4-assistant": (
        "an assistant of Gemma 4",
        "give Gemma 4's own file, and the assistant's folder or hub id as @drafter",
    ),
}
# A tensor that every model has in its first layer. A file that has the key LATER but not this tensor
# holds only MTP layers.
FIRST = "blk.0.attn_norm.weight"
LATER = "nextn_predict_layers"


@without_progress_bars()
def write_metadata(path: Path, header: Header, folder: Path) -> None:
    """Writes a GGUF file's config, generation config and tokenizer to a folder, in the form that transformers reads.

    Weights stay in the file. But if only transformers' reader supports the architecture, that reader dequantizes them
    into the folder. Raises UserError if that reader does not support it either, or would leave something out.
    """
    _refuse_other_files(path, header)
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    folder.mkdir()
    # The link is alone in its folder, because transformers also reads the files next to a GGUF file.
    link = folder / "model.gguf"
    link.symlink_to(path.absolute())
    named = {"pretrained_model_name_or_path": str(folder), "gguf_file": link.name}
    source = {**named, "trust_remote_code": False}
    try:
        logging.set_verbosity_error()
        keys = Keys(read_header(path, arrays=True))
        factors = keys.factors(FREQUENCIES)
        config, tokenizer = _config_and_tokenizer(keys, source)
        config.dtype = header.dtype
        config.tie_word_embeddings = HEAD not in header.tensors
        for key, own in EXPERT_SIZES.items():
            size = header.metadata.get(f"{header.architecture}.{key}")
            if size is not None and hasattr(config, own):
                setattr(config, own, size)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        config.architectures = [type(network).__name__]
        # Gemma 4's factors only say which part of a head rotates. The config already has that part.
        if factors and header.architecture != "gemma4":
            _check_factors(factors, config, network)
            config.rope_parameters |= {
                "rope_type": "longrope",  # the only rope type with factors, here the same for all lengths
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": config.max_position_embeddings,
            }
        generation = GenerationConfig.from_model_config(config)
        generation.eos_token_id = _ends(config, keys) or None
        if header.architecture in DIRECT:
            names_of(header, network)
        else:
            _dequantize(source, header, network, len(factors), folder)
    except (MemoryError, OSError, UserError):
        raise
    except Exception as reason:  # a damaged file may raise any exception
        fault = f"@model {str(path)!r}, a GGUF file, cannot be used: {first_line(reason)}"
        raise UserError(fault.removesuffix("."), ELSEWHERE) from reason
    finally:
        logging.set_verbosity(verbosity)
    link.unlink()
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _refuse_other_files(path: Path, header: Header) -> None:
    """Raises UserError for a GGUF file that holds no model, such as an adapter."""
    kind = header.architecture
    if kind not in NO_MODELS:
        kind = str(header.metadata.get("general.type", kind))
    if "adapter.type" in header.metadata:
        kind = "adapter"
    text, remedy = NO_MODELS.get(kind, (None, ""))
    if text is None and not header.tensors:
        text, remedy = "a vocabulary without weights", OWN_FILE
    if header.metadata.get(f"{header.architecture}.{LATER}") and FIRST not in header.tensors:
        text, remedy = (
            "the layer for later tokens (MTP) alone",
            f"{OWN_FILE}, which may hold it, too",
        )
    if text is not None:
        raise UserError(f"@model {str(path)!r} is {text}, not a model", remedy)


def _ends(config: Any, keys: Keys) -> list[int]:
    """Returns the tokens that end an answer: the config's end tokens, and the token that ends a turn.

    Many files do not name the token that ends a turn. It is then found by its text, as in llama.cpp.
    """
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    end_of_turn = keys.header.metadata.get("tokenizer.ggml.eot_token_id")
    turns: list[Any] = [end_of_turn]
    if end_of_turn is None and keys.header.architecture not in ENDS_KNOWN:
        turns = keys.tokens(ENDS_OF_TURNS)
    return [end for end in dict.fromkeys([*ends, *turns]) if end is not None]


def _config_and_tokenizer(keys: Keys, source: dict[str, Any]) -> tuple[Any, Any]:
    """Returns a file's config and tokenizer. A function of `CONFIGS` makes the config, or else transformers' reader."""
    from transformers import AutoConfig, AutoTokenizer

    header = keys.header
    if header.architecture in CONFIGS:
        config = CONFIGS[header.architecture](keys)
        tokenizer = own_tokenizer(header, source)
    else:
        scaling = keys.scaling()
        with _read_once(header):
            config = AutoConfig.from_pretrained(**source)
            tokenizer = AutoTokenizer.from_pretrained(**source)
        if header.architecture == "gemma2" and config.num_hidden_layers == LAYERS_OF_GEMMA2_27B:
            config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
        if scaling["rope_type"] != "default":
            if header.architecture not in DIRECT:
                raise ValueError("its positions are scaled, which transformers' reader leaves out")
            config.rope_parameters |= scaling
    split_digits(header, tokenizer)
    leave_out_unused(header, tokenizer)
    return config, tokenizer


def _dequantize(
    source: dict[str, Any], header: Header, network: Any, left_out: int, folder: Path
) -> None:
    """Writes the weights as safetensors with transformers' reader; raises ValueError if the reader would omit some."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    if len(header.files) > 1:
        raise ValueError(
            "transformers' reader takes no several files; join them with `llama-gguf-split --merge`"
        )
    wanted = sum(weight.numel() for weight in network.parameters()) + left_out
    if wanted != header.numbers:
        raise ValueError(
            f"it holds {header.numbers:,} weights, and transformers' reader makes {wanted:,} of them"
        )
    # Without dequantize=True, the weights stay quantized, and such a model cannot be saved.
    model, info = AutoModelForCausalLM.from_pretrained(
        **source,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, header.dtype),
        output_loading_info=True,
    )
    if info["missing_keys"]:
        raise ValueError(f"it lacks {shown(min(info['missing_keys']))}")
    model.save_pretrained(folder)


@contextmanager
def _read_once(header: Header) -> Iterator[None]:
    """Makes transformers use `header`'s metadata: transformers' reader takes ten seconds for large vocabularies."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reading

    class Field:
        types: tuple[()] = ()

        def __init__(self, value: Any) -> None:
            self.parts = value if isinstance(value, list) else [value]
            self.data = range(len(self.parts))

    class Reader:
        fields = {key: Field(value) for key, value in header.metadata.items()}
        tensors = [SimpleNamespace(name=name) for name in header.tensors]

    with (
        patch.object(gguf, "GGUFReader", lambda file: Reader),
        patch.object(reading, "_gguf_parse_value", lambda value, types: value),
    ):
        yield


def _check_factors(factors: list[float], config: Any, network: Any) -> None:
    """Raises ValueError if the factors do not fit the rotary embedding, or if the config also scales positions."""
    if config.rope_parameters.get("rope_type") != "default":
        raise ValueError(f"it has both {FREQUENCIES} and other scaled positions")
    embedding = getattr(getattr(network, "model", None), "rotary_emb", None)
    frequencies = getattr(embedding, "inv_freq", None)
    if frequencies is None or frequencies.shape != (len(factors),):
        raise ValueError(
            f"its {FREQUENCIES} has {len(factors)} factors, which do not fit the rotary embedding"
        )
