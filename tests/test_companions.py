"""Drafters that come along with models draft as their makers describe, and decoding stays the model's own."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
)
from transformers.modeling_layers import MtpModel

from medusa_cli.api import Medusa
from medusa_cli.doctor import Case, examine
from medusa_cli.drafters.assistant import ENGINES
from medusa_cli.drafters.base import Batch, NewTokens
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.io import load_drafter
from medusa_cli.drafters.mtp import Mtp, checkpoint_tensors
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.export.eagle3_format import export_eagle3
from medusa_cli.export.folder import find_source
from medusa_cli.export.importing import import_drafter, import_mtp
from medusa_cli.export.speculators_format import export_speculators
from medusa_cli.files.model_source import ModelSource
from medusa_cli.files.mtp_layer import own_drafter
from medusa_cli.model import Backbone
from medusa_cli.model.backbone import text_model
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.tree import Tree
from tests.checkpoints import EAGLE, H, V, eagle3, write
from tests.helpers import (
    PROMPT,
    SPARSE,
    change_json,
    forward,
    generate_plain,
    medusa,
    medusa_json,
    save_model,
    save_network,
    tokens_of,
    write_lines,
)
from tests.models import tiny_network

CHAIN = Tree.from_choices([[0], [0, 0], [0, 0, 0]])
ROOT = 11

# The scores [V] of the token after a path of draft tokens, by a text and what a maker says of its drafter.
Reference = Callable[[Sequence[int]], Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), layers=5)


def known(backbone: Backbone, taps: int, length: int = 9) -> NewTokens:
    """Returns a text of random tokens and states, with its root."""
    torch.manual_seed(8)
    hidden = torch.randn(length, backbone.hidden_size * taps)
    return NewTokens(torch.randint(5, 60, (length,)), hidden, ROOT, 0)


def check_drafts(drafter: HeadDrafter, backbone: Backbone, new: NewTokens, by: Reference) -> None:
    """Asserts that chains and trees, after the text at once and in two pieces, hold the reference's choices."""
    for tree in (CHAIN, SPARSE.truncate(drafter.num_heads)):
        want = [new.root]
        for node in range(1, tree.size):
            path, parent = [], tree.parents[node]
            while parent > 0:
                path.insert(0, want[parent])
                parent = tree.parents[parent]
            want.append(int(by(path).argsort(descending=True)[tree.ranks[node]]))
        [draft] = drafter.draft(backbone, [fork := drafter.fork()], [new], tree)
        assert draft.tokens.tolist() == want
        halves = [fork, drafter.fork()]
        fork.truncate(0)
        drafter.draft(backbone, halves, [new.part(0, 4), new.part(0, 5)], tree)
        rest = [new.part(4, new.end), new.part(5, new.end)]
        for draft in drafter.draft(backbone, halves, rest, tree):
            assert draft.tokens.tolist() == want


def check_identity(model: str, folder: Path | str, engine: str = "auto") -> None:
    """Asserts that chains and trees give plain decoding's tokens, in a second turn and for three at once, too."""
    options: dict[str, Any] = {"max_new_tokens": 16, "stop_ids": ()}
    prompts = [PROMPT, [9, 30, 31, 32, 33, 9, 30], [12] * 11]

    def answers(medusa: Medusa) -> list[list[int]]:
        first = medusa.generate(PROMPT, **options).tokens
        second = medusa.generate([*PROMPT, *first, 40, 41], **options).tokens
        return [
            first,
            second,
            *(own.tokens for own in medusa.batch(prompts, batch_size=3, **options)),
        ]

    with Medusa.from_pretrained(model, drafter=None, dtype="fp32", engine=engine) as plain:
        want = answers(plain)
    for tree in ("auto", "dynamic:9"):
        with Medusa.from_pretrained(
            model, drafter=folder, tree=tree, dtype="fp32", engine=engine
        ) as drafting:
            assert answers(drafting) == want


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def turned(x: Tensor, position: int, theta: float = 10_000.0) -> Tensor:
    """Rotates heads [heads, D] at a position, pairs of halves."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half) / half)
    low, high = x[:, :half], x[:, half:]
    return torch.cat(
        [low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], dim=-1
    )


def eagle3_by_the_paper(
    tensors: dict[str, Tensor], config: dict[str, Any], backbone: Backbone, new: NewTokens
) -> Reference:
    """Returns EAGLE-3 as speculators describes it, every row computed anew, one after another."""
    at = {name.removeprefix("layers.0."): tensor.float() for name, tensor in tensors.items()}
    layer = config["transformer_layer_config"]
    heads, shared = layer["num_attention_heads"], layer["num_key_value_heads"]

    def scores(path: Sequence[int]) -> Tensor:
        keys, values = [], []
        states = list(new.hidden[:, : 3 * H])
        for position, token in enumerate([*new.following.tolist(), *path]):
            if position < len(states):
                fused = states[position]
                if config.get("norm_before_fc"):
                    fused = rms(fused, at["input_norm.weight"])
                state = at["fc.weight"] @ fused
            normed = rms(state, at["hidden_norm.weight"])
            residual = normed if config.get("norm_before_residual", True) else state
            embedded = rms(backbone.embedding.weight[token], at["input_layernorm.weight"])
            read = torch.cat([embedded, normed])
            q, k, v = (
                (at[f"self_attn.{name}_proj.weight"] @ read).unflatten(0, (-1, H // heads))
                for name in "qkv"
            )
            keys.append(turned(k, position).repeat_interleave(heads // shared, 0))
            values.append(v.repeat_interleave(heads // shared, 0))
            seen = torch.stack(keys, 1) @ turned(q, position)[..., None]  # [heads, rows, 1]
            share = (seen[..., 0] * (H // heads) ** -0.5).softmax(-1)
            mixed = (share[..., None] * torch.stack(values, 1)).sum(1).flatten()
            state = residual + at["self_attn.o_proj.weight"] @ mixed
            read = rms(state, at["post_attention_layernorm.weight"])
            gate = F.silu(at["mlp.gate_proj.weight"] @ read)
            state = state + at["mlp.down_proj.weight"] @ (gate * (at["mlp.up_proj.weight"] @ read))
        scores = torch.full((V,), -torch.inf)
        drafts = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        scores[drafts] = at["lm_head.weight"] @ rms(state, at["norm.weight"])
        return scores

    return scores


def speculators(model: str, **own: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns a random EAGLE-3 checkpoint as the library speculators writes it."""
    layer = {key: EAGLE[key] for key in EAGLE if key not in ("architectures", "draft_vocab_size")}
    layer["rms_norm_eps"] = 1e-5
    layer.pop("eagle_aux_hidden_state_layer_ids")
    methods = [
        {"proposal_type": "sampled", "speculative_tokens": 2},
        {"proposal_type": "greedy", "speculative_tokens": 4},
    ]
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": methods,
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": model, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": 24,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        **own,
    }
    tensors = {name.replace("midlayer.", "layers.0."): x for name, x in eagle3().items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor += 0.3 * torch.randn_like(tensor)
    if own.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.3 * torch.randn(3 * H)
    return tensors, config


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"norm_before_residual": False},
        {"norm_before_residual": True},
        {"norm_before_residual": True, "norm_before_fc": True},
    ],
)
@pytest.mark.usefixtures("exact")
def test_an_eagle3_of_speculators_drafts_as_described(
    tmp_path: Path, model: str, backbone: Backbone, own: dict[str, Any]
) -> None:
    tensors, config = speculators(model, **own)
    theirs = write(tmp_path / "theirs", "model.safetensors", tensors, config)
    run, facts, _ = import_drafter(str(theirs), f"{tmp_path}/run")
    drafter = load_drafter(run.drafter_dir, backbone)
    assert facts["heads"] == drafter.num_heads == 4  # of the method that is the default
    new = known(backbone, len(drafter.taps))
    reference = eagle3_by_the_paper(tensors, config, backbone, new)
    check_drafts(drafter, backbone, new, reference)
    for write_folder in (export_eagle3, export_speculators):
        out = tmp_path / write_folder.__name__
        write_folder(find_source(f"{run.path}/"), out)
        back, _, _ = import_drafter(str(out), f"{out}-run", model)
        check_drafts(load_drafter(back.drafter_dir, backbone), backbone, new, reference)


@pytest.mark.slow
def test_a_folder_of_another_tool_decodes_at_once(tmp_path: Path, model: str) -> None:
    tensors, config = speculators(model)
    check_identity(model, write(tmp_path / "theirs", "model.safetensors", tensors, config))


@pytest.mark.slow
def test_a_folder_of_another_model_is_refused_in_one_line(tmp_path: Path, model: str) -> None:
    tensors, config = speculators(model)
    theirs = write(tmp_path / "theirs", "model.safetensors", tensors, config)
    other = save_model(tmp_path / "other", layers=5, hidden=48)
    done = medusa(
        "chat", "--prompt", "w1", "--model", other, "--drafter", theirs, "--raw", exit_code=1
    )
    assert "fc.weight" in done.stderr
    assert done.stderr.strip().count("\n") == 1


# MTP layers, in the layout of each maker's repository.

MAKERS = {
    "qwen3_5_text": "mtp.",
    "qwen3_5": "mtp.",  # as it is released, with a part that sees images
    "qwen3_5_moe_text": "mtp.",
    "qwen3_next": "mtp.",
    "glm4_moe": "model.layers.4.",
    "glm4_moe_lite": "model.layers.4.",
    "deepseek_v3": "model.layers.4.",
    "qwen2": "model.mtp_layers.0.",  # MiMo-7B is a Qwen2 but for its MTP layers
}
NAMES = {
    "mtp.": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
    "model.layers.4.": ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
    "model.mtp_layers.0.": (
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        "",
    ),
}


def save_with_mtp(kind: str, folder: Path, **own: Any) -> str:
    """Saves a tiny network with a random MTP layer in its maker's layout; returns the path of the model."""
    network = tiny_network(kind, **own)
    # States before and after the last norm are to differ by more than their size.
    with torch.no_grad():
        base = text_model(network)
        base.norm.weight += 2 * torch.randn_like(base.norm.weight)
    path = save_network(network, folder)
    config = network.config.get_text_config()
    size = config.hidden_size
    torch.manual_seed(9)
    inner = {"layer_types": ["full_attention"], "first_k_dense_replace": 0}
    inner = {key: value for key, value in inner.items() if getattr(config, key, None) is not None}
    alone = type(config)(**{**config.to_dict(), "num_hidden_layers": 1, **inner})
    layer = type(base.layers[0])(alone, 0)
    prefix = MAKERS[kind]
    embedding, state, fc, norm, inside = NAMES[prefix]
    tensors = {f"{prefix}{fc}.weight": torch.randn(size, 2 * size) * size**-0.5}
    for name in (embedding, state, norm):
        tensors[f"{prefix}{name}.weight"] = torch.randn(size)
    for name, tensor in layer.state_dict().items():
        values = torch.randn_like(tensor) * (0.5 if tensor.dim() == 1 else size**-0.5)
        if name.endswith("experts.gate_up_proj"):
            for number, (gate, up) in enumerate(x.chunk(2) for x in values):
                place = f"{prefix}{inside}mlp.experts.{number}"
                tensors |= {
                    f"{place}.gate_proj.weight": gate.clone(),
                    f"{place}.up_proj.weight": up.clone(),
                }
        elif name.endswith("experts.down_proj"):
            for number, down in enumerate(values):
                tensors[f"{prefix}{inside}mlp.experts.{number}.down_proj.weight"] = down.clone()
        else:
            tensors[f"{prefix}{inside}{name}"] = values
    if prefix.startswith("model.layers"):  # copies of the model's own matrices
        tensors[f"{prefix}embed_tokens.weight"] = network.get_input_embeddings().weight.clone()
        tensors[f"{prefix}shared_head.head.weight"] = network.lm_head.weight.clone()
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | tensors, weights, {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Backbone]]:
    """Returns, for a model type, the path of a model with an MTP layer and its backbone in fp32."""
    folder = tmp_path_factory.mktemp("mtp")

    @cache
    def of_kind(kind: str) -> tuple[str, Backbone]:
        path = save_with_mtp(kind, folder / kind)
        return path, load_backbone(path, LoadOptions(dtype="fp32"))

    return of_kind


def mtp_by_hand(model: str, kind: str, backbone: Backbone, new: NewTokens) -> Reference:
    """Returns an MTP layer as vLLM describes those of Qwen3.5 and MiMo, every row computed anew."""
    prefix = MAKERS[kind]
    embedding, state_name, fc, norm, inside = NAMES[prefix]
    at = {
        name.removeprefix(prefix).removeprefix(inside): tensor
        for name, tensor in load_file(f"{model}/model.safetensors").items()
        if name.startswith(prefix)
    }
    config = backbone.config
    qwen = prefix == "mtp."
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    wide = int(size * rope.get("partial_rotary_factor", 1.0))

    def normed(x: Tensor, name: str) -> Tensor:
        return rms(x, at[f"{name}.weight"] + qwen, config.rms_norm_eps)  # Qwen's weights are 1 + w

    def project(x: Tensor, name: str) -> Tensor:
        return at[f"{name}.weight"] @ x + at.get(f"{name}.bias", torch.zeros(()))

    def turn(x: Tensor, position: int) -> Tensor:
        head = turned(x[:, :wide], position, rope["rope_theta"])
        return torch.cat([head, x[:, wide:]], dim=-1)

    def scores(path: Sequence[int]) -> Tensor:
        keys, values = [], []
        states, state = list(new.hidden), new.hidden[0]
        for position, token in enumerate([*new.following.tolist(), *path]):
            state = states[position] if position < len(states) else state
            embedded = normed(backbone.embedding(torch.tensor(token)), embedding)
            parts = [embedded, normed(state, state_name)]
            x = project(torch.cat(parts if qwen else parts[::-1]), fc)
            read = normed(x, "input_layernorm")
            q = project(read, "self_attn.q_proj").unflatten(0, (heads, -1))
            k = project(read, "self_attn.k_proj").unflatten(0, (shared, -1))
            v = project(read, "self_attn.v_proj").unflatten(0, (shared, -1))
            if qwen:
                q, gate = q.chunk(2, dim=-1)
                q, k = normed(q, "self_attn.q_norm"), normed(k, "self_attn.k_norm")
            keys.append(turn(k, position).repeat_interleave(heads // shared, 0))
            values.append(v.repeat_interleave(heads // shared, 0))
            seen = torch.stack(keys, 1) @ turn(q, position)[..., None]
            share = (seen[..., 0] * size**-0.5).softmax(-1)
            mixed = (share[..., None] * torch.stack(values, 1)).sum(1)
            if qwen:
                mixed = mixed * gate.sigmoid()
            x = x + project(mixed.flatten(), "self_attn.o_proj")
            read = normed(x, "post_attention_layernorm")
            inner = F.silu(project(read, "mlp.gate_proj")) * project(read, "mlp.up_proj")
            state = normed(x + project(inner, "mlp.down_proj"), norm)
        return backbone.lm_head_weight @ state

    return scores


def mtp_by_transformers(model: str, backbone: Backbone, new: NewTokens) -> Reference:
    """Returns the MTP layer as transformers' own reader runs it, without a cache, all rows again for each token."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.config.num_nextn_predict_layers = 1
    network._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4.*"]  # of the real one, 61
    theirs = MtpModel.from_pretrained(network).eval()

    @torch.no_grad()
    def scores(path: Sequence[int]) -> Tensor:
        tokens = [*new.following.tolist(), *path]
        states = new.hidden
        for end in range(len(new.tokens), len(tokens) + 1):
            ids = torch.tensor([tokens[:end]])
            places = torch.arange(end)[None]
            out = theirs.forward_layer(0, states[None], places, None, input_ids=ids)[0]
            states = torch.cat([states, out[-1:]])
        return theirs.shared_head(out[-1])

    return scores


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.usefixtures("exact")
def test_an_mtp_layer_drafts_as_its_maker_describes(
    with_mtp: Callable[[str], tuple[str, Backbone]], kind: str
) -> None:
    path, backbone = with_mtp(kind)
    drafter = load_drafter(own_drafter(ModelSource.of(path)), backbone)
    new = known(backbone, 1)
    if kind in ("qwen3_5_text", "qwen3_5", "qwen2"):
        check_drafts(drafter, backbone, new, mtp_by_hand(path, kind, backbone, new))
    elif kind in ("glm4_moe", "deepseek_v3"):
        check_drafts(drafter, backbone, new, mtp_by_transformers(path, backbone, new))
    else:  # the layer is the model's own class; its tensors all find their places
        assert drafter.draft(backbone, [drafter.fork()], [new], SPARSE.truncate(2))


@pytest.mark.usefixtures("exact")
def test_an_mtp_layer_reads_long_prompts_in_pieces(
    with_mtp: Callable[[str], tuple[str, Backbone]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, backbone = with_mtp("qwen3_5_text")
    drafter = load_drafter(own_drafter(ModelSource.of(path)), backbone)
    places = [range(5), range(12)]
    states, embedded = torch.randn(2, 17, backbone.hidden_size)
    outputs = []
    for rows in (100, 4):
        for module in ("medusa_cli.drafters.mtp", "medusa_cli.engine.native_layer"):
            monkeypatch.setattr(f"{module}.ROWS_AT_ONCE", rows)
        caches = [fork.caches[0] for fork in (drafter.fork(), drafter.fork())]
        outputs.append(drafter.extend(states, places, caches, embedded, last=True))
        assert [cache.length for cache in caches] == [5, 12]
    assert torch.allclose(*outputs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])
def test_decoding_with_the_models_own_mtp_is_plain_decoding(
    with_mtp: Callable[[str], tuple[str, Backbone]], kind: str
) -> None:
    check_identity(with_mtp(kind)[0], "mtp")


def talks(folder: Path, backbone: Backbone) -> Path:
    """Writes conversations in the model's own words; returns the file."""
    lines = []
    for number in range(12):
        prompt = [5, 9, 20 + number, 11]
        tokens = [*prompt, *tokens_of(generate_plain(backbone, prompt, max_new_tokens=30))]
        lines.append({"id": f"c{number}", "tokens": tokens, "spans": [[len(prompt), len(tokens)]]})
    write_lines(folder / "talks.jsonl", lines)
    return folder / "talks.jsonl"


def test_an_mtp_layer_gets_a_draft_vocabulary_a_calibration_and_a_tree(
    tmp_path: Path, with_mtp: Callable[[str], tuple[str, Backbone]]
) -> None:
    path, backbone = with_mtp("qwen3_5_text")
    data = talks(tmp_path, backbone)
    run = f"{tmp_path}/run"
    words = ("--model", path, "--data", data, "--draft-vocab-size", 40)
    medusa("import", "mtp", "--run", run, *words)
    drafter = load_drafter(Path(run) / "drafter", backbone)
    assert drafter.config.draft_vocab_size == 40
    assert len(drafter.matrices) == 0
    talked = [json.loads(line)["tokens"] for line in data.read_text().splitlines()]
    assert set(drafter.draft_ids.tolist()) <= {token for tokens in talked for token in tokens}
    assert set(talked[0][:2]) <= set(drafter.draft_ids.tolist())  # they begin every prompt
    medusa("calibrate", "--run", run, "--data", data, "--dtype", "fp32", "--top", "4")
    medusa("tree", "--run", run, "--budget", "8")
    options = ("--dtype", "fp32", "--raw", "--max-new-tokens", "24", "--prompt", "w1 w2")
    plain = medusa_json("chat", "--model", path, "--baseline", *options)
    drafted = medusa_json("chat", "--run", run, "--tree", "static", *options)
    assert drafted["answer"] == plain["answer"]


def test_an_mtp_layers_simulated_decoding_is_its_drafting(
    with_mtp: Callable[[str], tuple[str, Backbone]],
) -> None:
    path, backbone = with_mtp("deepseek_v3")
    drafter = load_drafter(own_drafter(ModelSource.of(path)), backbone)
    new = known(backbone, 1)
    reference = mtp_by_transformers(path, backbone, new)
    # Positions of two conversations, of which the second is the reference's, learned at its end.
    other = known(backbone, 1, length=4)
    path_after = [17, 33, 8]
    hidden = torch.cat([other.hidden, new.hidden, torch.randn(3, backbone.hidden_size)])
    following = torch.cat([other.following, new.following, torch.tensor(path_after)])
    end = len(other.tokens) + len(new.tokens)
    segment = torch.full((len(following),), -1)
    segment[end - 1 :] = 0
    sequence = torch.tensor([0] * len(other.tokens) + [1] * (len(new.tokens) + 3))
    batch = Batch(hidden, following, segment, sequence=sequence)
    for head, scores in enumerate(drafter.logits(backbone, batch)):
        assert torch.allclose(scores[0], reference(path_after[:head]), atol=1e-3)


def test_training_from_mtp_goes_on_from_the_models_own(
    tmp_path: Path, with_mtp: Callable[[str], tuple[str, Backbone]]
) -> None:
    path, backbone = with_mtp("qwen3_5_text")
    data = talks(tmp_path, backbone)
    common = ("--model", path, "--data", data, "--dtype", "fp32")
    words = ("train.epochs=8", "train.batch_tokens=64", "train.warmup_steps=2", "train.lr=3e-3")
    words = (*words, "drafter.num_heads=2", "drafter.draft_vocab_size=60", "train.max_tokens=null")
    medusa("train", "--from", "mtp", "--run", f"{tmp_path}/run", *common, *words)
    folder = tmp_path / "run" / "drafter"
    trained = load_drafter(folder, backbone)
    assert trained.config.vocabulary == "draft"
    assert trained.num_heads == 2
    document = ("calibrate", "--run", f"{tmp_path}/run", *common, "--top", "1")
    before = medusa_json(*document, "--drafter", "mtp")["accuracies"]
    after = medusa_json(*document)["accuracies"]
    assert after[0][0] > before[0][0] + 0.1
    with Medusa.from_pretrained(path, drafter=folder, tree="dynamic:8", dtype="fp32") as drafting:
        answer = drafting.generate([5, 9, 20, 11], max_new_tokens=30)
    assert answer.tokens == json.loads(data.read_text().splitlines()[0])["tokens"][4:]
    assert answer.stats.acceptance_length > 1.3
    new = known(backbone, 1)
    drafts = [
        drafter.draft(backbone, [drafter.fork()], [new], CHAIN.truncate(2))[0].tokens.tolist()
        for drafter in (trained, load_drafter(folder, backbone))
    ]
    assert drafts[0] == drafts[1]


@torch.no_grad()
def in_the_words_of(drafter: Mtp, backbone: Backbone, shift: int, number: int) -> list[int]:
    """Returns a text in which every token is the drafter's first choice after the states before.

    shift 0: its states stand beside their own tokens, not the next ones.
    """
    tokens = [5, 9, 20 + number, 11]
    while len(tokens) < 40:
        ids = torch.tensor(tokens)
        hidden = forward(backbone, ids, logits="none").hidden[:-1].clone()
        batch = Batch(hidden, ids[shift:][: len(hidden)], torch.zeros(len(hidden)).long())
        tokens.append(int(drafter.draft_ids[next(drafter.logits(backbone, batch))[-1].argmax()]))
    return tokens


@pytest.mark.quick("qwen2-change0-1-None", "qwen2-change2-1-projection")
@pytest.mark.parametrize(
    ("kind", "change", "shift", "part"),
    [
        ("qwen2", {}, 1, None),
        ("qwen2", {"raw_state": True}, 1, "last norm"),
        ("qwen2", {"state_first": True}, 1, "projection"),
        ("qwen2", {"norms": 1.0}, 1, "norms' weights"),
        ("qwen2", {}, 0, "token"),
        ("qwen3_5_text", {"norms": 1.0}, 1, "norms' weights"),
    ],
)
def test_doctor_names_the_way_in_which_an_mtp_port_went_wrong(
    tmp_path: Path,
    with_mtp: Callable[[str], tuple[str, Backbone]],
    kind: str,
    change: dict[str, Any],
    shift: int,
    part: str | None,
) -> None:
    path, backbone = with_mtp(kind)
    run, _, _ = import_mtp(f"{tmp_path}/run", ModelSource.of(path))
    right = load_drafter(run.drafter_dir, backbone)
    assert isinstance(right, Mtp)
    if "norms" in change:  # of text by a drafter whose weights are read in the other way
        for module in right.mtp.modules():
            if type(module) is type(right.mtp.norm):
                module.weight.add_(change["norms"] if kind == "qwen2" else -change["norms"])
    right.config = replace(right.config, raw_state=change.get("raw_state", False))
    if change.get("state_first"):
        right.mtp.state_first = not right.mtp.state_first
    texts = [in_the_words_of(right, backbone, shift, number) for number in range(4)]
    write_lines(
        run.distill_path,
        [{"id": f"c{n}", "tokens": text, "spans": [[4, 40]]} for n, text in enumerate(texts)],
    )
    case = Case(run, "run", ModelSource.of(path))
    case.__dict__["backbone"] = backbone
    finding = examine(case, "first level")
    assert finding.status == ("pass" if part is None else "fail")
    assert part is None or part in finding.text


# DFlash and DSpark, of speculators.

MASK = 63


def block_checkpoint(
    model: str, kind: str, words: int, anchor: bool | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns a random checkpoint of two layers, block 5; anchor None: the config does not name it."""
    torch.manual_seed(12)
    heads, shared, size, wide = 4, 2, 16, 48
    layer = {
        "input_layernorm": (H,),
        "post_attention_layernorm": (H,),
        "self_attn.q_proj": (heads * size, H),
        "self_attn.k_proj": (shared * size, H),
        "self_attn.v_proj": (shared * size, H),
        "self_attn.o_proj": (H, heads * size),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (wide, H),
        "mlp.up_proj": (wide, H),
        "mlp.down_proj": (H, wide),
    }
    shapes = {f"layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    shapes |= {"fc": (H, 3 * H), "hidden_norm": (H,), "norm": (H,)}
    rank = 6 if kind == "dspark" else 0
    if rank:
        shapes |= {"markov_head.markov_w1": (V, rank), "markov_head.markov_w2": (words, rank)}
        shapes["confidence_head.proj"] = (1, H + rank)
    if words != V:
        shapes["lm_head"] = (words, H)
    tensors = {
        f"{name}.weight": torch.randn(shape) * (1.0 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }
    if words != V:
        ids = torch.randperm(V)[:words].sort().values
        tensors["d2t"] = ids - torch.arange(words)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    verifier = {"name_or_path": model, "architectures": ["LlamaForCausalLM"]}
    own = {"algorithm": kind, "proposal_methods": [], "verifier": verifier}
    text = {
        "model_type": "qwen3",
        "hidden_size": H,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": size,
        "intermediate_size": wide,
        "rms_norm_eps": 1e-5,
        "vocab_size": V,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    config = {
        "speculators_model_type": kind,
        "speculators_config": own,
        "transformer_layer_config": text,
        "draft_vocab_size": words,
        "block_size": 5,
        "aux_hidden_state_layer_ids": [1, 2, 4],
        "mask_token_id": MASK,
        "markov_rank": rank,
    }
    return tensors, config if anchor is None else {**config, "sample_from_anchor": anchor}


def blocks_by_hand(
    tensors: dict[str, Tensor], config: dict[str, Any], backbone: Backbone, new: NewTokens
) -> Reference:
    """Returns a block as speculators describes it, head by head and layer by layer."""
    layer = config["transformer_layer_config"]
    heads, size = layer["num_attention_heads"], layer["head_dim"]
    group = heads // layer["num_key_value_heads"]
    anchor = config.get("sample_from_anchor", config["speculators_model_type"] == "dspark")
    context = [
        rms(tensors["fc.weight"] @ h[: 3 * H], tensors["hidden_norm.weight"]) for h in new.hidden
    ]
    x = [backbone.embedding.weight[token] for token in [new.root, *[MASK] * 4]]
    end = len(context)
    for number in range(2):
        at = {name.removeprefix(f"layers.{number}."): tensor for name, tensor in tensors.items()}
        read = [rms(row, at["input_layernorm.weight"]) for row in x]
        keys, values = [], []
        for position, row in enumerate([*context, *read]):
            k = (at["self_attn.k_proj.weight"] @ row).unflatten(0, (-1, size))
            k = turned(rms(k, at["self_attn.k_norm.weight"]), position)
            v = (at["self_attn.v_proj.weight"] @ row).unflatten(0, (-1, size))
            keys.append(k.repeat_interleave(group, 0))
            values.append(v.repeat_interleave(group, 0))
        for slot in range(5):
            q = (at["self_attn.q_proj.weight"] @ read[slot]).unflatten(0, (-1, size))
            q = turned(rms(q, at["self_attn.q_norm.weight"]), end + slot)
            share = ((torch.stack(keys, 1) @ q[..., None])[..., 0] * size**-0.5).softmax(-1)
            mixed = (share[..., None] * torch.stack(values, 1)).sum(1).flatten()
            x[slot] = x[slot] + at["self_attn.o_proj.weight"] @ mixed
            inner = rms(x[slot], at["post_attention_layernorm.weight"])
            gate = F.silu(at["mlp.gate_proj.weight"] @ inner)
            x[slot] = x[slot] + at["mlp.down_proj.weight"] @ (
                gate * (at["mlp.up_proj.weight"] @ inner)
            )

    def scores(path: Sequence[int]) -> Tensor:
        slot = len(path) if anchor else len(path) + 1
        state = rms(x[slot], tensors["norm.weight"])
        matrix = tensors.get("lm_head.weight", backbone.lm_head_weight)
        own = matrix @ state
        if "markov_head.markov_w1.weight" in tensors:
            parent = tensors["markov_head.markov_w1.weight"][[new.root, *path][-1]]
            own = own + tensors["markov_head.markov_w2.weight"] @ parent
        if "d2t" not in tensors:
            return own
        ids = tensors["d2t"] + torch.arange(len(own))
        return torch.full((V,), -torch.inf).index_copy(0, ids, own)

    return scores


@pytest.mark.quick("dspark-64-False")
@pytest.mark.parametrize(
    ("kind", "words", "anchor"),
    [("dflash", 24, None), ("dflash", V, None), ("dspark", 24, None), ("dspark", V, False)],
)
@pytest.mark.usefixtures("exact")
def test_blocks_of_speculators_draft_as_described(
    tmp_path: Path, model: str, backbone: Backbone, kind: str, words: int, anchor: bool | None
) -> None:
    tensors, config = block_checkpoint(model, kind, words, anchor)
    theirs = write(tmp_path / "theirs", "model.safetensors", tensors, config)
    run, facts, _ = import_drafter(str(theirs), f"{tmp_path}/run")
    assert facts["heads"] == (5 if kind == "dspark" and anchor is None else 4)
    reference = blocks_by_hand(tensors, config, backbone, known(backbone, 4))
    for folder in (theirs, run.drafter_dir):
        drafter = load_drafter(folder, backbone)
        check_drafts(drafter, backbone, known(backbone, len(drafter.taps)), reference)
    # Calibration asks for the same scores after true tokens.
    new, path = known(backbone, 4), [17, 33, 8]
    hidden = torch.cat([new.hidden, torch.randn(3, new.hidden.shape[1])])
    following = torch.cat([new.following, torch.tensor(path)])
    segment = torch.full((len(following),), -1)
    segment[len(new.tokens) - 1 :] = 0
    batch = Batch(hidden, following, segment, sequence=torch.zeros_like(segment))
    for head, scores in zip(range(4), drafter.logits(backbone, batch), strict=False):
        want = reference(path[:head])[drafter.draft_ids]
        assert torch.allclose(scores[0], want, atol=1e-2), head


@pytest.mark.slow
def test_decoding_over_blocks_is_plain_decoding(tmp_path: Path, model: str) -> None:
    tensors, config = block_checkpoint(model, "dspark", V, None)
    check_identity(model, write(tmp_path / "theirs", "model.safetensors", tensors, config))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"markov_head_type": "rnn"}, "markov_head_type"),
        ({"projector_type": "domino"}, "projector_type"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": 10**9}, "mask_token_id"),
        ({"aux_hidden_state_layer_ids": [1, 2, 9]}, "taps"),
        ({"speculators_model_type": "hydra"}, "hydra"),
        ({"block_size": 10**6}, "block_size"),
    ],
)
def test_blocks_of_another_kind_are_refused_in_one_line(
    tmp_path: Path, model: str, change: dict[str, Any], part: str
) -> None:
    tensors, config = block_checkpoint(model, "dspark", 24, None)
    theirs = write(tmp_path / "theirs", "model.safetensors", tensors, config | change)
    words = ("--model", model, "--drafter", theirs, "--raw", "--prompt", "w1")
    done = medusa("chat", *words, exit_code=None)
    last = done.stderr.strip().splitlines()[-1]
    assert done.exit_code in (1, 2)
    assert part in last
    assert "internal" not in last


@pytest.mark.quick("deepseek_v3")
@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "deepseek_v3"])
def test_mtp_layers_run_in_16_bits(
    with_mtp: Callable[[str], tuple[str, Backbone]], kind: str
) -> None:
    path, _ = with_mtp(kind)
    with Medusa.from_pretrained(path, drafter="mtp", dtype="bf16", tree="dynamic:6") as drafting:
        answer = drafting.generate(PROMPT, max_new_tokens=6, stop_ids=())
    assert len(answer.tokens) == 6
    assert answer.stats.steps > 0


def test_a_model_with_an_mtp_layer_is_told_of_it(
    tmp_path: Path, model: str, with_mtp: Callable[[str], tuple[str, Backbone]]
) -> None:
    path, _ = with_mtp("qwen2")
    words = ("chat", "--raw", "--prompt", "w1", "--max-new-tokens", "2", "--model")
    # The note comes before the model is loaded, and before its tokenizer meets the prompt.
    assert "--drafter mtp" in medusa(*words, path, exit_code=None).stderr
    assert "--drafter mtp" not in medusa(*words, model).stderr
    for drafter, part in (("mtp", "no MTP layer"), ("nobody/nothing", "nobody/nothing")):
        done = medusa(*words, model, "--drafter", drafter, exit_code=1)
        assert part in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.quick("qwen2")
@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe", "qwen2"])
def test_an_mtp_layer_without_its_first_tensor_is_named(tmp_path: Path, kind: str) -> None:
    path = Path(save_with_mtp(kind, tmp_path / "model"))
    first = f"{MAKERS[kind]}{NAMES[MAKERS[kind]][2]}.weight"
    weights = load_file(path / "model.safetensors")
    part = {name: tensor for name, tensor in weights.items() if name != first}
    save_file(part, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=re.escape(first)):
        own_drafter(ModelSource.of(str(path)))
    # Shards whose index names the layer's tensors, which are in no shard.
    plain = {name: tensor for name, tensor in part.items() if not name.startswith(MAKERS[kind])}
    save_file(plain, path / "model-1.safetensors", {"format": "pt"})
    files = dict.fromkeys(weights, "model-1.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=re.escape(first)):
        own_drafter(ModelSource.of(str(path)))
    # A config that counts a layer of which nothing is there.
    files = dict.fromkeys(plain, "model-1.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    change_json(path / "config.json", mtp_num_hidden_layers=1)
    with pytest.raises(UserError, match="config.json counts 1 .mtp_num_hidden_layers"):
        own_drafter(ModelSource.of(str(path)))


def test_mtp_tensors_are_those_of_the_shards_that_the_index_names(tmp_path: Path) -> None:
    path = Path(save_with_mtp("qwen3_5_text", tmp_path / "model"))
    weights = load_file(path / "model.safetensors")
    expected = checkpoint_tensors(ModelSource.of(str(path)))
    save_file(weights, path / "model-1.safetensors", {"format": "pt"})
    other = {name: tensor + 1 for name, tensor in weights.items() if name.startswith("mtp.")}
    last = next(name for name in weights if not name.startswith("mtp."))
    save_file({**other, last: weights[last]}, path / "model-2.safetensors", {"format": "pt"})
    files = {**dict.fromkeys(weights, "model-1.safetensors"), last: "model-2.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (path / "model.safetensors").unlink()
    taken = checkpoint_tensors(ModelSource.of(str(path)))
    assert all(torch.equal(taken[name], expected[name]) for name in expected)


# Gemma 4's assistants.


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Returns the paths of a tiny Gemma 4 and of an assistant for it."""
    folder = tmp_path_factory.mktemp("gemma")
    network = tiny_network("gemma4_text")
    return save_network(network, folder / "model"), save_assistant(network, folder / "assistant")


def save_assistant(network: Any, folder: Path) -> str:
    """Saves a random assistant for a Gemma 4; returns its path."""
    text = network.config.to_dict() | {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "per_layer_config": None,
        "global_head_dim": 32,
    }
    torch.manual_seed(14)
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**{key: x for key, x in text.items() if x is not None}),
        backbone_hidden_size=network.config.hidden_size,
    )
    Gemma4AssistantForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.quick("eager-7")
@pytest.mark.parametrize("length", [7, 40])  # within and beyond the window of 16
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("exact")
def test_an_assistant_of_gemma_drafts_as_transformers_runs_it(
    gemma: tuple[str, str], engine: str, length: int
) -> None:
    path, folder = gemma
    backbone = load_backbone(path, LoadOptions(dtype="fp32", engine=engine))
    assert backbone.engine.name == engine
    text = torch.randint(5, 60, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    cache = backbone.engine.new_cache(slots=2)
    forward(backbone, [50, 51, 52], cache, logits="none")
    out = forward(backbone, text, cache, slot=1, logits="none")
    drafter = load_drafter(Path(folder), backbone)
    new = NewTokens(torch.tensor(text), out.hidden.clone(), ROOT, 0, cache=cache, slot=1)

    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    theirs = Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        own = target(torch.tensor([text]), output_hidden_states=True, return_shared_kv_states=True)
        embed = target.get_input_embeddings()

    @torch.no_grad()
    def scores(path: Sequence[int]) -> Tensor:
        state = own.hidden_states[-1][:, -1:]
        for token in [ROOT, *path]:
            made = theirs(
                inputs_embeds=torch.cat([embed(torch.tensor([[token]])), state], dim=-1),
                position_ids=torch.tensor([[len(text)]]),
                shared_kv_states=dict(own.shared_kv_states),
            )
            state = made.last_hidden_state
        return made.logits[0, -1]

    seen: list[Tensor] = []
    best = drafter.best
    drafter.best = lambda scores, *how: seen.append(scores) or best(scores, *how)  # type: ignore
    for tree in (CHAIN, SPARSE):
        want = [ROOT]
        for node in range(1, tree.size):
            above = [want[parent] for parent in tree.path(node)[1:-1]]
            want.append(int(scores(above).argsort(descending=True)[tree.ranks[node]]))
        [draft] = drafter.draft(backbone, [drafter], [new], tree)
        assert draft.tokens.tolist() == want
    assert torch.allclose(seen[0][0], scores([]), atol=1e-4)


@pytest.mark.quick("native")
@pytest.mark.parametrize("engine", ENGINES)
def test_decoding_with_an_assistant_of_gemma_is_plain_decoding(
    gemma: tuple[str, str], model: str, engine: str
) -> None:
    path, folder = gemma
    check_identity(path, folder, engine=engine)
    words = ("chat", "--raw", "--prompt", "w1", "--model", model, "--drafter", folder)
    assert "the assistant is for" in medusa(*words, exit_code=1).stderr
