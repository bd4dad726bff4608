"""FIRP in training: its states are decoding's, its loss by hand, refusals."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import batch_of
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine import load_backbone
from medusa_cli.engine.extra_rows import extra_row_states, trace
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.train.losses import drafter_loss
from tests.helpers import FAMILIES, save_network
from tests.test_firp import DEPTH, backbone_of, firp, reference


def conversations(*lengths: int) -> list[Conversation]:
    chance = random.Random(1)
    items = []
    for i, length in enumerate(lengths):
        tokens = [chance.randrange(5, 60) for _ in range(length)]
        items.append(Conversation(f"c{i}", tokens=tokens, spans=[(3, length // 2), (length // 2 + 1, length)]))
    return items


@pytest.mark.parametrize("family", FAMILIES)
def test_training_sees_the_states_that_decoding_does(family: str, monkeypatch) -> None:
    monkeypatch.setattr("medusa_cli.engine.extra_rows.CHUNK", 4)
    backbone = backbone_of(family)
    drafter = firp(backbone, layers=[2, 3, 3])
    items = conversations(13, 22, 9)
    batch = batch_of(backbone, drafter, items)
    with torch.no_grad():
        result = extra_row_states(backbone, batch.trace, drafter.rows_of(list(drafter.steps)), batch.rows)
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
    states = extra_row_states(backbone, batch.trace, drafter.rows_of(list(drafter.steps)), batch.rows)
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
        assert float(losses.per_head[k - 1].detach()) == pytest.approx(float(mean.detach()), rel=1e-4)
        assert int(losses.counted[k - 1]) == count - k
        total = total + 0.7**k * sum(terms) / count
    given = torch.autograd.grad(losses.total, list(drafter.parameters()))
    for ours, theirs in zip(given, torch.autograd.grad(total, list(drafter.parameters())), strict=True):
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
        assert torch.allclose(mixed, extra_row_states(backbone, alone.trace, extra_rows, alone.rows), atol=1e-5)
    traces = trace(backbone, torch.tensor([items[0].tokens]))
    assert len(traces.states) == DEPTH + 1 and len(traces.keys) == DEPTH


@pytest.fixture
def model(tmp_path: Path) -> str:
    backbone = backbone_of()
    backbone.model.set_attn_implementation("eager")
    return save_network(backbone.model, tmp_path / "model")


def test_packed_weights_are_refused(model: str) -> None:
    def loss(backbone: Backbone, drafter: HeadDrafter) -> Any:
        batch = batch_of(backbone, drafter, conversations(20))
        return drafter_loss(drafter, backbone, batch, TrainRecipe()).total

    options, gradients = LoadOptions(dtype="fp32", engine="eager"), []
    for backbone in (backbone_of(), load_backbone(model, options, gradients=True)):
        drafter = firp(backbone).train()
        loss(backbone, drafter).backward()
        gradients.append([weight.grad for weight in drafter.parameters()])
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*gradients, strict=True))
    with pytest.raises(UserError, match="packed weights lose gradients"):
        loss(load_backbone(model, options), drafter)
