"""EAGLE-3 folders: what vLLM, SGLang and llama.cpp's converter read, and SpecForge, speculators and AngelSlim write."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_cli import assets
from medusa_cli.backbone.network import read_config
from medusa_cli.errors import UserError
from medusa_cli.exporting.folder import Exported, exporting
from medusa_cli.exporting.imported import Base, Imported
from medusa_cli.exporting.source import Source
from medusa_cli.exporting.tensors import check_tensors
from medusa_cli.runs.files import write_json

KIND = "eagle"
WEIGHTS = "model.safetensors"
IDS = "eagle_aux_hidden_state_layer_ids"
# How deep to draft where a checkpoint does not say how deep it was trained: SpecForge's default.
LEVELS = 7
# Variants of the layer that this project's has not: configs that switch one on are refused.
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
README = """# EAGLE-3 drafter for {model}

Written by `medusa export --to eagle3`. It drafts up to {levels} tokens; the engines below verify them with {model}.

{launch}
"""


def export_eagle3(source: Source, output: Path, *, overwrite: bool = False) -> Exported:
    """Write a drafter of the kind eagle as other engines read it; UserError for any other kind."""
    if source.kind != KIND:
        raise UserError(
            f"{source.run.drafter_dir} is a {source.kind} drafter, and this layout is for {KIND} ones",
            "use @to hf, which takes it, or a @run with an eagle drafter (`medusa train drafter=eagle`)",
        )
    config = _config(source)
    maps = {"d2t": (config["draft_vocab_size"],), "t2d": (config["vocab_size"],)}
    check_tensors(source.tensors, _shapes(config) | maps, f"the drafter in {source.run.drafter_dir}")
    # Of a whole vocabulary engines want no maps.
    whole = config["draft_vocab_size"] == config["vocab_size"]
    tensors = {name: one for name, one in source.tensors.items() if not (whole and name in maps)}
    taps = len(config[IDS])
    notes = [] if taps == 3 else [f"it reads {taps} layers, and llama.cpp takes exactly 3"]
    model = assets.model_dir(source.model)
    if source.adapter is not None:
        model = f"{source.run.name}-merged"
        notes.append(f"it belongs to a model with an adapter: serve `medusa export --to hf --output {model}`")
    launch = _launch(model, output, source.config["num_heads"])
    with exporting(output, overwrite) as part:
        save_file({name: one.contiguous() for name, one in tensors.items()}, part / WEIGHTS)
        write_json(part / "config.json", config)
        blocks = "\n\n".join(f"```sh\n{line}\n```" for line in launch)
        levels = source.config["num_heads"]
        (part / "README.md").write_text(README.format(model=source.model, levels=levels, launch=blocks), "utf-8")
    return Exported(output, launch, tuple(notes))


def _launch(model: str, folder: Path, tokens: int) -> tuple[str, ...]:
    """How each engine is started with the drafter."""
    speculative = f'{{"method": "eagle3", "model": "{folder}", "num_speculative_tokens": {tokens}}}'
    return (
        f"vllm serve {model} --speculative-config '{speculative}'",
        f"python -m sglang.launch_server --model {model} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {folder} --speculative-num-steps {tokens} --speculative-eagle-topk 4 "
        f"--speculative-num-draft-tokens {4 * tokens}",
        f"python convert_hf_to_gguf.py {folder} --target-model-dir {model} --outfile eagle3.gguf\n"
        f"llama-server -m MODEL.gguf -md eagle3.gguf --spec-type draft-eagle3 --spec-draft-n-max {tokens}",
    )


def _config(source: Source) -> dict[str, Any]:
    """config.json under the engines' names; UserError where the drafter's own lacks a width."""
    base = read_config(source.model, source.trusted)
    own = source.config
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size", "taps", "num_heads")
    lacking = [key for key in needed if key not in own]
    if lacking:
        raise UserError(f"{source.run.drafter_dir}/config.json lacks {', '.join(lacking)}", "train the drafter again")
    d2t = source.tensors.get("d2t")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{key: own[key] for key in needed[:5]},
        "num_key_value_heads": own.get("num_key_value_heads", own["num_attention_heads"]),
        "rms_norm_eps": own.get("rms_norm_eps", 1e-6),
        "rope_theta": own.get("rope_theta", 10_000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "draft_vocab_size": own["vocab_size"] if d2t is None else len(d2t),
        "max_position_embeddings": base.max_position_embeddings,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": base.eos_token_id,
        "torch_dtype": str(source.tensors["fc.weight"].dtype).removeprefix("torch."),
        IDS: list(own["taps"]),
        # Nested, where SGLang reads them, the same layers are named by what they give, not by what the next one takes.
        "eagle_config": {IDS: [tap - 1 for tap in own["taps"]], "use_aux_hidden_state": True},
        "num_aux_hidden_states": len(own["taps"]),
    }


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that every EAGLE-3 folder has, but for the maps between vocabularies."""
    size, wide = config["hidden_size"], config["intermediate_size"]
    heads, own = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    inner = {
        "self_attn.q_proj": (heads, 2 * size),
        "self_attn.k_proj": (own, 2 * size),
        "self_attn.v_proj": (own, 2 * size),
        "self_attn.o_proj": (size, heads),
        "mlp.gate_proj": (wide, size),
        "mlp.up_proj": (wide, size),
        "mlp.down_proj": (size, wide),
        **{norm: (size,) for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }
    outer: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, config["num_aux_hidden_states"] * size),
        "norm.weight": (size,),
        "lm_head.weight": (config["draft_vocab_size"], size),
    }
    return outer | {f"midlayer.{name}.weight": shape for name, shape in inner.items()}


def verifier_of(config: dict[str, Any]) -> str | None:
    """The model that a speculators config names."""
    inner = config.get("speculators_config")
    verifier = inner.get("verifier") if isinstance(inner, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else None


def import_eagle3(found: dict[str, Tensor], config: dict[str, Any], base: Base, beside: dict[str, Any]) -> Imported:
    """An EAGLE-3 folder as the kind eagle; key and value heads that several queries share get a copy each.

    UserError for variants of the layer that this project has not, and for tensors that do not fit."""
    plain = _flat(config)
    switched = [key for key in VARIANTS if plain.get(key)]
    if "speculators_model_type" in config and "norm_before_residual" not in plain:
        switched.append("norm_before_residual")  # speculators' default
    if plain.get("rope_scaling"):
        switched.append("rope_scaling")
    if switched or plain.get("num_hidden_layers", 1) != 1:
        what = ", ".join(switched) or f"num_hidden_layers={plain['num_hidden_layers']}"
        raise UserError(
            f"this EAGLE-3 drafter's layer is of another kind ({what})", "only the plain layer can be run here"
        )
    tensors = {name.replace("layers.0.", "midlayer.", 1): one for name, one in found.items()}
    notes = [] if tensors.pop("embed_tokens.weight", None) is None else ["its embeddings are left out for the model's"]
    heads, size = plain.get("num_attention_heads"), base.hidden_size
    if not isinstance(heads, int) or heads < 1:
        raise UserError("config.json names no num_attention_heads", "fetch the checkpoint again")
    full = {
        "hidden_size": size,
        "intermediate_size": plain.get("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": plain.get("num_key_value_heads", heads),
        "head_dim": plain.get("head_dim") or size // heads,
        "draft_vocab_size": plain.get("draft_vocab_size") or base.vocab_size,
        "num_aux_hidden_states": len(taps := _taps(plain, base)),
    }
    if not all(isinstance(one, int) and one > 0 for one in full.values()) or heads % full["num_key_value_heads"]:
        raise UserError(f"config.json has widths that cannot be: {full}", "fetch the checkpoint again")
    whole = full["draft_vocab_size"] == base.vocab_size
    if whole:
        # Such a checkpoint may come without maps; this project's files have them.
        tensors.setdefault("d2t", torch.zeros(base.vocab_size, dtype=torch.int64))
        tensors.setdefault("t2d", torch.ones(base.vocab_size, dtype=torch.bool))
    maps = {"d2t": (full["draft_vocab_size"],), "t2d": (base.vocab_size,)}
    check_tensors(tensors, _shapes(full) | maps, "the EAGLE-3 checkpoint")
    _check_maps(tensors["d2t"], tensors["t2d"], base.vocab_size)
    _share_none(tensors, full)
    inner = plain.get("rope_parameters")
    theta = plain.get("rope_theta") or (inner.get("rope_theta") if isinstance(inner, dict) else None) or 10_000.0
    ours = {
        "num_heads": _levels(config),
        "num_layers": 1,
        "vocab_size": base.vocab_size,
        "vocabulary": "own" if whole else "draft",
        "matrices": "one",
        "rank": None,
        **{key: full[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")},
        "num_key_value_heads": heads,
        "draft_vocab_size": full["draft_vocab_size"],
        "rms_norm_eps": plain.get("rms_norm_eps", 1e-6),
        "rope_theta": float(theta) if isinstance(theta, int) else theta,
        "taps": taps,
    }
    return Imported(KIND, ours, tensors, notes=tuple(notes))


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """A config without speculators' and EAGLE's nesting."""
    inner = [config.get(key) for key in ("transformer_layer_config", "eagle_config")]
    plain = dict(config)
    if isinstance(inner[1], dict) and isinstance(ids := inner[1].get(IDS), list):
        inner[1] = {**inner[1], IDS: [one + 1 if type(one) is int else one for one in ids]}
    for one in inner:
        if isinstance(one, dict):
            # Of both, speculators' own `num_hidden_layers` and widths are those of the layer.
            plain = one | plain
    return plain


def _taps(plain: dict[str, Any], base: Base) -> list[int]:
    """After how many of the model's layers states are read; UserError for ones that it has not."""
    depth = base.layers
    taps = plain.get(IDS) or [2, depth // 2, depth - 3]
    if not isinstance(taps, list) or not all(type(one) is int and 1 <= one < depth for one in taps):
        raise UserError(
            f"the drafter reads the layers {taps}, the model has {depth}", "give the @model it was made for"
        )
    return taps


def _check_maps(d2t: Tensor, t2d: Tensor, vocabulary: int) -> None:
    """UserError unless the maps between the vocabularies say the same and stay within the model's."""
    ids = d2t.long() + torch.arange(len(d2t))
    inside = bool(((ids >= 0) & (ids < vocabulary)).all())
    if not inside or not torch.equal(ids.sort().values, t2d.bool().nonzero()[:, 0]):
        raise UserError("d2t and t2d of the checkpoint contradict each other", "fetch it again")


def _share_none(tensors: dict[str, Tensor], full: dict[str, Any]) -> None:
    """Give every query head keys and values of its own, as this project's layer has them."""
    groups = full["num_attention_heads"] // full["num_key_value_heads"]
    for name in ("k_proj", "v_proj"):
        key = f"midlayer.self_attn.{name}.weight"
        each = tensors[key].unflatten(0, (full["num_key_value_heads"], full["head_dim"]))
        tensors[key] = each.repeat_interleave(groups, 0).flatten(0, 1)


def _levels(config: dict[str, Any]) -> int:
    """How deep a checkpoint was trained to draft, as far as it says."""
    inner = config.get("speculators_config")
    methods = inner.get("proposal_methods") if isinstance(inner, dict) else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    said = first.get("speculative_tokens")
    return said if isinstance(said, int) and said > 0 else LEVELS
