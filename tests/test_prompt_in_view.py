"""The prompt in view: what layers with a cache of their own see in training is what they see in decoding."""

from pathlib import Path

import pytest
import torch

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import (
    Dataset,
    batch_of,
    positions_of,
    read_dataset,
    split_conversations,
)
from medusa_cli.drafters import DRAFTERS, NewTokens
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.files.io import ReadReport
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import encode
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.run import Run
from medusa_cli.train.calibration import measure
from medusa_cli.train.losses import drafter_loss, stage_1_loss, stage_2_loss
from medusa_cli.train.setup import build_drafter, longest, runs_model
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import (
    conversation,
    load_dataset,
    tiny_backbone,
    write_lines,
)
from tests.test_training import SETTINGS

TREE = Tree.from_choices([[0], [1], [2], [0, 0], [0, 3], [1, 1], [0, 0, 2], [1, 1, 0]])
VIEWS = {
    "hydra": {"prefix_layers": 2, "context": "conversation"},
    "amphista": {"context": "conversation"},
    "eagle": {},
}


def trained(backbone: Backbone, name: str, **own: object) -> HeadDrafter:
    torch.manual_seed(0)
    drafter = DRAFTERS[name].create(backbone, 3, 1, "own", **{**VIEWS.get(name, {}), **own})
    with torch.no_grad():
        for weight in drafter.parameters():  # fresh layers are zero and would let nothing through
            weight.copy_((weight + 0.2 * torch.randn_like(weight)).to(torch.bfloat16))
    return drafter.eval()


def drafted(
    drafter: HeadDrafter, backbone: Backbone, new: NewTokens, shape: Tree | DynamicTree
) -> torch.Tensor:
    return drafter.draft(backbone, [drafter], [new], shape)[0].tokens


def whole(
    backbone: Backbone, number: int, turns: int
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    tokens, spans = encode(backbone, conversation(number, turns=turns)["messages"])
    return torch.tensor(tokens), spans


@pytest.mark.quick("eagle")
@pytest.mark.parametrize("name", VIEWS)
def test_the_prompt_is_seen_and_where_it_is_not_asked_for_it_is_not(name: str) -> None:
    backbone = tiny_backbone(layers=4)
    narrow = [] if name == "eagle" else [trained(backbone, name, context="answer")]
    for drafter in [trained(backbone, name), *narrow]:
        width = backbone.hidden_size * len(drafter.taps)
        torch.manual_seed(1)
        hidden, tokens = torch.randn(6, width), torch.randint(5, 60, (6,))
        other = torch.cat([torch.randn(4, width), hidden[4:]])
        drafts = []
        for states in (hidden, other):
            drafter.truncate(0)
            drafts.append(
                drafted(
                    drafter, backbone, drafter.first_input(NewTokens(tokens, states, 9, 0)), TREE
                )
            )
        assert torch.equal(*drafts) == (drafter in narrow)
        assert drafter.sees_prompt == (drafter not in narrow)


@pytest.mark.parametrize("name", VIEWS)
def test_a_turn_taken_up_from_a_prefix_drafts_as_one_begun_afresh(name: str) -> None:
    backbone = tiny_backbone(layers=4)
    drafter = trained(backbone, name)
    hidden, tokens = (
        torch.randn(12, backbone.hidden_size * len(drafter.taps)),
        torch.randint(5, 60, (12,)),
    )
    drafted(drafter, backbone, NewTokens(tokens[:6], hidden[:6], int(tokens[6]), 0), TREE)
    stray = torch.randint(5, 60, (3,))  # an answer that the next turn does not take up
    drafted(drafter, backbone, NewTokens(stray, torch.randn(3, hidden.shape[1]), 7, 6), TREE)
    assert drafter.fork().truncate(5) == 0  # it knows nothing yet
    # Of the tokens that no draft was made from it must be told again.
    assert drafter.truncate(20) == 9
    for shared in (8, 5):
        at = drafter.truncate(shared)
        # What a row was told of the next token may be wrong.
        assert at == shared - (name != "hydra")
    again = drafted(drafter, backbone, NewTokens(tokens[at:], hidden[at:], 11, at), TREE)
    drafter.truncate(0)
    assert torch.equal(again, drafted(drafter, backbone, NewTokens(tokens, hidden, 11, 0), TREE))


@pytest.mark.parametrize("name", VIEWS)
def test_end_of_a_long_conversation_is_learned_with_all_that_came_before_it(name: str) -> None:
    """Its answers have more positions than a micro-batch."""
    backbone = tiny_backbone(layers=4)
    drafter = trained(backbone, name)
    tokens, spans = whole(backbone, 3, 4)
    item = Conversation("c", [], tokens.tolist(), spans, (0, len(tokens) - 1))
    states = backbone.states(tokens[None], drafter.taps)[0]
    dataset = Dataset([item], [], ReadReport(), "", states)
    [[*items]] = dataset.micro_batches([item], item.positions // 2)
    ours = dataset.batch(backbone, drafter, items, torch.float32)
    theirs = batch_of(backbone, drafter, [item])
    assert all(
        torch.equal(getattr(ours, key), getattr(theirs, key))
        for key in ("next", "segment", "sequence")
    )
    assert torch.allclose(ours.hidden, theirs.hidden)
    assert len(ours.next) == len(tokens) - 1


def test_prompts_beside_answers_change_nothing_for_heads_that_do_not_see_them(
    tmp_path: Path,
) -> None:
    backbone = tiny_backbone()
    run = Run.open(f"{tmp_path}/run", create=True)
    write_lines(run.distill_path, [conversation(n, turns=2) for n in range(12)])
    heads = trained(backbone, "medusa")
    dataset = load_dataset(run, backbone, fraction=0.4)
    losses, figures = [], []
    for prompts in (False, True):
        heads.sees_prompt = prompts
        batch = dataset.batch(backbone, heads, dataset.train, torch.float32)
        loss = drafter_loss(heads, backbone, batch, TrainRecipe())
        losses.append((float(loss.total.detach()), loss.counted.tolist()))
        figures.append(measure(backbone, heads, dataset, top=3))
    assert losses[0] == losses[1]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("name", VIEWS)
def test_stage_2_sees_prompts_and_learns_answers(name: str) -> None:
    backbone = tiny_backbone(layers=4)
    records = []
    for number in range(4):
        tokens, spans = encode(backbone, conversation(number, turns=2)["messages"])
        records.append(Conversation(f"c{number}", tokens=tokens, spans=spans))
    dataset = split_conversations(records, ReadReport(), max_length=100, fraction=0.0)
    words = [
        "train.stage=2",
        f"drafter={name}",
        "train.dtype=fp32",
        "drafter.prefix_layers=1" if name == "hydra" else "",
    ]
    recipe = load_recipe(None, [*SETTINGS, *(word for word in words if word)])
    drafter = build_drafter(backbone, recipe.drafter, dataset)
    batch = batch_of(backbone, drafter, dataset.train)
    assert torch.equal(batch.sequence, torch.arange(4).repeat_interleave(len(batch.next) // 4))
    loss = stage_2_loss(backbone, drafter, recipe.train, dataset.train, 1.0)
    assert loss.positions == len(batch.learned) == positions_of(dataset.train) < len(batch.next)


@pytest.mark.quick("medusa")
@pytest.mark.parametrize("name", [*VIEWS, "medusa"])
def test_fresh_states_are_those_that_are_kept_and_leave_nothing_on_the_disk(
    name: str, tmp_path: Path
) -> None:
    backbone = tiny_backbone(layers=4)
    run = Run.open(f"{tmp_path}/run", create=True)
    write_lines(run.distill_path, [conversation(n, turns=2) for n in range(10)])
    words = [
        f"drafter={name}",
        "train.states=fresh",
        *(["drafter.prefix_layers=1"] if name == "hydra" else []),
    ]
    recipe = load_recipe(None, [*SETTINGS, "train.batch_tokens=4096", *words])
    kind = DRAFTERS[name]
    assert runs_model(kind, recipe.train)
    assert not runs_model(kind, load_recipe(None, SETTINGS).train)
    fresh = read_dataset(run.data_path, backbone, 0.2, longest(recipe.train))
    torch.manual_seed(0)
    drafter = build_drafter(backbone, recipe.drafter, fresh)
    online = stage_1_loss(backbone, drafter, fresh, recipe.train, fresh.train)
    assert not (run.path / "cache").exists()
    kept = load_dataset(run, backbone, fraction=0.2, taps=drafter.taps)
    expected = stage_1_loss(backbone, drafter, kept, recipe.train, kept.train)
    assert online.positions == expected.positions
    # Kept in bf16.
    assert float(online.total.detach()) == pytest.approx(float(expected.total.detach()), rel=0.02)
    ours, theirs = (measure(backbone, drafter, each, top=2) for each in (fresh, kept))
    assert (ours["counted"], ours["positions"]) == (theirs["counted"], theirs["positions"])
