"""Export of Medusa heads in the layout of FasterDecoding, vLLM (up to 0.32) and TGI.

The layout consists of medusa_lm_head.safetensors and config.json.
"""

import json
import logging
import shlex
from pathlib import Path

from torch import Tensor

from medusa_cli.drafters import MedusaHeads
from medusa_cli.errors import UserError
from medusa_cli.export.card import card, shell
from medusa_cli.export.folder import Source, exporting, write_checkpoint

log = logging.getLogger(__name__)


def export_medusa(
    source: Source, output: Path, *, overwrite: bool = False
) -> tuple[list[str], list[str]]:
    """Writes Medusa heads with a full vocabulary matrix [V, H] each; raises UserError for other kinds of drafters.

    Tokens outside a draft vocabulary get the mean of the matrix's rows: none of them is ever the most likely token.
    Heads that use the model's lm_head are written without matrices (FasterDecoding's v2). Heads with a conditional bias
    also raise UserError, because the layout cannot hold the bias.
    """
    config = source.config
    tensors = source.tensors
    notes = []
    if source.kind != MedusaHeads.name or config.conditional:
        bias = "'s bias drafter.conditional" if source.kind == MedusaHeads.name else ""
        fault = f"@to medusa cannot hold the {source.kind} drafter {source.run.drafter_dir}{bias}"
        raise UserError(fault, "use @to hf, or another @run")
    if config.matrices == "none" and config.vocabulary != "shared":
        fault = f"@to medusa needs vocabulary matrices, and {source.run.drafter_dir} has none"
        raise UserError(fault, "use @to hf, or train with drafter.matrices=each")
    heads = config.num_heads
    layers = config.num_layers
    written = {name: weight for name, weight in tensors.items() if ".linear." in name}
    matrices = (
        0 if config.vocabulary == "shared" else heads * config.vocab_size * config.hidden_size
    )
    size = (
        sum(weight.nbytes for weight in written.values())
        + matrices * next(iter(written.values())).itemsize
    )
    matrix = " with a matrix over the whole vocabulary for each head" if matrices else ""
    log.info(f"{output} takes {size / 1e9:.2g} GB{matrix}")
    if config.vocabulary == "shared":
        notes.append(
            "the heads read the model's own lm_head (FasterDecoding's v2); vLLM needs a matrix for each head"
        )
    else:
        for k in range(heads):
            stored = k if config.matrices == "each" else 0
            written[f"{k}.{layers}.weight"] = _full_matrix(
                tensors, f"{stored}.{layers}", config.vocab_size
            )
    if config.vocabulary == "draft":
        widened = f"the draft vocabulary of {config.draft_vocab_size:,} tokens is widened to {config.vocab_size:,}"
        notes.append(f"{widened}; the others get the mean logit")
    if source.run.adapter is not None:
        notes.append(
            "these heads belong to a model with an adapter; serve the merged model (`medusa export --to hf`)"
        )
    name = source.name_of(output)
    settings = {"method": "medusa", "model": name, "num_speculative_tokens": heads}
    method = shlex.quote(json.dumps(settings, ensure_ascii=False))
    launch = [f"vllm serve {shlex.quote(source.model)} --speculative-config {method}"]
    facts = {
        "base_model_name_or_path": source.model,
        "model_type": "medusa",
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "medusa_fc_bias": True,  # without it, engines silently drop the biases
    }
    page = card(source, f"Medusa heads for {source.model}", ["vLLM up to 0.32:", *shell(launch)])
    with exporting(output, overwrite) as part:
        write_checkpoint(part, MedusaHeads.weights_file, written, facts, page)
    return [f"{launch[0]} (vLLM up to 0.32)"], notes


def _full_matrix(tensors: dict[str, Tensor], name: str, vocabulary: int) -> Tensor:
    """Returns a copy of a head's vocabulary matrix, widened to the whole vocabulary [V, H]."""
    matrix = tensors[f"{name}.weight"]
    if "draft_ids" not in tensors:
        return matrix.clone()
    # Rows of zeros would give logits of zero, which are the highest if all others are negative.
    mean = matrix.float().mean(0, keepdim=True).to(matrix.dtype)
    return mean.repeat(vocabulary, 1).index_copy(0, tensors["draft_ids"].long(), matrix)
