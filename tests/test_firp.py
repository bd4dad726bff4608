"""FIRP in decoding: extra rows against a slow reference, losslessness, one pass a step, what stays, files."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_cli.drafters import Firp
from medusa_cli.drafters.firp import spread
from medusa_cli.engine import attach
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import FAMILIES, Recording, forward, generate, rows_of, tiny_backbone

TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]])
PROMPT = [5, 9, 20, 11, 7, 31, 8, 44, 10, 12]
DEPTH = 6


def backbone_of(family: str = "llama", engine: str = "eager", positions: int = 512) -> Backbone:
    return tiny_backbone(family, layers=DEPTH, engine=engine, positions=positions)


def firp(backbone: Backbone, heads: int = 3, vocabulary: str = "shared", scale: float = 0.3, **own: Any) -> Firp:
    torch.manual_seed(0)
    ids = torch.randperm(backbone.vocab_size)[:24] if vocabulary == "draft" else None
    drafter = Firp.create(backbone, heads, vocabulary=vocabulary, draft_ids=ids, **own)
    with torch.no_grad():
        for weight in drafter.parameters():  # files hold bf16
            weight.copy_((weight + scale * torch.randn_like(weight) / 4).to(torch.bfloat16))
    return drafter.eval()


@torch.no_grad()
def reference(family: str, drafter: Firp, tokens: list[int], positions: int = 512) -> Tensor:
    """The last token's final pseudo states [K, H], from nothing: every row at once, a dense mask, eager attention."""
    model = copy.deepcopy(backbone_of(family, positions=positions).model)
    model.set_attn_implementation("eager")
    base, config, n = model.model, model.config.get_text_config(), len(tokens)
    x = base.embed_tokens(torch.tensor([tokens]))
    for index, layer in enumerate(base.layers):
        for at, step in zip(drafter.config.layers, drafter.steps, strict=True):
            if at == index:
                x = torch.cat([x, step(x[:, n - 1 : n])], dim=1)
        rows = torch.arange(x.shape[1])
        seen = rows[:, None] >= rows
        kind = (getattr(config, "layer_types", None) or [None] * DEPTH)[index]
        if kind == "sliding_attention" or (kind is None and getattr(config, "sliding_window", None)):
            seen &= rows[:, None] - rows < config.sliding_window
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        tables = base.rotary_emb(x, rows[None], kind) if family == "gemma3" else base.rotary_emb(x, rows[None])
        x = layer(x, attention_mask=mask, position_embeddings=tables, position_ids=rows[None])
    return base.norm(x)[0, n:]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_extra_rows_in_a_tree_are_those_of_each_path_alone(family: str, engine: str) -> None:
    backbone = backbone_of(family, engine)
    drafter = firp(backbone, layers=[2, 3, 3])
    cache = backbone.engine.new_cache(1, 4)  # grows
    out = forward(backbone, PROMPT, cache, logits="last", extra_rows=drafter.extra_rows(3))
    assert out.logits is not None and out.logits.shape[0] == 1 and out.hidden.shape[0] == len(PROMPT)
    assert torch.allclose(out.extra[-1], reference(family, drafter, PROMPT), atol=1e-4)
    tokens = torch.arange(20, 20 + TREE.size)
    out = forward(backbone, tokens, cache, TREE, extra_rows=drafter.extra_rows(3))
    assert out.extra is not None and out.extra.shape == (TREE.size, 3, backbone.hidden_size)
    for node in (0, 3, 8):
        path = PROMPT + tokens[TREE.path(node)].tolist()
        assert torch.allclose(out.extra[node], reference(family, drafter, path), atol=1e-4), node


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_a_long_prompt_ends_in_its_last_tokens_extra_rows(engine: str) -> None:
    backbone = backbone_of("llama", engine, positions=1024)
    drafter = firp(backbone)
    prompt = [5 + i * 7 % 50 for i in range(530)]
    out = forward(backbone, prompt, logits="last", extra_rows=drafter.extra_rows(2))
    expected = reference("llama", drafter, prompt, positions=1024)
    assert out.hidden.shape[0] == 530 and torch.allclose(out.extra[-1], expected[:2], atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_no_real_row_sees_extra_rows_and_the_cache_keeps_none(family: str, engine: str) -> None:
    backbone = backbone_of(family, engine)
    drafter = firp(backbone)
    nodes, path = torch.arange(20, 20 + TREE.size), TREE.path(7)
    caches, outputs = [], []
    for extra_rows in (None, drafter.extra_rows(3)):
        cache = backbone.engine.new_cache(1, 8)
        forward(backbone, PROMPT, cache, extra_rows=extra_rows)
        outputs.append(forward(backbone, nodes, cache, TREE, extra_rows=extra_rows))
        cache.keep(0, path)
        outputs.append(forward(backbone, [9, 8], cache, extra_rows=extra_rows))
        caches.append(cache)
    for without, ridden in zip(outputs[:2], outputs[2:], strict=True):
        assert torch.allclose(without.logits, ridden.logits, atol=1e-4)
        assert torch.allclose(without.hidden, ridden.hidden, atol=1e-4)
    length = len(PROMPT) + len(path) + 2
    assert caches[0].lengths == caches[1].lengths == [length]
    assert torch.allclose(*map(rows_of, caches), atol=1e-4)
    # What comes after sees the kept rows alone: the same as one chain without any extra rows.
    whole = PROMPT + nodes[path].tolist() + [9, 8]
    alone = forward(backbone, whole)
    assert torch.allclose(outputs[3].logits, alone.logits[-2:], atol=1e-4)


class Watched(Recording, Firp):
    pass


@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("shape", [Tree.dense([12, 4, 2]), DynamicTree(60, 3)], ids=["static", "dynamic"])
def test_drafts_come_from_the_extra_rows_of_the_accepted_path(engine: str, shape: Tree | DynamicTree) -> None:
    backbone = backbone_of("llama", engine)
    drafter = firp(backbone, layers=[2, 3, 4])
    drafter.__class__ = Watched
    drafter.seen = []
    list(generate(backbone, drafter, shape, PROMPT, max_new_tokens=60, stop_ids=()))
    assert any(len(new.tokens) > 1 for new, _ in drafter.seen[1:])  # acceptance did happen
    assert max(draft.tree.max_depth for _, draft in drafter.seen) == 3
    accepted = PROMPT[:-1]
    for number, (new, draft) in enumerate(drafter.seen):
        accepted += new.tokens.tolist()
        scores = reference("llama", drafter, accepted) @ backbone.lm_head_weight.T
        ranked = scores.argsort(dim=-1, descending=True)
        for node in range(1, draft.tree.size):
            expected = ranked[draft.tree.depths[node] - 1, draft.tree.ranks[node]]
            assert draft.tokens[node] == expected, (number, node)


@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("shape", [TREE, DynamicTree(9, 3)], ids=str)
def test_a_step_is_one_backbone_pass(engine: str, shape: Tree | DynamicTree) -> None:
    backbone = backbone_of("llama", engine)
    drafter = firp(backbone)
    passes: list[int] = []
    inner = backbone.engine.run

    def counted(tokens: Tensor, layout: Any, cache: Any, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        passes.append(layout.positions.shape[1])  # rows, extra rows among them
        return inner(tokens, layout, cache, taps)

    backbone.engine.run = counted
    steps = list(generate(backbone, drafter, shape, PROMPT, max_new_tokens=40, stop_ids=()))
    assert len(passes) == len(steps)
    assert passes[0] == len(PROMPT) + 3
    assert passes[1:] == [4 * (step.drafted + 1) for step in steps[1:]]


def test_default_layers_spread_from_a_half_to_five_sixths_of_the_depth() -> None:
    assert spread(3, 30) == (15, 20, 25) and spread(1, 30) == (15,)
    assert spread(4, 30) == (15, 18, 22, 25) and spread(4, 2) == (1, 1, 1, 1)


def test_a_model_whose_layers_are_unknown_is_refused() -> None:
    import transformers as hf

    config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    backbone = Backbone(hf.GPT2LMHeadModel(config).eval(), id="tiny-gpt2")
    attach(backbone)
    drafter = firp(backbone)
    with pytest.raises(UserError, match="cannot be run one by one: its parts are not named as in Llama"):
        next(generate(backbone, drafter, TREE, PROMPT, max_new_tokens=5))
