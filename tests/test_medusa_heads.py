"""Medusa heads: initialisation, guesses by rank, losses by hand, files, and mismatches."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from medusa_cli.drafters import DRAFTERS, Batch, MedusaHeads, NewTokens, load_drafter
from medusa_cli.errors import UserError
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.runs.run import provenance
from medusa_cli.train.losses import drafter_loss
from medusa_cli.tree import Tree
from tests.helpers import drafted, guesses, tiny_backbone

TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 3], [1, 1], [0, 0, 2]])
DRAFT_IDS = torch.tensor([7, 3, 40, 12, 9, 55, 21, 30])


def heads_for(backbone, vocabulary: str = "draft", *, moved: bool = True, layers: int = 2) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads.create(backbone, 3, layers, vocabulary, DRAFT_IDS if vocabulary == "draft" else None)
    if moved:
        for weight in heads.parameters():
            weight.data += 0.2 * torch.randn_like(weight)
    return heads


@pytest.mark.parametrize("vocabulary", ["own", "draft", "shared"])
def test_fresh_heads_are_the_lm_head(vocabulary: str) -> None:
    backbone = tiny_backbone()
    heads = heads_for(backbone, vocabulary, moved=False)
    hidden = torch.randn(5, backbone.hidden_size)
    batch = Batch(hidden, torch.zeros(5, dtype=torch.long), torch.zeros(5, dtype=torch.long))
    rows = backbone.lm_head_weight[heads.draft_ids]
    expected = heads.draft_ids[(hidden @ rows.T).topk(4).indices]
    found = guesses(heads, backbone, batch, 4)
    assert found.shape == (5, 3, 4)
    for k in range(3):
        assert torch.equal(found[:, k], expected)


def test_every_layer_has_weights_of_its_own() -> None:
    heads = heads_for(tiny_backbone(), moved=False)
    tensors = [p for block in heads.blocks for p in block.parameters()]
    assert len({p.data_ptr() for p in tensors}) == len(tensors) == 3 * 2 * 2
    assert not any(p.any() for p in tensors)


@pytest.mark.parametrize("vocabulary", ["own", "draft", "shared"])
def test_each_node_holds_the_guess_of_its_head_and_rank(vocabulary: str) -> None:
    backbone = tiny_backbone()
    heads = heads_for(backbone, vocabulary).eval()
    hidden = torch.randn(4, backbone.hidden_size)
    draft = drafted(heads, backbone, NewTokens(torch.arange(4), hidden, 11, 0), TREE)
    state = Batch(hidden[-1:], torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    found = guesses(heads, backbone, state, 4)[0]
    assert draft.tokens[0] == 11
    for node in range(1, TREE.size):
        assert draft.tokens[node] == found[TREE.depths[node] - 1, TREE.ranks[node]]


def test_drafting_follows_the_weights_when_they_change() -> None:
    backbone = tiny_backbone()
    heads = heads_for(backbone).eval()
    confirmed = NewTokens(torch.arange(1), torch.randn(1, backbone.hidden_size), 5, 0)
    before = drafted(heads, backbone, confirmed, TREE).tokens
    heads.train()
    for matrix in heads.matrices:
        matrix.data.neg_()
    after = drafted(heads.eval(), backbone, confirmed, TREE).tokens
    assert not torch.equal(before, after)


@pytest.mark.parametrize("vocabulary", ["own", "draft", "shared"])
def test_the_loss_is_the_weighted_cross_entropy_of_each_head(vocabulary: str) -> None:
    backbone = tiny_backbone()
    heads = heads_for(backbone, vocabulary)
    positions = 14
    torch.manual_seed(2)
    hidden = torch.randn(positions, backbone.hidden_size)
    known = heads.draft_ids.tolist()
    following = torch.tensor([known[i % len(known)] if i % 3 else 60 for i in range(positions)])
    segment = torch.tensor([0] * 5 + [1] * 2 + [2] * 7)
    losses = drafter_loss(heads, backbone, Batch(hidden, following, segment), TrainRecipe())
    total = torch.zeros(())
    for k in range(1, 4):
        terms, right, counted = [], 0, 0
        for p in range(positions - k):
            if segment[p + k] != segment[p]:
                continue
            counted += 1
            target = int(following[p + k])
            state = heads.blocks[k - 1](hidden[p])
            matrix = backbone.lm_head_weight if vocabulary == "shared" else heads.matrices[k - 1]
            if target in known:
                scores = matrix @ state
                terms.append(F.cross_entropy(scores[None], torch.tensor([known.index(target)])))
                right += int(scores.argmax()) == known.index(target)
        assert losses.per_head[k - 1].item() == pytest.approx(float(sum(terms) / len(terms)), rel=1e-4)
        assert (int(losses.correct[k - 1]), int(losses.counted[k - 1])) == (right, counted)
        assert int(losses.learnt[k - 1]) == len(terms)
        total = total + 0.8**k * sum(terms) / positions
    assert losses.total.item() == pytest.approx(float(total), rel=1e-4)
    losses.total.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in heads.parameters())


def test_the_saved_layout_is_what_serving_engines_read(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    heads = heads_for(backbone, "own")
    heads.save(tmp_path, provenance(backbone.identity))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["medusa_num_heads"] == 3 and config["medusa_num_layers"] == 2 and config["medusa_fc_bias"] is True
    assert config["base_model_name_or_path"] == backbone.id and "architectures" not in config
    assert (config["hidden_size"], config["vocab_size"]) == (backbone.hidden_size, backbone.vocab_size)
    names = set(load_file(tmp_path / "medusa_lm_head.safetensors"))
    assert names == {f"{k}.{rest}" for k in range(3) for rest in
                     ("0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias", "2.weight")}  # fmt: skip


@pytest.mark.parametrize("vocabulary", ["own", "draft", "shared"])
def test_loaded_heads_draft_what_saved_ones_did(tmp_path: Path, vocabulary: str) -> None:
    backbone = tiny_backbone()
    heads = heads_for(backbone, vocabulary)
    with torch.no_grad():
        for weight in heads.parameters():  # files hold bf16
            weight.copy_(weight.to(torch.bfloat16))
    heads.save(tmp_path, provenance(backbone.identity))
    loaded = load_drafter(tmp_path, backbone)
    confirmed = NewTokens(torch.arange(1), torch.randn(1, backbone.hidden_size), 5, 0)
    ours, theirs = (drafted(d.eval(), backbone, confirmed, TREE).tokens for d in (heads, loaded))
    assert torch.equal(ours, theirs)


def test_heads_of_another_model_or_width_are_refused(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    heads_for(backbone).save(tmp_path, provenance(backbone.identity))
    with pytest.raises(UserError, match="was made for the model 'tiny-llama'"):
        load_drafter(tmp_path, tiny_backbone(seed=5))
    with pytest.raises(UserError, match="hidden size 32 and vocabulary 64"):
        load_drafter(tmp_path, tiny_backbone(hidden=64))
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"cut off")
    with pytest.raises(UserError, match="cannot be read"):
        load_drafter(tmp_path, backbone)
    (tmp_path / "config.json").write_text('{"drafter": "oracle"}')
    with pytest.raises(UserError, match="no known drafter"):
        load_drafter(tmp_path, backbone)
    with pytest.raises(UserError, match="does not exist"):
        load_drafter(tmp_path / "nothing", backbone)


@pytest.mark.parametrize(("kind", "told"), [("medusa", []), ("hydra", [1, 2]), ("amphista", []), ("eagle", [1, 2])])
def test_states_of_told_heads_are_drawn_towards_the_backbones_own(kind: str, told: list[int]) -> None:
    backbone = tiny_backbone()
    torch.manual_seed(0)
    heads = DRAFTERS[kind].create(backbone, 2, vocabulary="draft", draft_ids=DRAFT_IDS)
    count = 9
    hidden, tokens = (
        torch.randn(count, len(heads.taps) * backbone.hidden_size),
        DRAFT_IDS[torch.randint(0, 8, (count,))],
    )
    final = hidden[:, -backbone.hidden_size :]
    batch = Batch(hidden, tokens, torch.tensor([0] * 4 + [1] * 5))
    plain = drafter_loss(heads, backbone, batch, TrainRecipe(decay=0.5, soft=0.5, regress=0.0))
    pulled = drafter_loss(heads, backbone, batch, TrainRecipe(decay=0.5, soft=0.5, regress=3.0))
    rows_of, expected = [batch.targets(1), batch.targets(2)], 0.0
    for k, states in enumerate(heads.head_states(backbone, batch, rows_of), 1):
        if k not in told:
            continue
        apart = (states - final[rows_of[k - 1] + k]).abs()
        expected = expected + 0.5**k * torch.where(apart < 1, 0.5 * apart**2, apart - 0.5).mean(-1).sum() / count
    assert float(pulled.total.detach()) == pytest.approx(float((plain.total + 3 * expected).detach()), rel=1e-5)
    assert [float(one) for one in pulled.per_head] == [float(one) for one in plain.per_head]
    pulled.total.backward()


@pytest.mark.parametrize("kind", ["medusa", "hydra", "amphista"])
def test_without_a_recipes_word_regress_weighs_the_drafters_own_in_stage_1(kind: str) -> None:
    backbone = tiny_backbone()
    torch.manual_seed(0)
    heads = DRAFTERS[kind].create(backbone, 2, vocabulary="draft", draft_ids=DRAFT_IDS)
    tokens = DRAFT_IDS[torch.randint(0, 8, (9,))]
    batch = Batch(torch.randn(9, backbone.hidden_size), tokens, torch.tensor([0] * 4 + [1] * 5))

    def total(stage: int, regress: float | None) -> float:
        train = TrainRecipe(stage=stage, regress=regress)
        return float(drafter_loss(heads, backbone, batch, train).total.detach())

    assert (total(1, None) > total(1, 0.0)) == (kind == "hydra")
    assert total(1, None) == total(1, heads.regress)
    assert total(2, None) == total(2, 0.0)
