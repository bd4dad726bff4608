"""Medusa heads in the layout of FasterDecoding, vLLM (to 0.32) and TGI: medusa_lm_head.safetensors and config.json."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_cli.drafters import MedusaHeads
from medusa_cli.errors import UserError
from medusa_cli.exporting.folder import Exported, exporting
from medusa_cli.exporting.imported import Base, Imported, count_said
from medusa_cli.exporting.source import Source
from medusa_cli.exporting.tensors import check_tensors, read_tensors
from medusa_cli.runs.files import write_json
from medusa_cli.runs.reading import convert, read_object

WEIGHTS = "medusa_lm_head.safetensors"
# What the layout has no place for lies beside it, so that an import finds all of it again: config and measurements,
# and matrices of low rank before they were multiplied out.
BESIDE, NARROW = "medusa_cli.json", "medusa_cli.safetensors"
# Two digits: of more heads or layers than that there is none, and a file must not make us count to a billion.
KEY = re.compile(r"(\d\d?)\.(\d\d?)\.(linear\.weight|linear\.bias|weight)")


def export_medusa(source: Source, output: Path, *, overwrite: bool = False) -> Exported:
    """Write Medusa heads with a whole vocabulary matrix each, [V, H]; UserError for any other kind.

    A draft vocabulary is widened: tokens outside of it get rows of zeros. Low-rank matrices are multiplied out, and
    heads that read the model's lm_head are written without any (FasterDecoding's second form). A bias by the token
    drafted before (`conditional`) has no place in the layout: such heads are refused.
    """
    if source.kind != MedusaHeads.name:
        raise UserError(
            f"{source.run.drafter_dir} is a {source.kind} drafter, and this layout is for medusa heads",
            "use @to hf, which takes it, or a @run with medusa heads",
        )
    if source.config.get("conditional"):
        raise UserError(
            f"the heads in {source.run.drafter_dir} lean on the token drafted before (drafter.conditional), and this "
            "layout has no place for that",
            "use @to hf, which takes it",
        )
    config = convert(MedusaHeads.read_config(source.config), MedusaHeads.config_class, "the drafter's config")
    heads, layers = config.num_heads, config.num_layers
    tensors = {name: one for name, one in source.tensors.items() if ".linear." in name}
    notes = []
    if config.vocabulary == "shared":
        notes.append("the heads read the model's own lm_head (FasterDecoding's v2): vLLM needs one matrix a head")
    else:
        wide = _whole_matrices(source.tensors, config.vocab_size, heads, layers)
        tensors |= {f"{k}.{layers}.weight": wide[k if len(wide) > 1 else 0].clone() for k in range(heads)}
        if config.vocabulary == "draft":
            notes.append(
                f"the draft vocabulary of {config.draft_vocab_size:,} tokens is widened to {config.vocab_size:,}"
            )
    if source.adapter is not None:
        notes.append("these heads belong to a model with an adapter: serve the merged model (`medusa export --to hf`)")
    with exporting(output, overwrite) as part:
        save_file({name: one.contiguous() for name, one in sorted(tensors.items())}, part / WEIGHTS)
        written = {
            "base_model_name_or_path": source.model,
            "model_type": "medusa",
            "medusa_num_heads": heads,
            "medusa_num_layers": layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "medusa_fc_bias": True,  # engines drop the biases silently without it
        }
        write_json(part / "config.json", written)
        write_json(part / BESIDE, _beside(source))
        if config.rank is not None:
            save_file(_narrow(source.tensors, layers), part / NARROW)
    served = f'vllm serve {source.model} --speculative-config \'{{"method": "medusa", "model": "{output}", '
    return Exported(output, (f'{served}"num_speculative_tokens": {heads}}}\' (vLLM up to 0.32)',), tuple(notes))


def _whole_matrices(tensors: Mapping[str, Tensor], vocabulary: int, heads: int, layers: int) -> list[Tensor]:
    """The vocabulary matrices [V, H] of a drafter's tensors, one or one a head."""
    found = []
    for k in range(heads):
        name = f"{k}.{layers}.weight"
        if name not in tensors:
            break
        matrix, factor = tensors[name], tensors.get(f"{k}.{layers}.factor")
        if factor is not None:
            matrix = (matrix.float() @ factor.float()).to(matrix.dtype)
        if "draft_ids" in tensors:
            wide = matrix.new_zeros(vocabulary, matrix.shape[1])
            wide[tensors["draft_ids"].long()] = matrix
            matrix = wide
        found.append(matrix)
    return found


def _narrow(tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The vocabulary matrices as they are, with their inner factors."""
    key = re.compile(rf"\d+\.{layers}\.(weight|factor)")
    return {name: one.contiguous() for name, one in tensors.items() if key.fullmatch(name)}


def read_beside(folder: Path) -> dict[str, Any]:
    """What export_medusa left beside heads; empty where it did not write the folder."""
    if not (folder / BESIDE).is_file():
        return {}
    narrow = read_tensors(folder / NARROW) if (folder / NARROW).is_file() else {}
    return {**read_object(folder / BESIDE), "narrow": narrow}


def _beside(source: Source) -> dict[str, Any]:
    """The drafter's own config, draft vocabulary and measurements."""
    ids = source.tensors.get("draft_ids")
    tree = source.run.tree_path
    return {
        "config": source.config,
        "draft_ids": None if ids is None else ids.tolist(),
        "calibration": source.calibration,
        "tree": read_object(tree, "the tree") if tree.is_file() else None,
    }


def import_medusa(found: dict[str, Tensor], config: dict[str, Any], base: Base, beside: dict[str, Any]) -> Imported:
    """Heads of FasterDecoding (v1, and v2 without matrices), vLLM or TGI; UserError, naming tensors, where they do not
    fit the model. `beside`: what export_medusa left beside them, empty for checkpoints of other tools."""
    tensors = {plain_name(name): one for name, one in found.items()}
    ids = tensors.pop("token_map", None)
    linear = [key for name in tensors if (key := KEY.fullmatch(name)) and key[3] == "linear.weight"]
    if not linear:
        raise UserError("the checkpoint has no tensors named HEAD.LAYER.linear.weight", "give one with Medusa heads")
    heads, layers = 1 + max(int(key[1]) for key in linear), 1 + max(int(key[2]) for key in linear)
    tensors = {re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{layers}.", name): one for name, one in tensors.items()}
    matrices = 1 if config.get("original_lm_head") else heads
    if not any(f"{k}.{layers}.weight" in tensors for k in range(heads)):
        matrices = 0
    notes = (
        *count_said(config, ("medusa_num_heads", "num_heads"), heads, "heads"),
        *_filled(tensors, heads, layers, config),
    )
    size, words = base.hidden_size, base.vocab_size if ids is None else _ids(ids, base)
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        shapes |= {f"{k}.{layer}.linear.weight": (size, size) for layer in range(layers)}
        shapes |= {f"{k}.{layer}.linear.bias": (size,) for layer in range(layers)}
    shapes |= {f"{k}.{layers}.weight": (words, size) for k in range(matrices)}
    check_tensors(tensors, shapes, "the checkpoint of Medusa heads")
    ours = {
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "medusa_fc_bias": True,
        "hidden_size": size,
        "vocab_size": base.vocab_size,
        "vocabulary": "draft" if ids is not None else "own" if matrices else "shared",
        "draft_vocab_size": None if ids is None else len(ids),
        "matrices": "one" if matrices == 1 < heads else "each",
        "rank": None,
    }
    if ids is not None:
        tensors["draft_ids"] = ids.to(torch.int32)
    if beside:
        return _restored(tensors, ours, beside, heads, layers)
    return Imported("medusa", ours, tensors, notes=notes)


def _ids(ids: Tensor, base: Base) -> int:
    """How many tokens a token_map names; UserError unless each is one of the model's, and none stands twice."""
    whole = ids.dim() == 1 and not ids.is_floating_point() and ids.dtype != torch.bool and ids.numel() > 0
    if not whole or ids.min() < 0 or ids.max() >= base.vocab_size or len(ids.unique()) < len(ids):
        raise UserError("token_map is no list of different tokens of the model", "give the @model it was made for")
    return len(ids)


def plain_name(name: str) -> str:
    """A tensor's name as FasterDecoding's files have it, from there, from vLLM's own form, or from a whole model's."""
    name = re.sub(r"^(model\.)?medusa_heads?\.", "", name)
    return re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)


def _filled(tensors: dict[str, Tensor], heads: int, layers: int, config: dict[str, Any]) -> list[str]:
    """Put zeros where no layer has a bias, as vLLM's form may; a note where that was done."""
    if any(name.endswith(".linear.bias") for name in tensors) or config.get("medusa_fc_bias"):
        return []
    for k in range(heads):
        for layer in range(layers):
            weight = tensors.get(f"{k}.{layer}.linear.weight")
            if weight is not None:
                tensors[f"{k}.{layer}.linear.bias"] = weight.new_zeros(weight.shape[:1])
    return ["its layers have no biases"]


def _restored(
    tensors: dict[str, Tensor], ours: dict[str, Any], beside: dict[str, Any], heads: int, layers: int
) -> Imported:
    """The drafter as it was before export_medusa, bit for bit; UserError where what lies beside the heads is not
    theirs."""
    config, ids, narrow = beside.get("config"), beside.get("draft_ids"), beside["narrow"]
    wrong = UserError(f"{BESIDE} does not belong to these heads", f"delete {BESIDE} to import them as they are")
    if not isinstance(config, dict) or not isinstance(ids, list | None) or "draft_ids" in tensors:
        raise wrong
    kept = {key: ours[key] for key in ("vocabulary", "draft_vocab_size", "matrices", "rank")}
    matrices = [f"{k}.{layers}.weight" for k in range(heads)]
    if config.get("vocabulary") == "draft":
        words = ours["vocab_size"]
        if not ids or not all(type(one) is int and 0 <= one < words for one in ids) or len(set(ids)) < len(ids):
            raise wrong
        rows = torch.tensor(ids)
        outside = torch.ones(words, dtype=torch.bool).index_fill(0, rows, False)
        for name in matrices:
            if name not in tensors or tensors[name][outside].any():
                raise wrong
            tensors[name] = tensors[name][rows].clone()
        tensors["draft_ids"] = rows.to(torch.int32)
        kept |= {"vocabulary": "draft", "draft_vocab_size": len(ids)}
    if config.get("matrices") == "one" and ours["vocabulary"] == "own":
        if any(name not in tensors or not torch.equal(tensors[name], tensors[matrices[0]]) for name in matrices):
            raise wrong
        for name in matrices[1:]:
            del tensors[name]
        kept["matrices"] = "one"
    if config.get("rank") is not None and narrow:
        _divide(tensors, narrow, config["rank"], [name for name in matrices if name in tensors])
        kept["rank"] = config["rank"]
    calibration, tree = (one if isinstance(one, dict) else None for one in map(beside.get, ("calibration", "tree")))
    return Imported("medusa", {**config, **ours, **kept}, tensors, calibration, tree)


def _divide(tensors: dict[str, Tensor], narrow: dict[str, Tensor], rank: Any, matrices: list[str]) -> None:
    """Put factors in the place of the matrices that they make; UserError where they make others."""
    if not isinstance(rank, int):
        raise UserError(f"{BESIDE} names the rank {rank!r}", f"delete {BESIDE} to import the heads as they are")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in matrices:
        words, size = tensors[name].shape
        shapes |= {name: (words, rank), name.replace("weight", "factor"): (rank, size)}
    check_tensors(narrow, shapes, NARROW)
    for name in matrices:
        product = narrow[name].float() @ narrow[name.replace("weight", "factor")].float()
        # Not bit for bit: sums of products may be made in another order elsewhere.
        if not torch.allclose(product.to(tensors[name].dtype).float(), tensors[name].float(), rtol=2e-2, atol=1e-4):
            raise UserError(f"{NARROW} does not belong to these heads", f"delete {BESIDE} to import them as they are")
    tensors.update(narrow)
