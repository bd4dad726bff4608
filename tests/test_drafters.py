"""Every drafter: identity, drafting against training, batches, files, refusals, and each through the commands."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from medusa_cli.drafters import DRAFTERS, Batch, Eagle, NewTokens, load_drafter
from medusa_cli.drafters import layers as blocks
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.io import save_drafter
from medusa_cli.drafters.layers import DecoderLayer, TokenBias
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.run import provenance
from medusa_cli.train.losses import drafter_loss
from medusa_cli.train.setup import build_drafter, check_recipe
from medusa_cli.tree import DynamicTree, Prices, Tree
from tests.helpers import (
    FAMILIES,
    FRESH,
    PROMPT,
    Recording,
    attach,
    change_json,
    conversation,
    drafted,
    generate,
    generate_batch,
    generate_plain,
    guesses,
    head_means,
    medusa,
    medusa_json,
    save_model,
    save_questions,
    tiny_backbone,
    tokens_of,
    write_lines,
)
from tests.test_training import SETTINGS

TREE = Tree.from_choices(
    [[0], [1], [2], [0, 0], [0, 3], [1, 1], [2, 0], [0, 0, 2], [1, 1, 0], [1, 1, 1]]
)
# Of a tree that grows where it pays, a tiny drafter's confidences justify a few nodes.
PRICES = Prices(tuple(0.02 * n for n in range(12)), (0.0, 0.01, 0.02), (0.5, 0.5, 0.5))
PAYING = DynamicTree(12, 3, prices=PRICES)
SHAPES = {"static": TREE, "dynamic": DynamicTree(20, 3)}
# The kind, and its settings; the draft vocabulary has 24 of 64 tokens.
DRAFT = {"vocabulary": "draft"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"num_layers": 2}),
    "medusa-draft": ("medusa", DRAFT),
    "medusa-shared": ("medusa", {"vocabulary": "shared"}),
    "medusa-bias": ("medusa", {"conditional": 5}),
    "hydra": ("hydra", {"num_layers": 2}),
    "hydra-draft": ("hydra", {**DRAFT, "matrices": "one"}),
    "hydra-rows": ("hydra", {**DRAFT, "matrices": "none"}),
    "hydra-raw": ("hydra", {"raw": True}),
    "hydra++": ("hydra", {"prefix_layers": 2, "context": "answer"}),
    "hydra++-prompt": ("hydra", {"prefix_layers": 1, "context": "conversation"}),
    "amphista": ("amphista", {"matrices": "one"}),
    "amphista-prompt": ("amphista", {**DRAFT, "context": "conversation", "conditional": 5}),
    "amphista-alpha": ("amphista", {"vocabulary": "shared", "attention_layers": 2}),
    "eagle": ("eagle", {}),
    "eagle-draft": ("eagle", DRAFT),
    "eagle-draft-rows": ("eagle", {**DRAFT, "matrices": "none"}),
    "firp": ("firp", {"vocabulary": "shared", "layers": (1, 2, 3)}),
    "firp-draft": ("firp", {**DRAFT, "conditional": 5}),
}
# That draft from the last layer's states.
OF_STATES = [kind for kind in KINDS if not kind.startswith("firp")]


def drafter_of(backbone: Backbone, kind: str, moved: bool = True) -> HeadDrafter:
    """Returns three random heads of a kind, their weights exact in bf16 as files hold them."""
    name, settings = KINDS[kind]
    torch.manual_seed(0)
    settings = {"vocabulary": "own", **settings}
    ids = torch.randperm(backbone.vocab_size)[:24] if settings["vocabulary"] == "draft" else None
    drafter = DRAFTERS[name].create(backbone, 3, draft_ids=ids, **settings)
    scale = 0.075 if name == "firp" else 0.2
    with torch.no_grad():
        for weight in drafter.parameters() if moved else ():
            weight.copy_((weight + scale * torch.randn_like(weight)).to(torch.bfloat16))
    return drafter.eval()


def accepted(drafter: HeadDrafter, backbone: Backbone, tokens: int, start: int = 0) -> NewTokens:
    """Returns random accepted tokens and states, with pseudo states for FIRP."""
    width = backbone.hidden_size * len(drafter.taps)
    hidden, ahead = torch.randn(tokens, width), torch.randn(3, backbone.hidden_size)
    return NewTokens(torch.randint(5, 60, (tokens,)), hidden, 9 + tokens, start, ahead)


def batch_of(drafter: HeadDrafter, backbone: Backbone, segment: list[int]) -> Batch:
    """Returns random packed positions whose targets are in the draft vocabulary."""
    count, ids = len(segment), drafter.draft_ids
    hidden = torch.randn(count, backbone.hidden_size * len(drafter.taps))
    return Batch(hidden, ids[torch.randint(0, len(ids), (count,))], torch.tensor(segment))


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_identical_in_every_family(family: str) -> None:
    # The context ends in the middle of a draft.
    backbone = tiny_backbone(family, layers=4, engine="native", positions=48)
    rules = {"max_new_tokens": 60, "stop_ids": ()}
    expected = tokens_of(generate_plain(backbone, PROMPT, **rules))
    shapes = (TREE, DynamicTree(9, 3), PAYING)
    kinds = ("medusa", "hydra++-prompt", "amphista-prompt", "eagle-draft", "firp")
    # Over the families, each kind drafts trees of each shape twice.
    for number, kind in enumerate(kinds, FAMILIES.index(family)):
        drafter, shape = drafter_of(backbone, kind), shapes[number % 3]
        steps = generate(backbone, drafter, shape, PROMPT, **rules)
        assert tokens_of(steps) == expected, (kind, shape)


# Of the larger size, EAGLE's layer is the native one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "hidden"),
    [("medusa", 32), ("hydra++-prompt", 32), ("eagle-draft", 32), ("eagle-draft", 64)],
)
def test_trees_that_grow_together_in_a_batch_change_no_answer(kind: str, hidden: int) -> None:
    backbone = tiny_backbone(layers=4, hidden=hidden, engine="native")
    rules = {"max_new_tokens": 30, "stop_ids": ()}
    prompts = [PROMPT, PROMPT[1:] + PROMPT[:1], PROMPT[:3]]
    answers = generate_batch(
        backbone, drafter_of(backbone, kind), PAYING, prompts, batch_size=3, **rules
    )
    for answer, prompt in zip(answers, prompts, strict=True):
        assert tokens_of(answer) == tokens_of(generate_plain(backbone, prompt, **rules))
        assert any(step.growth and step.nodes > 1 for step in answer)


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("shape", ["static", "dynamic"])
@pytest.mark.parametrize("kind", OF_STATES)
def test_drafts_are_the_guesses_of_training(kind: str, shape: str) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = drafter_of(backbone, kind)
    drafter.__class__ = type("Watched", (Recording, type(drafter)), {})
    drafter.seen = []
    list(generate(backbone, drafter, SHAPES[shape], PROMPT, max_new_tokens=24, stop_ids=()))
    # Some drafts were accepted.
    assert (
        any(len(new.tokens) > 1 for new, _ in drafter.seen[1:])
        or kind == "medusa"
        or "draft" in kind
    )
    hidden, following = drafter.seen[0][0].hidden[:0], []
    for number, (new, draft) in enumerate(drafter.seen):
        hidden = torch.cat([hidden, new.hidden])  # the prompt's are the first
        following += new.following.tolist()
        for leaf in draft.tree.leaves:
            # The path as the truth: every head's guesses must be the same, whatever else is in the tree.
            path = draft.tree.path(leaf)[1:]
            tokens = torch.tensor(following + draft.tokens[path].tolist())
            states = torch.cat([hidden, torch.randn(len(path), hidden.shape[1])])
            segment = torch.full((len(tokens),), -1)
            segment[len(following) - 1 :] = 0
            truth = Batch(
                states, tokens, segment, sequence=torch.zeros(len(tokens), dtype=torch.long)
            )
            ranked = guesses(drafter, backbone, truth, len(drafter.draft_ids))[0]
            for head, node in enumerate(path):
                assert draft.tokens[node] == ranked[head, draft.tree.ranks[node]], (number, node)


NATIVE = ("static", "qwen3", "native")
TORCH = ("dynamic", "gemma3", "torch")
EAGER = ("dynamic", "llama", "eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape", "family", "engine"),
    [(kind, *setting) for kind in KINDS for setting in (NATIVE, TORCH)]
    + [(kind, *EAGER) for kind in KINDS if kind in FRESH],
)
def test_sequences_of_a_batch_take_the_steps_that_each_takes_alone(
    kind: str, shape: str, family: str, engine: str
) -> None:
    backbone = tiny_backbone(family, layers=4, engine=engine)
    drafter, prompts = drafter_of(backbone, kind), [PROMPT, [8], PROMPT[::-1] * 2]
    rules = {"max_new_tokens": 14, "stop_ids": ()}
    together = generate_batch(backbone, drafter, SHAPES[shape], prompts, batch_size=2, **rules)
    for prompt, steps in zip(prompts, together, strict=True):
        alone = list(generate(backbone, drafter, SHAPES[shape], prompt, **rules))
        # A sequence that read another's state would draft otherwise.
        assert [(s.tokens, s.nodes, s.path) for s in steps] == [
            (s.tokens, s.nodes, s.path) for s in alone
        ]
        assert tokens_of(steps) == tokens_of(generate_plain(backbone, prompt, **rules))


@pytest.mark.quick("firp-draft", "hydra-rows")
@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_trees_keep_budget_and_depth_and_hold_what_static_ones_hold(kind: str) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = drafter_of(backbone, kind)
    new = accepted(drafter, backbone, 1)
    for budget, depth in ((1, 3), (2, 1), (9, 1), (30, 3)):
        draft = drafted(drafter.fork(), backbone, new, DynamicTree(budget, depth))
        assert draft.tree.size <= budget
        assert draft.tree.max_depth <= depth
        assert draft.tokens[0] == new.root
        if draft.tree.max_depth:
            assert torch.equal(
                drafted(drafter.fork(), backbone, new, draft.tree).tokens, draft.tokens
            )
    heats = ((50.0,) * 3, (0.05,) * 3)
    hot, cold = (
        drafted(drafter.fork(), backbone, new, DynamicTree(9, 3, temperatures=heat))
        for heat in heats
    )
    # Sure heads go deep, unsure heads go wide.
    assert cold.tree.max_depth > hot.tree.max_depth or max(hot.tree.widths) > max(cold.tree.widths)


@pytest.mark.quick("medusa-draft")
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_drafters_draft_what_saved_ones_did(kind: str, tmp_path: Path) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = drafter_of(backbone, kind)
    save_drafter(drafter, tmp_path, provenance(backbone.identity))
    loaded = load_drafter(tmp_path, backbone)
    assert type(loaded) is type(drafter)
    assert loaded.config == drafter.config
    assert loaded.taps == drafter.taps
    new = accepted(drafter, backbone, 4)
    ours, theirs = (drafted(each, backbone, new, TREE).tokens for each in (drafter, loaded))
    assert torch.equal(ours, theirs)


@pytest.mark.quick("hydra")
@pytest.mark.parametrize("kind", OF_STATES)
def test_the_loss_is_the_decayed_cross_entropy_of_each_head(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several blocks, the last one short.
    monkeypatch.setattr("medusa_cli.train.fused_linear.ROWS", 4)
    backbone = tiny_backbone(layers=4)
    drafter = drafter_of(backbone, kind).train()
    batch = batch_of(drafter, backbone, [0] * 5 + [1] * 2 + [2] * 7)
    # Perhaps no target.
    batch.next[::4] = next(token for token in range(64) if token not in drafter.draft_ids[1:])
    index = drafter.vocabulary_index(torch.device("cpu"))
    rows_of = [batch.targets(k) for k in (1, 2, 3)]
    final = batch.hidden[:, -backbone.hidden_size :]
    p = (final @ drafter.of_vocabulary(backbone.lm_head_weight).T).softmax(-1)
    losses = drafter_loss(drafter, backbone, batch, TrainRecipe(decay=0.7, soft=0.4, regress=0.0))
    expected = torch.zeros(())
    for k, states in enumerate(drafter.head_states(backbone, batch), 1):
        rows = rows_of[k - 1]
        states = states[batch.learned_index[rows]]
        targets = index[batch.next[rows + k]]
        read, matrix = drafter.factors(backbone, k - 1, states, batch.next[rows + k - 1])
        log_q, known = (read @ matrix.T).log_softmax(-1), targets >= 0
        loss = 0.6 * F.nll_loss(log_q[known], targets[known], reduction="sum")
        loss = loss - 0.4 * (p[rows + k] * log_q)[known].sum()
        assert float(head_means(losses)[k - 1].detach()) == pytest.approx(
            float(loss.detach()) / int(known.sum()), rel=1e-4
        )
        assert int(losses.correct[k - 1]) == int((log_q.argmax(-1) == targets).sum())
        assert (int(losses.counted[k - 1]), int(losses.learned[k - 1])) == (
            len(rows),
            int(known.sum()),
        )
        expected = expected + 0.7**k * loss / len(batch.next)
    assert float(losses.total.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    weights = list(drafter.parameters())
    ours, theirs = (
        torch.autograd.grad(total, weights, retain_graph=True) for total in (losses.total, expected)
    )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    assert all(gradient.any() for gradient in ours)


@pytest.mark.quick("hydra")
@pytest.mark.parametrize("kind", ["medusa", "hydra", "amphista", "eagle"])
def test_autoregressive_heads_regress_to_the_models_states(kind: str) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = drafter_of(backbone, kind)
    batch = batch_of(drafter, backbone, [0] * 4 + [1] * 5)

    def loss(stage: int = 1, **train: Any) -> float:
        return float(
            drafter_loss(
                drafter, backbone, batch, TrainRecipe(stage=stage, decay=0.5, **train)
            ).total.detach()
        )

    rows_of, apart = [batch.targets(k) for k in (1, 2, 3)], 0.0
    for k, states in enumerate(drafter.head_states(backbone, batch), 1):
        states = states[batch.learned_index[rows_of[k - 1]]]
        aim = batch.hidden[rows_of[k - 1] + k, -backbone.hidden_size :]
        apart += 0.5**k * len(aim) / 9 * float(F.smooth_l1_loss(states, aim).detach())
    expected = loss(regress=0.0) + (3 * apart if drafter.regress is not None else 0.0)
    assert loss(regress=3.0) == pytest.approx(expected, rel=1e-5)
    assert loss() == loss(regress=drafter.regress)
    assert loss(stage=2) == loss(stage=2, regress=0.0)


@pytest.mark.quick("hydra-raw")
@pytest.mark.parametrize("kind", OF_STATES)
def test_conversations_of_a_batch_do_not_see_one_another(kind: str) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = drafter_of(backbone, kind)
    packed = batch_of(drafter, backbone, [0] * 5 + [1] * 7)
    second = Batch(packed.hidden[5:], packed.next[5:], packed.segment[5:])
    ours, theirs = (guesses(drafter, backbone, batch, 3) for batch in (packed, second))
    assert torch.equal(ours[5:], theirs)


def test_prompts_are_seen_and_not_learned() -> None:
    backbone = tiny_backbone(layers=4)
    drafter = drafter_of(backbone, "eagle-draft").train()
    batch = batch_of(drafter, backbone, [-1] * 4 + [0] * 8)
    batch = Batch(
        batch.hidden, batch.next, batch.segment, sequence=torch.zeros(12, dtype=torch.long)
    )
    other = Batch(batch.hidden, batch.next.clone(), batch.segment, sequence=batch.sequence)
    other.next[:4] = batch.next[:4].flip(0)
    losses, again = (
        drafter_loss(drafter, backbone, each, TrainRecipe(regress=0.0)) for each in (batch, other)
    )
    assert losses.counted.tolist() == again.counted.tolist() == [7, 6, 5]
    assert not torch.equal(losses.total, again.total)


@pytest.mark.quick("amphista-prompt", "medusa")
@pytest.mark.parametrize(
    "kind", [kind for kind in OF_STATES if not kind.startswith(("eagle", "hydra-raw"))]
)
def test_fresh_heads_guess_what_the_lm_head_says(kind: str) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = drafter_of(backbone, kind, moved=False)
    batch = batch_of(drafter, backbone, [0] * 5)
    scores = batch.hidden @ drafter.of_vocabulary(backbone.lm_head_weight).T
    expected = drafter.draft_ids[scores.topk(4).indices]
    assert all(
        torch.equal(best, expected) for best in guesses(drafter, backbone, batch, 4).unbind(1)
    )


@pytest.mark.quick("llama")
@pytest.mark.usefixtures("exact")
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_eagle_guesses_what_the_lm_head_says_of_its_highest_state(family: str) -> None:
    backbone = tiny_backbone(family, layers=4)
    torch.nn.init.uniform_(backbone.model.base_model.norm.weight, 0.5, 2.0)
    attach(backbone, "native")
    drafter = Eagle.create(backbone, 2, 1, "own").eval()
    new = accepted(drafter, backbone, 1)
    draft = drafted(drafter, backbone, new, Tree.from_choices([[0], [1]]))
    scores = backbone.lm_head_weight @ backbone.model.base_model.norm(new.hidden[0, 64:96])
    assert draft.tokens[1:].tolist() == scores.topk(2).indices.tolist()


def steps_of(kind: str, shape: Tree | DynamicTree) -> list[Any]:
    """Returns the steps of two sequences side by side."""
    backbone = tiny_backbone(layers=4)
    drafter, prompts = drafter_of(backbone, kind).requires_grad_(False), [[5, 9, 23, 17, 8], [7, 6]]
    together = generate_batch(
        backbone, drafter, shape, prompts, batch_size=2, max_new_tokens=16, stop_ids=()
    )
    return [[(step.tokens, step.path, step.nodes) for step in steps] for steps in together]


def test_a_fresh_eagle_row_attends_to_its_own_token() -> None:
    torch.manual_seed(0)
    layer, places = DecoderLayer(64, 4, 16, 64, embeddings=True), torch.arange(200)
    read = layer.reads(torch.randn(200, 64), torch.randn(200, 64))
    q, k, _ = layer.attention_inputs(read, places)
    later = torch.ones(200, 200, dtype=torch.bool).triu(1)
    shares = (q @ k.mT / 16**0.5).masked_fill(later, -torch.inf).softmax(-1)
    assert shares.diagonal(dim1=1, dim2=2).mean() > 0.5


def test_drafting_follows_the_weights_when_they_change() -> None:
    backbone = tiny_backbone()
    drafter = drafter_of(backbone, "medusa")
    new = accepted(drafter, backbone, 1)
    before = drafted(drafter, backbone, new, TREE).tokens
    drafter.train()
    for matrix in drafter.matrices:
        matrix.data.neg_()
    assert not torch.equal(before, drafted(drafter.eval(), backbone, new, TREE).tokens)


def test_amphistas_halves_read_the_stages_in_turn_and_its_heads_see_one_another() -> None:
    backbone = tiny_backbone()
    batch = Batch(torch.randn(1, 32), torch.tensor([9]), torch.zeros(1, dtype=torch.long))
    for layers, changed in ((0, [False, True, True]), (1, [True, True, True])):
        torch.manual_seed(0)
        drafter = DRAFTERS["amphista"].create(backbone, 3, 1, "own", attention_layers=layers).eval()
        for weight in drafter.parameters():
            weight.data += 0.2 * torch.randn_like(weight)
        before = list(drafter.logits(backbone, batch))
        drafter.stages[1].fc.weight.data.neg_()
        after = drafter.logits(backbone, batch)
        assert [not torch.equal(*pair) for pair in zip(before, after, strict=True)] == changed


@pytest.mark.parametrize("block", [2, 64])
def test_the_training_time_test_is_one_pass_under_the_papers_mask(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.drafters.eagle.BLOCK", block)
    backbone = tiny_backbone(layers=4)
    drafter, steps, size = drafter_of(backbone, "eagle"), 3, backbone.hidden_size
    sequence = torch.repeat_interleave(torch.arange(2), torch.tensor([6, 9]))
    segment = torch.tensor([-1, -1, 0, 0, 0, 0, -1, -1, -1, 1, 1, 1, 1, 1, 1])
    hidden, tokens = torch.randn(15, 4 * size), torch.randint(5, 60, (15,))
    batch = Batch(hidden, tokens, segment, sequence=sequence)
    learned = [batch.targets(level + 1) for level in range(steps)]
    every = list(drafter.head_states(backbone, batch))
    yielded = [
        states[batch.learned_index[rows]] for states, rows in zip(every, learned, strict=True)
    ]
    for number in range(2):
        rows = torch.nonzero(sequence == number).squeeze(1)
        count, embedded = len(rows), backbone.embedding(tokens[rows])
        # Every step's rows below one another, [steps * count, H], each seeing what the paper's figure shows.
        at, step = torch.arange(count).repeat(steps), torch.arange(steps).repeat_interleave(count)
        tree_mask = (step[None] == 0) & (at[None] <= at[:, None])
        tree_mask |= (step[None] > 0) & (step[None] <= step[:, None]) & (at[None] == at[:, None])
        states, layer = drafter.fc(hidden[rows, : 3 * size]), drafter.midlayer
        every = layer.reads(states, embedded)
        for level in range(steps):
            if level:
                place = (torch.arange(count) + level).clamp(max=count - 1)
                every = torch.cat([every, layer.reads(states, embedded[place])])
            end = (level + 1) * count
            positions = at[:end] + step[:end]
            q, keys, values = layer.attention_inputs(every, positions)
            q = q[:, -count:]
            mask = tree_mask[end - count : end, :end]
            states = layer.leave(
                states, F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            )
            own = sequence[learned[level]] == number
            wanted = drafter.norm(states)[learned[level][own] - int(rows[0])]
            assert len(wanted), (
                number,
                level,
            )
            assert torch.allclose(yielded[level][own], wanted, atol=1e-4), (
                number,
                level,
            )


def test_a_bias_from_the_token_before_is_a_low_rank_product() -> None:
    torch.manual_seed(0)
    bias, states, matrix = TokenBias(40, 20, 6), torch.randn(7, 8), torch.randn(20, 8)
    tokens = torch.randint(0, 40, (7,))
    for fresh in (True, False):
        left, right = bias.factors(states, matrix, tokens)
        expected = states @ matrix.T + (0 if fresh else bias.before[tokens] @ bias.after.T)
        assert torch.allclose(left @ right.T, expected, atol=1e-4)
        torch.nn.init.normal_(bias.after)


def test_confidences_after_a_token_are_shares_of_all_guesses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    bias, scores, tokens = TokenBias(40, 90, 6), 3 * torch.randn(2, 90), torch.tensor([3, 3, 17])
    torch.nn.init.normal_(bias.after)
    owner, split = torch.tensor([0, 1, 1]), [tokens[:1], tokens[1:]]
    lifted = (scores[owner] + bias.before[tokens] @ bias.after.T) / 1.3
    log_p, indices = bias.best(scores, split, 4, 1.3)
    assert torch.allclose(log_p, lifted.log_softmax(-1).topk(4).values, atol=1e-5)
    assert torch.equal(indices, lifted.topk(4).indices)
    assert torch.equal(bias.best(scores, split, 4, None)[1], indices)
    monkeypatch.setattr(blocks, "CANDIDATES", 8)
    log_p, indices = bias.best(scores, split, 8, 1.3)
    # Other guesses count without the bias.
    rest = (scores / 1.3).scatter(1, scores.topk(8).indices, -torch.inf).exp().sum(-1)[owner, None]
    some = lifted.gather(1, indices)
    assert torch.allclose(log_p, some - (some.exp().sum(-1, keepdim=True) + rest).log(), atol=1e-4)


def test_levels_of_eagles_taps_are_folded_into_its_files_and_out_again(tmp_path: Path) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = drafter_of(backbone, "eagle").requires_grad_(False)
    batch = batch_of(drafter, backbone, [0] * 40)
    scales = torch.tensor([0.5, 3.0, 25.0, 1.0]).repeat_interleave(backbone.hidden_size)
    batch = replace(batch, hidden=batch.hidden * scales)
    drafter.level(batch.hidden)
    read = drafter._lower(batch.hidden).unflatten(-1, (3, -1))
    assert read.square().mean((0, 2)) == pytest.approx([1.0, 1.0, 1.0], rel=1e-4)
    expected = list(drafter.logits(backbone, batch))
    save_drafter(drafter, tmp_path, provenance(backbone.identity))
    again = drafter_of(backbone, "eagle")
    again.level(batch.hidden[:20])  # other levels
    loaded = load_drafter(tmp_path, backbone)
    again.start_from(loaded)
    for same in (drafter, loaded, again.eval()):
        for ours, theirs in zip(same.logits(backbone, batch), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.1)  # files are bf16


def test_drafters_of_another_model_are_refused(tmp_path: Path) -> None:
    backbone, other = tiny_backbone(), tiny_backbone(hidden=64)
    save_drafter(drafter_of(backbone, "medusa"), tmp_path, provenance(backbone.identity))
    with pytest.raises(UserError, match="tiny-llama"):
        load_drafter(tmp_path, other)
    change_json(tmp_path / "config.json", provenance={})
    with pytest.raises(UserError, match="hidden size 32"):
        load_drafter(tmp_path, other)
    change_json(tmp_path / "config.json", drafter="oracle")
    with pytest.raises(UserError, match="oracle"):
        load_drafter(tmp_path, backbone)


@pytest.mark.quick(
    "eagle-['drafter.conditional=8']",
    "eagle-['drafter.taps=[4]']",
    "firp-['drafter.layers=[1,2]', 'drafter.num_heads=1']",
    "firp-['drafter.layers=[3,1]', 'drafter.num_heads=2']",
    "firp-['drafter.layers=[4]', 'drafter.num_heads=1']",
    "firp-['drafter.matrices=one']",
    "firp-['drafter.vocabulary=own']",
    "medusa-['drafter.prefix_layers=1']",
)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("medusa", ["drafter.prefix_layers=1"]),
        ("hydra", ["drafter.conditional=8"]),
        ("hydra", ["drafter.taps=[1]"]),
        ("eagle", ["drafter.conditional=8"]),
        ("eagle", ["drafter.num_layers=2"]),
        ("eagle", ["drafter.vocabulary=shared"]),
        ("eagle", ["drafter.taps=[3,1]"]),
        ("eagle", ["drafter.taps=[4]"]),
        ("firp", ["drafter.matrices=one"]),
        ("firp", ["drafter.vocabulary=own"]),
        ("firp", ["drafter.layers=[3,1]", "drafter.num_heads=2"]),
        ("firp", ["drafter.layers=[4]", "drafter.num_heads=1"]),
        ("firp", ["drafter.layers=[1,2]", "drafter.num_heads=1"]),
    ],
    ids=str,
)
def test_settings_that_a_drafter_cannot_have_are_refused(name: str, words: list[str]) -> None:
    backbone, recipe = tiny_backbone(layers=4), load_recipe(None, [f"drafter={name}", *words])
    with pytest.raises(UserError, match=words[0].partition("=")[0]):
        check_recipe(recipe)
        build_drafter(backbone, recipe.drafter, None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distilled run, and inside it one trained run for each drafter, calibrated and with a tree."""
    folder = tmp_path_factory.mktemp("every")
    model = save_model(folder / "model", layers=4)
    seeds = [{"id": f"s{n}", "messages": [{"role": "user", "content": f"w{n}"}]} for n in range(40)]
    seed, outer = write_lines(folder / "seeds.jsonl", seeds), ["--run", folder / "run", "--quiet"]
    distill = ["--seed", seed, "--model", model, "--dtype", "fp32", "--max-new-tokens", "24"]
    medusa("distill", *distill, *outer)
    save_questions(folder / "q.jsonl")
    for name in FRESH:
        run = ["--run", folder / "run" / name, "--quiet"]
        own = ["train.validation_every=50", "train.checkpoint_every=50"]
        own += ["train.batch_tokens=128"] if name == "firp" else []
        medusa(
            "train", f"drafter={name}", *SETTINGS, *own, *run, "--model", model, "--dtype", "fp32"
        )
        medusa("calibrate", *run, "--dtype", "fp32", "--top", "4")
        medusa("tree", *run, "--budget", "9")
    return folder


@pytest.mark.quick("medusa")
@pytest.mark.parametrize("name", FRESH)
def test_each_drafter_answers_in_chat_what_the_model_does(place: Path, name: str) -> None:
    words = [
        "--run",
        place / "run" / name,
        "--dtype",
        "fp32",
        "--prompt",
        "w3",
        "--max-new-tokens",
        "20",
        "--json",
    ]
    plain = json.loads(medusa("chat", *words, "--baseline").stdout)
    for tree in ([], ["--tree", "dynamic"]):
        answer = json.loads(medusa("chat", *words, *tree).stdout)
        assert answer["answer"] == plain["answer"] != ""
        assert answer["acceptance_length"] >= 1


@pytest.mark.quick("firp")
@pytest.mark.parametrize("name", FRESH)
def test_each_drafter_is_compared_as_it_is_calibrated(place: Path, name: str) -> None:
    run, data = (
        place / "run" / name,
        write_lines(place / "other.jsonl", [conversation(n) for n in range(50, 56)]),
    )
    words = ["--data", data, "--dtype", "fp32"]
    [row] = medusa_json("compare", run, *words)
    calibrated = medusa_json(
        "calibrate", "--run", run, *words, "--top", "1", "--output", place / "c.json"
    )
    assert row["kl"] == 0
    assert row["accuracies"] == pytest.approx(sum(calibrated["accuracies"], []), abs=1e-6)


@pytest.mark.slow
def test_all_drafters_run_in_one_bench_and_each_learned_something(place: Path) -> None:
    methods = ["ar", *sorted(FRESH)]
    words = [
        "--run",
        place / "run",
        "--questions",
        place / "q.jsonl",
        "--dtype",
        "fp32",
        "--tree",
        "static",
    ]
    words += ["--methods", ",".join(methods), "--max-new-tokens", "20", "--json", "--quiet"]
    methods_run = json.loads(medusa("bench", *words).stdout)["methods"]
    assert list(methods_run) == methods
    for name in FRESH:
        assert methods_run[name]["identical"] == methods_run[name]["questions"] == 4, name
        assert methods_run[name]["tokens"] == methods_run["ar"]["tokens"], name
        assert methods_run[name]["acceptance_length"] > 1, name
