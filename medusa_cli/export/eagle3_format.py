"""EAGLE-3 folders, as vLLM, SGLang and llama.cpp read them, and SpecForge, speculators and AngelSlim write them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta
from safetensors.torch import save_file
from torch import Tensor

from medusa_cli.errors import UserError
from medusa_cli.export.card import card, shell
from medusa_cli.export.folder import Source, exporting
from medusa_cli.files import assets
from medusa_cli.files.io import convert, write_json
from medusa_cli.model.load import read_config

KIND = "eagle"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Draft tokens if a checkpoint does not say how many it was trained for: SpecForge's default.
LEVELS = 7
AGAIN = "fetch the checkpoint again"
# Variants of the layer that cannot be run here: configs that switch one on are refused.
VARIANTS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "attention_bias",
    "mlp_bias",
)
Width = Annotated[int, Meta(ge=1, lt=1 << 24)]  # larger ones overflow


@dataclass(frozen=True)
class LayerConfig:
    """The fields of a drafter's config.json that its layer and vocabulary depend on."""

    num_attention_heads: Width
    intermediate_size: Width
    head_dim: Width | None = None
    num_key_value_heads: Width | None = None
    draft_vocab_size: Width | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0


def export_eagle3(
    source: Source, output: Path, *, overwrite: bool = False
) -> tuple[list[str], list[str]]:
    """Writes an EAGLE drafter in the form that other engines read; raises UserError for any other kind."""
    refuse_other_kinds(source, "eagle3")
    config = source.config
    tensors = engine_tensors(source)
    model = source.model
    served, notes = served_model(source)
    if len(config.taps) != 3:
        notes.append(f"it reads {len(config.taps)} layers, and llama.cpp takes exactly 3")
    launch = _launch(served, source.name_of(output), config.num_heads)
    use = [f"It drafts up to {config.num_heads} tokens, which {model} verifies.", *shell(launch)]
    page = card(source, f"EAGLE-3 drafter for {model}", use)
    with exporting(output, overwrite) as part:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            part / "model.safetensors",
        )
        write_json(part / "config.json", _engine_config(source))
        (part / "README.md").write_text(page, encoding="utf-8")
    return launch, notes


def refuse_other_kinds(source: Source, form: str) -> None:
    """Raises UserError for a drafter that is not EAGLE."""
    if source.kind != KIND:
        raise UserError(
            f"@to {form} cannot hold the {source.kind} drafter {source.run.drafter_dir}",
            "use @to hf, or a @run with an EAGLE drafter (`medusa train drafter=eagle`)",
        )


def engine_tensors(source: Source) -> dict[str, Tensor]:
    """Returns an EAGLE drafter's tensors with the maps of its draft vocabulary.

    d2t [M]: target = i + d2t[i]. t2d [V]: True for its tokens.
    """
    tensors = dict(source.tensors)
    if source.config.vocabulary == "draft":  # engines want no maps for a full vocabulary
        ids = tensors.pop("draft_ids").long()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(source.config.vocab_size, dtype=torch.bool).index_fill(
            0, ids, True
        )
    return tensors


def served_model(source: Source) -> tuple[str, list[str]]:
    """Returns the model to serve with a drafter, and a note where it is yet to be written."""
    if source.run.adapter is None:
        return assets.model_dir(source.model), []
    merged = f"{source.run.name}-merged"
    return merged, [
        f"it belongs to a model with an adapter; serve `medusa export --to hf --output {merged}`"
    ]


def _launch(model: str, folder: str, tokens: int) -> list[str]:
    """Returns the command that starts each engine with the drafter."""
    speculative = f'{{"method": "eagle3", "model": "{folder}", "num_speculative_tokens": {tokens}}}'
    return [
        f"vllm serve {model} --speculative-config '{speculative}'",
        f"python -m sglang.launch_server --model {model} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {folder} --speculative-num-steps {tokens} --speculative-eagle-topk 4 "
        f"--speculative-num-draft-tokens {4 * tokens}",
        f"python convert_hf_to_gguf.py {folder} --target-model-dir {model} --outfile eagle3.gguf\n"
        f"llama-server -m MODEL.gguf -md eagle3.gguf --spec-type draft-eagle3 --spec-draft-n-max {tokens}",
    ]


def _engine_config(source: Source) -> dict[str, Any]:
    """Returns config.json under the engines' names."""
    base = read_config(source.model, source.trusted)
    own = source.config
    widths = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{key: getattr(own, key) for key in (*widths, "rms_norm_eps", "rope_theta")},
        "num_key_value_heads": own.num_attention_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "draft_vocab_size": own.draft_vocab_size or own.vocab_size,
        "max_position_embeddings": base.max_position_embeddings,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": base.eos_token_id,
        "torch_dtype": str(source.tensors["fc.weight"].dtype).removeprefix("torch."),
        AUX_LAYERS: list(own.taps),
        # Nested, where SGLang reads them, layers count from 0: the layer that gives a state, not
        # the one that takes it.
        "eagle_config": {
            AUX_LAYERS: [layer - 1 for layer in own.taps],
            "use_aux_hidden_state": True,
        },
        "num_aux_hidden_states": len(own.taps),
    }


def verifier_of(config: dict[str, Any]) -> str | None:
    """Returns the model that a speculators config names, None if it names none."""
    name = _dict(_dict(config.get("speculators_config")).get("verifier")).get("name_or_path")
    return name if isinstance(name, str) else None


def import_eagle3(
    tensors: dict[str, Tensor], config: dict[str, Any], model: Any
) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Reads an EAGLE-3 folder: settings, tensors, notes. Shared key and value heads are copied to every query head.

    Raises UserError for variants of the layer that cannot be run here, and for impossible maps and
    widths.
    """
    plain = _flat(config)
    variants = [key for key in (*VARIANTS, "rope_scaling") if plain.get(key)]
    if "speculators_model_type" in config and "norm_before_residual" not in plain:
        variants.append("norm_before_residual")  # speculators' default
    if plain.get("rope_type", "default") != "default":  # of rope_parameters
        variants.append("rope_type")
    if plain.get("num_hidden_layers", 1) != 1:
        variants.append("num_hidden_layers")
    if variants:
        raise UserError(
            f"the layer of this EAGLE-3 drafter is of another kind ({', '.join(variants)})",
            "give another",
        )

    tensors = {
        name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()
    }
    notes = (
        []
        if tensors.pop("embed_tokens.weight", None) is None
        else ["its embeddings are left out for the model's"]
    )
    theirs = convert(
        {key: value for key, value in plain.items() if value}, LayerConfig, "config.json", AGAIN
    )
    heads = theirs.num_attention_heads
    taps = theirs.eagle_aux_hidden_state_layer_ids
    shared = theirs.num_key_value_heads or heads
    size = theirs.head_dim or model.hidden_size // heads
    vocabulary = theirs.draft_vocab_size or model.vocab_size
    depth = model.num_hidden_layers
    taps = taps or [2, depth // 2, depth - 3]

    if heads % shared:
        raise UserError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}", AGAIN
        )
    if not all(1 <= layer < depth for layer in taps):
        raise UserError(
            f"the drafter reads the layers {taps}, the model has {depth}", "give its own @model"
        )
    for name in ("midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight"):
        tensor = tensors.get(name)
        if tensor is not None and tensor.dim() and len(tensor) == shared * size:
            tensors[name] = (
                tensor.unflatten(0, (shared, size))
                .repeat_interleave(heads // shared, 0)
                .flatten(0, 1)
            )

    d2t = tensors.pop("d2t", None)
    t2d = tensors.pop("t2d", None)
    if vocabulary != model.vocab_size:
        tensors["draft_ids"] = _checked_map(d2t, t2d, vocabulary, model.vocab_size)
    settings = {
        "num_heads": _levels(config),
        "num_layers": 1,
        "vocabulary": "own" if vocabulary == model.vocab_size else "draft",
        "matrices": "one",
        "intermediate_size": theirs.intermediate_size,
        "num_attention_heads": heads,
        "head_dim": size,
        "num_key_value_heads": heads,
        "draft_vocab_size": vocabulary,
        "rms_norm_eps": theirs.rms_norm_eps,
        "rope_theta": theirs.rope_theta,
        "taps": taps,
    }
    return settings, tensors, notes


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config without the nesting of speculators and EAGLE."""
    eagle = _dict(config.get("eagle_config"))
    if isinstance(layers := eagle.get(AUX_LAYERS), list):
        eagle = {
            **eagle,
            AUX_LAYERS: [layer + 1 if type(layer) is int else layer for layer in layers],
        }
    plain = eagle | _dict(config.get("transformer_layer_config")) | config
    return _dict(plain.get("rope_parameters")) | plain


def _checked_map(d2t: Tensor | None, t2d: Tensor | None, vocabulary: int, tokens: int) -> Tensor:
    """Returns the draft tokens' ids [M] by their offsets d2t; raises UserError unless t2d [V] marks the same tokens."""
    if (
        d2t is None
        or t2d is None
        or d2t.shape != (vocabulary,)
        or t2d.shape != (tokens,)
        or d2t.is_floating_point()
    ):
        raise UserError(f"the checkpoint lacks d2t [{vocabulary}] or t2d [{tokens}]", AGAIN)
    ids = d2t.long() + torch.arange(vocabulary)
    if (
        ids.min() < 0
        or ids.max() >= tokens
        or not torch.equal(ids.sort().values, t2d.bool().nonzero()[:, 0])
    ):
        raise UserError("d2t and t2d of the checkpoint contradict each other", AGAIN)
    return ids.to(torch.int32)


def _levels(config: dict[str, Any]) -> int:
    """Returns how many tokens a checkpoint was trained to draft, if it says so."""
    methods = _dict(config.get("speculators_config")).get("proposal_methods")
    first = _dict(methods[0]) if isinstance(methods, list) and methods else {}
    tokens = first.get("speculative_tokens")
    return tokens if isinstance(tokens, int) and tokens > 0 else LEVELS
