"""Export of EAGLE-3 drafters as checkpoints of the speculators library, which vLLM serves without further arguments."""

import json
import shlex
from pathlib import Path
from typing import Any

from medusa_cli.drafters.incoming_eagle3 import AUX_LAYERS, NORMS, VARIANTS
from medusa_cli.export.card import card, shell
from medusa_cli.export.eagle3_format import (
    engine_tensors,
    layer_config,
    refuse_other_kinds,
    served_model,
)
from medusa_cli.export.folder import Source, exporting, write_checkpoint
from medusa_cli.model.load import read_config


def export_speculators(
    source: Source, output: Path, *, overwrite: bool = False
) -> tuple[list[str], list[str]]:
    """Writes an EAGLE drafter in the layout of speculators; raises UserError for any other kind.

    The layout follows the library's source as of August 2026 (config.py, models/eagle3). The
    embeddings belong to the verifier and are left out.
    """
    refuse_other_kinds(source, "speculators")
    verifier, notes = served_model(source)
    tokens = source.config.num_heads
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in engine_tensors(source).items()
    }
    name = source.name_of(output)
    settings = {"model": name, "num_speculative_tokens": tokens}
    speculative = shlex.quote(json.dumps(settings, ensure_ascii=False))
    launch = [
        f"vllm serve {shlex.quote(name)}",
        f"vllm serve {shlex.quote(verifier)} --speculative-config {speculative}",
    ]
    title = f"EAGLE-3 drafter for {source.model}, of speculators' form"
    page = card(source, title, shell(launch))
    with exporting(output, overwrite) as part:
        write_checkpoint(part, "model.safetensors", tensors, _config(source, verifier), page)
    return launch, notes


def _config(source: Source, verifier: str) -> dict[str, Any]:
    """Returns the content of config.json; it sets every layer option, because defaults differ between versions."""
    base = read_config(source.origin, source.trusted)
    own = source.config
    layer = layer_config(own, base)
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": own.rope_theta}
    proposal = {"proposal_type": "greedy", "speculative_tokens": own.num_heads}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": base.architectures or []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": own.draft_vocab_size or own.vocab_size,
        "target_hidden_size": None,  # same as the drafter's
        AUX_LAYERS: list(own.taps),
        **{key: getattr(own, key) for key in NORMS},
        **{key: False for key in VARIANTS if key not in layer},
        "tie_word_embeddings": False,
        "torch_dtype": str(source.tensors["fc.weight"].dtype).removeprefix("torch."),
    }
