"""Export to EAGLE-3 folders, as read by vLLM, SGLang and llama.cpp."""

import json
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_cli.drafters.eagle import EagleConfig
from medusa_cli.drafters.incoming_eagle3 import AUX_LAYERS, NORMS
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.export.card import card, shell
from medusa_cli.export.folder import Source, exporting, write_checkpoint
from medusa_cli.model.load import read_config
from medusa_cli.runs.load_options import LoadOptions

KIND = "eagle"


def export_eagle3(
    source: Source, output: Path, *, overwrite: bool = False
) -> tuple[list[str], list[str]]:
    """Writes an EAGLE drafter in the layout that other engines read; raises UserError for any other kind of drafter."""
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
        write_checkpoint(part, "model.safetensors", tensors, _engine_config(source), page)
    return launch, notes


def refuse_other_kinds(source: Source, form: str) -> None:
    """Raises UserError unless the drafter is an EAGLE drafter."""
    if source.kind != KIND:
        raise UserError(
            f"@to {form} cannot hold the {source.kind} drafter {source.run.drafter_dir}",
            "use @to hf, or a @run with an EAGLE drafter (`medusa train drafter=eagle`)",
        )


def engine_tensors(source: Source) -> dict[str, Tensor]:
    """Returns an EAGLE drafter's tensors with the maps of its draft vocabulary.

    d2t [M]: draft token i is the model's token i + d2t[i]. t2d [V]: True for the tokens in the
    draft vocabulary. A drafter without a vocabulary matrix gets the rows of the model's lm_head
    with which it scores. Raises UserError if these rows have a bias, which the layouts cannot hold.
    """
    tensors = dict(source.tensors)
    if source.config.matrices == "none":
        tensors["lm_head.weight"] = _lm_head_rows(source)
    if source.config.vocabulary == "draft":  # engines expect no maps for a full vocabulary
        ids = tensors.pop("draft_ids").long()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(source.config.vocab_size, dtype=torch.bool).index_fill(
            0, ids, True
        )
    return tensors


def _lm_head_rows(source: Source) -> Tensor:
    """Returns the rows [M, H] of the model's lm_head for the draft vocabulary, in the drafter's number type."""
    options = LoadOptions(device="cpu", trust_remote_code=source.trusted)
    backbone = load_backbone(source.origin, options, adapter=source.run.adapter)
    ids = source.tensors.get("draft_ids", torch.arange(source.config.vocab_size))
    rows, bias = backbone.lm_head_rows(ids.long())
    if bias is not None:
        fault = f"the lm_head of {source.model} has a bias, which EAGLE-3 drafters cannot have"
        raise UserError(fault, "use @to hf, or train with drafter.matrices=one")
    return rows.to(source.tensors["fc.weight"].dtype)


def served_model(source: Source) -> tuple[str, list[str]]:
    """Returns the model to serve with a drafter, and a note if that model must be exported or found first."""
    if source.run.adapter is not None:
        merged = f"{source.run.name}-merged"
        export = f"medusa export --to hf --run {source.run.argument} --output {shlex.quote(merged)}"
        return merged, [f"it belongs to a model with an adapter; serve what `{export}` writes"]
    if source.origin.kind == "gguf":
        return "MODEL", [
            f"{source.model} is a GGUF file; MODEL stands for the folder or hub id of its safetensors"
        ]
    return source.origin.folder, []


def _launch(model: str, folder: str, tokens: int) -> list[str]:
    """Returns, for each engine, the command that starts it with the drafter."""
    settings = {"method": "eagle3", "model": folder, "num_speculative_tokens": tokens}
    speculative = shlex.quote(json.dumps(settings, ensure_ascii=False))
    model, folder = shlex.quote(model), shlex.quote(folder)
    return [
        f"vllm serve {model} --speculative-config {speculative}",
        f"python -m sglang.launch_server --model {model} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {folder} --speculative-num-steps {tokens} --speculative-eagle-topk 4 "
        f"--speculative-num-draft-tokens {4 * tokens}",
        f"python convert_hf_to_gguf.py {folder} --target-model-dir {model} --outfile eagle3.gguf\n"
        f"llama-server -m MODEL.gguf -md eagle3.gguf --spec-type draft-eagle3 --spec-draft-n-max {tokens}",
    ]


def layer_config(own: EagleConfig, base: Any) -> dict[str, Any]:
    """Returns the config of an EAGLE drafter's layer as a Llama layer. base: the config of the drafter's model."""
    widths = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size")
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{key: getattr(own, key) for key in (*widths, "rms_norm_eps", "rope_theta")},
        "num_key_value_heads": own.num_attention_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": base.max_position_embeddings,
    }


def _engine_config(source: Source) -> dict[str, Any]:
    """Returns the content of config.json with the key names of the engines."""
    base = read_config(source.origin, source.trusted)
    own = source.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(own, base),
        "draft_vocab_size": own.draft_vocab_size or own.vocab_size,
        "bos_token_id": base.bos_token_id,
        "eos_token_id": base.eos_token_id,
        "torch_dtype": str(source.tensors["fc.weight"].dtype).removeprefix("torch."),
        AUX_LAYERS: list(own.taps),
        # SGLang reads the nested layer numbers, which count from 0. They name the layer that
        # outputs a state, not the layer that receives the state.
        "eagle_config": {
            AUX_LAYERS: [layer - 1 for layer in own.taps],
            "use_aux_hidden_state": True,
        },
        "num_aux_hidden_states": len(own.taps),
        **{key: True for key in NORMS if getattr(own, key)},
    }
