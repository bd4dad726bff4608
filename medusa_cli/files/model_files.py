"""Reads a model's files and refuses unusable models, without torch, because importing torch takes a second."""

import json
import logging
import re
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from medusa_cli.errors import UserError, listed
from medusa_cli.files.io import read_object
from medusa_cli.files.layer_kinds import KINDS, STATEFUL
from medusa_cli.files.model_source import AGAIN, WEIGHTS, ModelSource
from medusa_cli.files.safetensors_files import OTHER_WEIGHTS

log = logging.getLogger(__name__)
# The largest header that safetensors reads.
MAX_HEADER = 100_000_000
# The names of tokenizer files contain one of these.
TOKENIZER_FILES = ("token", "vocab", "spiece", "tekken")
# The files that may hold a chat template, besides tokenizer_config.json.
CHAT_TEMPLATES = (
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/default.jinja",
)
# The methods of transformers' cache with which layers store a new state.
STATE_UPDATES = ("update_conv_state", "update_recurrent_state")
# Flags of network classes whose attention can be replaced.
ATTENTION_FLAGS = ("_supports_sdpa", "_supports_attention_backend")
# Configs with these fields have sparse attention, in which a small network chooses the tokens that
# each query reads.
INDEXERS = ("index_topk", "indexer_budget", "indexer_n_heads")
INDEXED = "sparse attention, in which an indexer chooses the tokens that each token reads"
OUTSIDE = (
    "Mamba or linear-attention layers (a running state) that keep it outside transformers' cache"
)
PREFIX_LM = "a prompt's tokens see those that follow in it (a prefix LM)"
# Models to suggest in place of a refused model, by the prefix of its type.
INSTEAD = {
    "axk": "A.X-K1",
    "deepseek": "DeepSeek V3",
    "glm": "GLM-4.5",
    "hy_": "Hunyuan (hy_v3)",
    "inkling": "Qwen3.5",
    "minimax": "MiniMax M2",
    "mistral": "Mistral Small 3",
    "phi4": "Phi-4",
    "qwen": "Qwen3",
    "qwen4": "Qwen3.5",
    "recurrent_gemma": "Gemma 3",
    "rwkv": "Falcon-H1 or Mamba-2",
    "xlstm": "Falcon-H1 or Mamba-2",
    "zamba": "Falcon-H1 or Bamba",
}
# Names of a text model's layers in checkpoints, and the fields of configs that count them.
LAYER = re.compile(
    r"(?:(?:model|language_model|text_model|transformer|gpt_neox|decoder|backbone)\.)*(?:layers|h|blocks)\.(\d+)\."
)
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
# Parts of the names of tensors in layers after the last one, which predict later tokens.
OF_MTP = ("eh_proj", "enorm", "hnorm", "shared_head", "mtp")
GIT_LFS = b"version https://git-lfs"


def check_model_files(model: ModelSource) -> None:
    """Raises UserError for a model whose files show that it cannot verify a tree.

    When the model is loaded, further checks use transformers' classes and a pass of the model. A model that must be
    fetched is checked only when it is loaded, so that errors in the command line are reported before the fetch.
    """
    if model.kind == "random" or model.must_be_fetched or model.fields is None:
        return
    text = SimpleNamespace(**{"model_type": "", **model.text_fields})
    refuse_by_config(SimpleNamespace(**model.fields), text)
    if "auto_map" not in model.fields:  # with auto_map, the model's own code may run instead
        refuse_by_source(text)
    check_weights(model)
    check_tokenizer(model)


def check_weights(model: ModelSource) -> None:
    """Raises UserError if a model's safetensors files are missing, or damaged, for example by a broken download.

    Reads only the files' headers. Warns of an index that is not used, and of layers that the config does not count.
    """
    if model.kind in ("random", "gguf"):
        return
    folder = Path(model.folder)
    single, index = (model.file(file) for file in WEIGHTS)
    if single is None and index is None and folder.is_dir():
        raise _no_weights(model.name, folder)
    if single is not None and index is not None:
        _warn_once(
            f"the model {model.name!r} holds {single.name} and {index.name}: the weights of {single.name} are used, "
            "the files of the index are left out"
        )
    if single is None and index is not None and folder.is_dir():
        check_shards(folder, index.name, model.index.values())
    for path in model.checkpoint:
        if (fault := fault_of(path)) is not None:
            raise UserError(f"@model {model.name!r}: {path} {fault}", AGAIN)
    _warn_of_more_layers(model)


def _warn_of_more_layers(model: ModelSource) -> None:
    """Warns if a model's files hold layers that its config does not count, except layers that predict later tokens."""
    text = model.text_fields
    counts = [text[key] for key in LAYER_COUNTS if isinstance(text.get(key), int)]
    stored: dict[int, str] = {}
    for tensor in model.tensors:
        if (layer := LAYER.match(tensor)) is not None:
            stored[int(layer[1])] = stored.get(int(layer[1]), "") + tensor
    more = [layer for layer in sorted(stored) if counts and layer >= max(counts)]
    more = [layer for layer in more if not any(part in stored[layer] for part in OF_MTP)]
    if more:
        _warn_once(
            f"the files of the model {model.name!r} hold layers up to {more[-1]}, and its config.json counts "
            f"{max(counts)} of them: the others are left out, so it writes other text than the whole model; "
            "num_hidden_layers in config.json is the number of layers"
        )


@cache
def _warn_once(text: str) -> None:
    log.warning(text)


def _no_weights(name: str, folder: Path) -> UserError:
    """Returns the error for a folder without weights in safetensors files, with the names of other weights."""
    others = sorted(path for path in folder.iterdir() if path.suffix in OTHER_WEIGHTS)
    fault = f"@model {name!r} holds no {WEIGHTS[0]} and no {WEIGHTS[1]}"
    if others:
        fault += f", only {listed([path.name for path in others])}"
    suffixes = {path.suffix for path in others}
    if ".gguf" in suffixes:
        file = next(path for path in others if path.suffix == ".gguf")
        return UserError(fault, f"give the GGUF file, such as {file}")
    if not others or ".safetensors" in suffixes:
        return UserError(fault, f"{AGAIN}, with all its files")
    return UserError(
        f"{fault}, which may hold code and are not read",
        "download its safetensors files, or save it with transformers' save_pretrained where you trust it",
    )


def check_shards(folder: Path, index: str, files: Collection[str], again: str = AGAIN) -> None:
    """Raises UserError with all files that an index names and the folder lacks."""
    names = sorted(set(files))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        fault = f"{folder} lacks {len(missing)} of the {len(names)} files that {index} names: {listed(missing)}"
        raise UserError(fault, again)


def fault_of(path: Path) -> str | None:
    """Returns the fault of a safetensors file, based on its size and header; None if there is none."""
    size = path.stat().st_size
    if not size:
        return "is empty"
    with path.open("rb") as file:
        start = file.read(len(GIT_LFS))
        if start == GIT_LFS:
            return "is a pointer of git-lfs, not the file itself (`git lfs pull` fetches it)"
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            return "is not a safetensors file"
        header = file.read(length)
    if size < 8 + length:
        return f"is cut off after {size:,} bytes"
    try:
        tensors = json.loads(header)
        ends = [entry["data_offsets"][1] for key, entry in tensors.items() if key != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return "is not a safetensors file: its header is damaged"
    if size < expected:
        return f"is cut off after {size:,} of {expected:,} bytes"
    return None


def check_tokenizer(model: ModelSource) -> None:
    """Raises UserError for a folder without any tokenizer file."""
    folder = Path(model.folder)
    if folder.is_dir() and not any(
        word in path.name for path in folder.iterdir() for word in TOKENIZER_FILES
    ):
        fault = f"@model {model.name!r} has no tokenizer"
        raise UserError(fault, "put the model's tokenizer.json into its folder")


def no_chat_template(model: str) -> UserError:
    return UserError(
        f"the model {model!r} has no chat template",
        "use an instruction-tuned model, or write a template into chat_template.jinja in its folder (chat, serve and "
        "distill also take @chat_template FILE); `medusa chat --raw` continues texts as they are",
    )


def check_chat_template(model: ModelSource) -> None:
    """Raises UserError for a folder whose tokenizer.json has no chat template beside it.

    Other tokenizers, and those with code of their own, may have a template in their code.
    """
    if model.kind == "random" or model.must_be_fetched or not Path(model.folder).is_dir():
        return
    config = model.file("tokenizer_config.json")
    fields = {} if config is None else read_object(config)
    known = "chat_template" in fields or "auto_map" in fields or model.file("tekken.json")
    if model.file("tokenizer.json") and not known and not any(map(model.file, CHAT_TEMPLATES)):
        raise no_chat_template(model.name)


def refuse_by_config(config: Any, text: Any) -> None:
    """Raises UserError for attention that a tree mask cannot express.

    config, text: transformers' configs of a model and of its text part, or objects with the fields of config.json.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise unverifiable(text, "it is an encoder-decoder, not a causal LM")
    if getattr(text, "alibi", False):
        raise unverifiable(text, "its attention has ALiBi position biases")
    if getattr(text, "prefix_lm", False):
        raise unverifiable(text, PREFIX_LM)
    kinds = {kind for kind in layer_kinds(text) if kind not in KINDS}
    if any("sparse" in kind or "compressed" in kind or "indexed" in kind for kind in kinds):
        raise unverifiable(text, f"it has {INDEXED}")
    if kinds:
        raise unverifiable(text, f"it has layers of kind {', '.join(sorted(kinds))}")
    if any(getattr(text, field, None) for field in INDEXERS):
        raise unverifiable(text, f"it has {INDEXED}")


def layer_kinds(text: Any) -> list[str]:
    """Returns the kinds of layers as the text config names them; an empty list if all layers are alike."""
    return list(getattr(text, "layer_types", None) or getattr(text, "block_types", None) or ())


def refuse_by_source(text: Any) -> None:
    """Raises UserError if transformers' source code for a model type shows no way to verify a tree.

    Reading the source avoids importing the network's class, which takes two seconds.
    """
    if (source := source_of(text.model_type)) is None:
        return
    stateful = any(f"{name}(" in source for name in STATE_UPDATES)
    if not stateful and any(kind in STATEFUL for kind in layer_kinds(text)):
        raise unverifiable(text, f"it has {OUTSIDE}")
    if not stateful and not any(f"{flag} = True" in source for flag in ATTENTION_FLAGS):
        raise no_attention(text)


def source_of(kind: str) -> str | None:
    """Returns the source code of transformers' network for a model type; None if there is no such file."""
    spec = find_spec("transformers")
    module = kind.replace("-", "_")
    if spec is None or spec.origin is None or not module.isidentifier():
        return None
    path = Path(spec.origin).parent / "models" / module / f"modeling_{module}.py"
    return path.read_text(encoding="utf-8") if path.is_file() else None


def no_attention(text: Any) -> UserError:
    return unverifiable(
        text, "its attention, or what it has in place of it, cannot be given a tree's mask"
    )


def unverifiable(text: Any, why: str) -> UserError:
    """Returns the error for a model, given by its text config, that cannot verify a tree."""
    fault = f"the model type {text.model_type!r} cannot be verified over a tree: {why}"
    return UserError(fault, instead_of(text))


def foreign_logits(text: Any, why: str) -> UserError:
    """Returns the error for a model whose logits do not follow from its lm_head's scores by a known formula."""
    return UserError(
        f"the model type {text.model_type!r} changes the lm_head's logits in a way that is not supported "
        f"({why}); sampling and training would not be the model's",
        instead_of(text),
    )


def instead_of(text: Any) -> str:
    """Returns the remedy for an unusable model, given by its text config."""
    starts = [start for start in INSTEAD if text.model_type.startswith(start)]
    others = (
        "Llama, Mistral, Qwen3, Gemma 3 or another model that runs (the page Models lists them)"
    )
    return f"use {INSTEAD[max(starts, key=len)]}, or {others}" if starts else f"use {others}"
