"""FIRP: extra rows against a slow reference, one pass a step, what stays; the same states in training, its loss."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import batch_of
from medusa_cli.drafters import Firp
from medusa_cli.drafters.firp import check_extra_rows, spread
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.io import load_drafter, save_drafter
from medusa_cli.engine import Output, Plan, load_backbone
from medusa_cli.engine.extra_rows import extra_row_states, trace
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.run import Run, provenance
from medusa_cli.train import train
from medusa_cli.train.losses import drafter_loss
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import (
    FAMILIES,
    Recording,
    attach,
    conversation,
    forward,
    generate,
    head_means,
    save_model,
    save_network,
    tiny_backbone,
    write_lines,
)
from tests.models import tiny_network

pytestmark = pytest.mark.usefixtures("exact")

TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]])
PROMPT = [5, 9, 20, 11, 7, 31, 8, 44, 10, 12]
DEPTH = 6


def backbone_of(family: str = "llama", engine: str = "eager", positions: int = 512) -> Backbone:
    return tiny_backbone(family, layers=DEPTH, engine=engine, positions=positions)


def firp(
    backbone: Backbone, heads: int = 3, vocabulary: str = "shared", scale: float = 0.3, **own: Any
) -> Firp:
    torch.manual_seed(0)
    ids = torch.randperm(backbone.vocab_size)[:24] if vocabulary == "draft" else None
    drafter = Firp.create(backbone, heads, vocabulary=vocabulary, draft_ids=ids, **own)
    with torch.no_grad():
        for weight in drafter.parameters():  # files hold bf16
            weight.copy_((weight + scale * torch.randn_like(weight) / 4).to(torch.bfloat16))
    return drafter.eval()


@cache
def network_of(family: str, positions: int) -> Any:
    """Returns the network of backbone_of on transformers' own attention."""
    network = backbone_of(family, positions=positions).model
    network.set_attn_implementation("eager")
    return network


@torch.no_grad()
def reference(family: str, drafter: Firp, tokens: list[int], positions: int = 512) -> Tensor:
    """The last token's final pseudo states [K, H], from nothing: every row at once, a dense mask, eager attention."""
    model = network_of(family, positions)
    base, config, n = model.model, model.config.get_text_config(), len(tokens)
    x = base.embed_tokens(torch.tensor([tokens]))
    for index, layer in enumerate(base.layers):
        for at, step in zip(drafter.config.layers, drafter.steps, strict=True):
            if at == index:
                x = torch.cat([x, step(x[:, n - 1 : n])], dim=1)
        rows = torch.arange(x.shape[1])
        seen = rows[:, None] >= rows
        kind = (getattr(config, "layer_types", None) or [None] * DEPTH)[index]
        if kind == "sliding_attention" or (
            kind is None and getattr(config, "sliding_window", None)
        ):
            seen &= rows[:, None] - rows < config.sliding_window
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[
            None, None
        ]
        tables = (
            base.rotary_emb(x, rows[None], kind)
            if family == "gemma3"
            else base.rotary_emb(x, rows[None])
        )
        x = layer(x, attention_mask=mask, position_embeddings=tables, position_ids=rows[None])
    return base.norm(x)[0, n:]


@pytest.mark.quick("torch-mistral-window")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
def test_extra_rows_in_a_tree_are_those_of_each_path_alone(family: str, engine: str) -> None:
    backbone = backbone_of(family, engine)
    drafter = firp(backbone, layers=[2, 3, 3])
    cache = backbone.engine.new_cache(1, 4)  # grows
    out = forward(backbone, PROMPT, cache, logits="last", extra_rows=drafter.extra_rows(3))
    assert out.logits is not None
    assert out.logits.shape[0] == 1
    assert out.hidden.shape[0] == len(PROMPT)
    assert torch.allclose(out.extra[-1], reference(family, drafter, PROMPT), atol=1e-4)
    tokens = torch.arange(20, 20 + TREE.size)
    out = forward(backbone, tokens, cache, TREE, extra_rows=drafter.extra_rows(3))
    assert out.extra is not None
    assert out.extra.shape == (TREE.size, 3, backbone.hidden_size)
    for node in (0, 3, 8):
        path = PROMPT + tokens[TREE.path(node)].tolist()
        assert torch.allclose(out.extra[node], reference(family, drafter, path), atol=1e-4), node


@pytest.mark.quick("eager")
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
def test_a_long_prompt_ends_in_its_last_tokens_extra_rows(engine: str) -> None:
    backbone = backbone_of("llama", engine, positions=1024)
    drafter = firp(backbone)
    prompt = [5 + i * 7 % 50 for i in range(530)]
    out = forward(backbone, prompt, logits="last", extra_rows=drafter.extra_rows(2))
    expected = reference("llama", drafter, prompt, positions=1024)
    assert out.hidden.shape[0] == 530
    assert torch.allclose(out.extra[-1], expected[:2], atol=1e-3)


class Watched(Recording, Firp):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
@pytest.mark.parametrize(
    "shape", [Tree.dense([12, 4, 2]), DynamicTree(60, 3)], ids=["static", "dynamic"]
)
def test_drafts_come_from_the_extra_rows_of_the_accepted_path(
    engine: str, shape: Tree | DynamicTree
) -> None:
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


@pytest.mark.quick
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
@pytest.mark.parametrize("shape", [TREE, DynamicTree(9, 3)], ids=str)
def test_a_step_is_one_backbone_pass(engine: str, shape: Tree | DynamicTree) -> None:
    backbone = backbone_of("llama", engine)
    drafter = firp(backbone)
    rows: list[tuple[int, int]] = []  # and extra rows
    inner = backbone.engine.forward

    def counted(plan: Plan, cache: Any) -> Output:
        out = inner(plan, cache)
        rows.append(
            (plan.tokens.shape[1], 0 if out.extra is None else out.extra[0, ..., 0].numel())
        )
        return out

    backbone.engine.forward = counted
    steps = list(generate(backbone, drafter, shape, PROMPT, max_new_tokens=40, stop_ids=()))
    assert rows == [(len(PROMPT), 3), *((step.nodes, 3 * step.nodes) for step in steps[1:])]


def test_default_layers_spread_from_a_half_to_five_sixths_of_the_depth() -> None:
    assert spread(3, 30) == (15, 20, 25)
    assert spread(1, 30) == (15,)
    assert spread(4, 30) == (15, 18, 22, 25)
    assert spread(4, 2) == (1, 1, 1, 1)


def test_a_model_whose_layers_are_unknown_is_refused() -> None:
    import transformers as hf

    config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    backbone = Backbone(hf.GPT2LMHeadModel(config).eval(), id="tiny-gpt2")
    attach(backbone)
    drafter = firp(backbone)
    with pytest.raises(
        UserError, match="cannot be run one by one: its parts are not named as in Llama"
    ):
        next(generate(backbone, drafter, TREE, PROMPT, max_new_tokens=5))


def test_a_model_with_embeddings_by_layer_is_refused() -> None:
    backbone = Backbone(tiny_network("gemma4_text"))
    attach(backbone, "native")
    with pytest.raises(UserError):
        check_extra_rows(backbone)


def test_a_model_with_factors_outside_its_layers_is_refused(tmp_path: Path) -> None:
    """Granite scales its embeddings, which the eager engine's layers do not see one by one."""
    import transformers as hf

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    config = hf.GraniteConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128
    )

    def saved(name: str, embedding_multiplier: float) -> Backbone:
        torch.manual_seed(0)
        config.embedding_multiplier = embedding_multiplier
        backbone = load_backbone(
            save_network(hf.GraniteForCausalLM(config).eval(), tmp_path / name),
            LoadOptions(dtype="fp32", engine="eager"),
        )
        save_drafter(firp(backbone), tmp_path / name / "drafter", provenance(backbone.identity))
        return backbone

    assert load_drafter(tmp_path / "plain" / "drafter", saved("plain", 1.0)).num_heads == 3
    scaled = saved("scaled", 12.0)
    with pytest.raises(UserError, match="one by one"):
        load_drafter(tmp_path / "scaled" / "drafter", scaled)
    run = Run.open(f"{tmp_path}/run", create=True)
    write_lines(run.distill_path, [conversation(number) for number in range(12)])
    recipe = load_recipe(None, ["drafter=firp", "drafter.num_heads=2", f"model={tmp_path}/scaled"])
    with pytest.raises(UserError, match="one by one"):
        train(run, recipe, options=LoadOptions(dtype="fp32"))


def conversations(*lengths: int) -> list[Conversation]:
    chance = random.Random(1)
    items = []
    for i, length in enumerate(lengths):
        tokens = [chance.randrange(5, 60) for _ in range(length)]
        items.append(
            Conversation(
                f"c{i}", tokens=tokens, spans=[(3, length // 2), (length // 2 + 1, length)]
            )
        )
    return items


@pytest.mark.quick("llama", "gemma3")
@pytest.mark.parametrize("family", FAMILIES)
def test_training_sees_the_states_that_decoding_does(family: str, monkeypatch) -> None:
    monkeypatch.setattr("medusa_cli.engine.extra_rows.CHUNK", 4)
    backbone = backbone_of(family)
    drafter = firp(backbone, layers=[2, 3, 3])
    items = conversations(13, 22, 9)
    batch = batch_of(backbone, drafter, items)
    with torch.no_grad():
        result = extra_row_states(
            backbone, batch.trace, drafter.rows_of(list(drafter.steps)), batch.rows
        )
    row = 0
    for item in items:
        for start, end in item.spans:
            for at in range(start, end):
                assert batch.next[row] == item.tokens[at]
                if at % 3 == 0:
                    expected = reference(family, drafter, item.tokens[:at])
                    assert torch.allclose(result[row], expected, atol=1e-4), (item.id, at)
                row += 1
    assert row == len(batch.next)


@pytest.mark.parametrize("vocabulary", ["draft", "shared"])
def test_loss_is_the_kl_to_the_models_distribution(vocabulary: str) -> None:
    backbone = backbone_of()
    drafter = firp(backbone, vocabulary=vocabulary)
    [item] = conversations(17)[:1]
    item = Conversation(item.id, tokens=item.tokens, spans=[(4, 17)])
    batch = batch_of(backbone, drafter, [item])
    drafter.train()
    losses = drafter_loss(drafter, backbone, batch, TrainRecipe(decay=0.7))
    states = extra_row_states(
        backbone, batch.trace, drafter.rows_of(list(drafter.steps)), batch.rows
    )
    rows = backbone.lm_head_weight[drafter.draft_ids]
    known = drafter.vocabulary_index(torch.device("cpu")) >= 0
    total: Any = 0.0
    for k in (1, 2, 3):
        terms, count = [], len(batch.next)
        for p in range(count - k):
            if known[batch.next[p + k]]:
                target = (rows @ batch.hidden[p + k]).log_softmax(-1)
                result = (rows @ states[p, k - 1]).log_softmax(-1)
                divergence = (target.exp() * (target - result)).sum()
                terms.append(divergence - (target.exp() * target).sum())
        mean = sum(terms) / len(terms)
        assert float(head_means(losses)[k - 1].detach()) == pytest.approx(
            float(mean.detach()), rel=1e-4
        )
        assert int(losses.counted[k - 1]) == count - k
        total = total + 0.7**k * sum(terms) / count
    given = torch.autograd.grad(losses.total, list(drafter.parameters()))
    for ours, theirs in zip(
        given, torch.autograd.grad(total, list(drafter.parameters())), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert all(weight.grad is None for weight in backbone.model.parameters())


def test_trace_stops_at_the_answers_and_sees_no_other_conversation() -> None:
    backbone = backbone_of()
    drafter = firp(backbone)
    items = conversations(9, 30)
    extra_rows = drafter.rows_of(list(drafter.steps))
    pair, alone = batch_of(backbone, drafter, items), batch_of(backbone, drafter, items[:1])
    with torch.no_grad():
        mixed = extra_row_states(backbone, pair.trace, extra_rows, pair.rows)[: len(alone.next)]
        assert torch.allclose(
            mixed, extra_row_states(backbone, alone.trace, extra_rows, alone.rows), atol=1e-5
        )
    traces = trace(backbone, torch.tensor([items[0].tokens]))
    assert len(traces.states) == DEPTH + 1
    assert len(traces.keys) == DEPTH


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save_model(tmp_path / "model", layers=DEPTH)


def test_gradients_of_a_loaded_backbone_are_those_of_one_in_memory(model: str) -> None:
    def loss(backbone: Backbone, drafter: HeadDrafter) -> Any:
        batch = batch_of(backbone, drafter, conversations(20))
        return drafter_loss(drafter, backbone, batch, TrainRecipe()).total

    options, gradients = LoadOptions(dtype="fp32", engine="eager"), []
    for backbone in (backbone_of(), load_backbone(model, options, gradients=True)):
        drafter = firp(backbone).train()
        loss(backbone, drafter).backward()
        gradients.append([weight.grad for weight in drafter.parameters()])
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*gradients, strict=True))
