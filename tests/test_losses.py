"""The heads' losses against plain autograd, their targets with a biased or adapted lm_head, and exact accumulation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_cli.data.packing import Dataset, positions_of, split_conversations
from medusa_cli.drafters import Firp, HydraHeads, MedusaHeads
from medusa_cli.drafters.base import Batch, NewTokens
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.files.io import ReadReport
from medusa_cli.model import Backbone
from medusa_cli.runs.recipe import TrainRecipe
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.run import Run
from medusa_cli.train import Trainer
from medusa_cli.train.fused_linear import Targets, blockwise_loss, linear_loss
from medusa_cli.train.losses import (
    drafter_loss,
    stage_2_loss,
    teacher_head,
    teacher_probabilities,
)
from medusa_cli.tree import Tree
from tests.helpers import (
    adapted_backbone,
    answers_of,
    attach,
    drafted,
    forward,
    head_means,
    random_conversations,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
)

DRAFT_IDS = torch.tensor([9, 4, 30, 12, 55, 7])


def kl_to(teacher: Tensor) -> Callable[[Tensor, slice], Tensor]:
    def loss(logits: Tensor, block: slice) -> Tensor:
        scores, aim = logits.float().log_softmax(-1), teacher[block]
        logits.copy_(scores.exp() - aim.exp())
        return F.kl_div(scores, aim, reduction="sum", log_target=True)

    return loss


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blockwise_loss_is_that_of_all_rows(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 30).to(dtype)
    hidden = torch.randn(13, 6, dtype=dtype, requires_grad=True)
    teacher = torch.randn(13, 30).log_softmax(-1)
    plain = F.kl_div(
        linear(hidden).float().log_softmax(-1), teacher, reduction="sum", log_target=True
    )
    expected = torch.autograd.grad(plain * 3, [hidden, *linear.parameters()])
    loss = blockwise_loss(kl_to(teacher), linear, hidden, list(linear.parameters()), rows)
    near = 1e-5 if dtype == torch.float32 else 3e-2
    assert loss.item() == pytest.approx(plain.item(), rel=near)
    for ours, theirs in zip(
        torch.autograd.grad(loss * 3, [hidden, *linear.parameters()]), expected, strict=True
    ):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near * float(theirs.abs().max()))


def plain_linear_loss(
    hidden: Tensor, matrix: Tensor, targets: Targets, bias: Tensor | None = None
) -> Tensor:
    """Computes the loss and hits of `linear_loss` directly from the formula."""
    logits = F.linear(hidden, matrix.to(hidden.dtype), bias).float()
    targets.right.copy_(logits.argmax(-1) == targets.ids)
    wanted = F.one_hot(targets.ids, len(matrix)).float()
    if targets.teacher is not None:
        shares = targets.teacher[targets.teacher_rows].float()
        wanted = (1 - targets.soft) * wanted + targets.soft * shares
    return F.cross_entropy(logits, wanted, reduction="none") @ targets.weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("soft", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_linear_loss_is_the_plain_one(
    dtype: torch.dtype, soft: float, has_bias: bool, mixed: bool
) -> None:
    torch.manual_seed(0)
    # A whole block of rows and a part.
    hidden = torch.randn(150, 6, dtype=dtype, requires_grad=True)
    matrix = torch.randn(30, 6, requires_grad=True)
    bias = torch.randn(30, dtype=dtype) if has_bias else None
    targets = torch.randint(30, (150,))
    weights = torch.rand(150) * torch.randint(2, (150,))
    teacher = torch.randn(160, 30).softmax(-1) if soft else None
    teacher_rows = torch.randperm(160)[:150]
    near = 1e-5 if dtype == torch.float32 and not mixed else 3e-2
    results = []
    for function in (linear_loss, plain_linear_loss):
        right = torch.empty(150, dtype=torch.uint8)
        given = Targets(targets, weights, right, teacher, teacher_rows, soft)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed and function is linear_loss):
            loss = function(hidden, matrix, given, bias)
        grads = torch.autograd.grad(loss, [hidden, matrix])
        results.append((loss.detach(), right.tolist(), *grads))
    (ours, our_hits, *our_grads), (plain, plain_hits, *plain_grads) = results
    assert float(ours) == pytest.approx(float(plain), rel=near)
    assert our_hits == plain_hits
    for given, expected in zip(our_grads, plain_grads, strict=True):
        torch.testing.assert_close(
            given, expected, rtol=near, atol=near * float(expected.abs().max())
        )


@pytest.mark.quick("MedusaHeads-draft-more0-objective0", "MedusaHeads-draft-more1-objective1")
@pytest.mark.parametrize(
    ("drafter", "vocabulary", "more", "objective"),
    [
        (MedusaHeads, "draft", {}, {}),
        (MedusaHeads, "draft", {"conditional": 3}, {"soft": 0.5}),
        (MedusaHeads, "shared", {}, {"soft": 0.5}),
        (HydraHeads, "own", {"matrices": "one"}, {"soft": 0.5}),
    ],
)
def test_sampled_softmax_teaches_what_the_whole_one_does(
    drafter: type[HeadDrafter], vocabulary: str, more: dict[str, Any], objective: dict[str, Any]
) -> None:
    backbone, recipe = biased_backbone(), TrainRecipe(regress=0.0, **objective)
    ids = torch.randperm(64)[:48] if vocabulary == "draft" else None
    heads = drafter.create(backbone, 2, vocabulary=vocabulary, draft_ids=ids, **more)
    if heads.conditional is not None:
        nn.init.normal_(heads.conditional.after)
    torch.manual_seed(1)
    tokens = torch.randint(0, 64, (24,))
    batch = Batch(torch.randn(24, backbone.hidden_size), tokens, torch.zeros(24, dtype=torch.long))
    learning = [weight for weight in heads.parameters() if weight.requires_grad]

    def taught(scored: int | None) -> tuple[list[int], Tensor]:
        loss = drafter_loss(heads, backbone, batch, replace(recipe, scored=scored))
        gradients = torch.autograd.grad(loss.total, learning, allow_unused=True)
        return loss.learned.tolist(), torch.cat(
            [gradient.flatten() for gradient in gradients if gradient is not None]
        )

    learned, whole = taught(None)
    # As many as there are: nothing is drawn.
    assert torch.equal(taught(len(heads.draft_ids))[1], whole)
    drawn = [taught(40) for _ in range(60)]
    assert all(targets == learned for targets, _ in drawn)  # no target goes unscored
    assert not torch.equal(drawn[0][1], drawn[1][1])
    mean = torch.stack([gradient for _, gradient in drawn]).mean(0)
    assert F.cosine_similarity(mean, whole, dim=0) > 0.96
    with torch.no_grad():  # losses that are only measured are over all
        few, every = (
            drafter_loss(heads, backbone, batch, replace(recipe, scored=count)).total
            for count in (40, None)
        )
    assert torch.equal(few, every)


@pytest.mark.parametrize("vocabulary", ["draft", "shared"])
def test_teachers_probabilities_of_some_rows_are_weighted_shares_of_the_wholes(
    vocabulary: str,
) -> None:
    backbone = biased_backbone()
    ids = torch.randperm(64)[:48] if vocabulary == "draft" else None
    heads = MedusaHeads.create(backbone, 2, vocabulary=vocabulary, draft_ids=ids)
    lm_head = teacher_head(heads, backbone)
    states = torch.randn(24, backbone.hidden_size)
    rows = torch.tensor([40, 3, 17, 0])
    log_weight = torch.tensor([0.0, 0.0, 1.5, 1.5])
    shares = teacher_probabilities(backbone, lm_head, states)[:, rows] * log_weight.exp()
    some = teacher_probabilities(backbone, lm_head, states, rows, log_weight)
    assert torch.allclose(some, shares / shares.sum(-1, keepdim=True), atol=1e-5)


def biased_backbone() -> Backbone:
    """Returns a model whose lm_head has a bias that decides its guesses, as Phi's may."""
    model = tiny_model()
    torch.manual_seed(5)
    model.lm_head.bias = nn.Parameter(10 * torch.randn(64))
    backbone = Backbone(model, tiny_tokenizer(), id="biased")
    attach(backbone)
    return backbone


def packed(backbone: Backbone, count: int = 8) -> Batch:
    torch.manual_seed(3)
    hidden = torch.randn(count, backbone.hidden_size)
    return Batch(
        hidden,
        DRAFT_IDS[torch.arange(count) % len(DRAFT_IDS)],
        torch.zeros(count, dtype=torch.long),
    )


@pytest.mark.parametrize("vocabulary", ["own", "draft", "shared"])
def test_soft_targets_know_the_bias_of_the_lm_head(vocabulary: str) -> None:
    backbone = biased_backbone()
    heads = MedusaHeads.create(
        backbone, 1, 1, vocabulary, draft_ids=DRAFT_IDS if vocabulary == "draft" else None
    )
    batch = packed(backbone)
    loss = head_means(drafter_loss(heads, backbone, batch, TrainRecipe(soft=1.0)))[0]
    head = backbone.model.lm_head
    p = head(batch.hidden)[1:, heads.draft_ids].softmax(-1)
    states = heads.blocks[0](batch.hidden[:-1])
    scores = head(states) if vocabulary == "shared" else F.linear(states, heads.matrices[0])
    expected = -(p * scores.log_softmax(-1)).sum(-1).mean()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


@pytest.mark.usefixtures("exact")
def test_shared_heads_guess_with_the_bias_of_the_lm_head() -> None:
    backbone = biased_backbone()
    heads = MedusaHeads.create(backbone, 2, 1, "shared").eval()
    batch = packed(backbone)
    expected = backbone.model.lm_head(batch.hidden)  # fresh heads leave the states as they are
    for scores in heads.logits(backbone, batch):
        assert torch.allclose(scores, expected, atol=1e-4)
    draft = drafted(
        heads,
        backbone,
        NewTokens(torch.tensor([3]), batch.hidden[:1], 5, 0),
        Tree.from_choices([[0], [1]]),
    )
    assert draft.tokens.tolist() == [5, *expected[0].topk(2).indices.tolist()]
    for ids in (None, DRAFT_IDS):
        firp = Firp.create(
            backbone, 1, 1, "shared" if ids is None else "draft", draft_ids=ids, layers=(1,)
        ).eval()
        assert torch.allclose(
            firp.score(backbone, 0, batch.hidden), expected[:, firp.draft_ids], atol=1e-4
        )


@pytest.mark.parametrize("vocabulary", ["own", "draft"])
def test_stage_2s_soft_targets_are_the_adapted_models(vocabulary: str) -> None:
    backbone = adapted_backbone()
    heads = MedusaHeads.create(
        backbone, 1, 1, vocabulary, draft_ids=DRAFT_IDS if vocabulary == "draft" else None
    )
    data = split_conversations(random_conversations(3), ReadReport(), max_length=30, fraction=0.0)
    train = load_recipe(None, ["train.stage=2", "train.dtype=fp32", "train.soft=1.0"]).train
    loss = stage_2_loss(backbone, heads, train, data.train, 0.9)
    terms: list[float] = []
    for item in data.train:
        out = forward(backbone, item.tokens)
        p = out.logits[:, heads.draft_ids].softmax(-1)
        for at in (at for start, end in item.spans for at in range(start, end - 1)):
            if int(item.tokens[at + 1]) in heads.draft_ids.tolist():
                with torch.no_grad():
                    scores = F.linear(heads.blocks[0](out.hidden[at - 1]), heads.matrices[0])
                terms.append(-float((p[at] * scores.log_softmax(-1)).sum()))
    assert float(head_means(loss)[0].detach()) == pytest.approx(sum(terms) / len(terms), rel=1e-4)


class Gradients(Trainer):
    """Trainer that keeps the gradients of its first step and changes no weight."""

    def _update(self) -> float:
        self.gradients = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return 0.0


@pytest.mark.parametrize("stage", [1, 2])
def test_tokens_weigh_the_same_in_any_micro_batch(tmp_path: Path, stage: int) -> None:
    torch.manual_seed(0)
    backbone = adapted_backbone() if stage == 2 else tiny_backbone()
    heads = HydraHeads.create(backbone, 3, 1, "draft", draft_ids=torch.arange(4, 50))
    data: Any
    if stage == 2:
        data = split_conversations(
            random_conversations(6), ReadReport(), max_length=30, fraction=0.0
        )
        items: list[Any] = data.train
    else:
        items = answers_of(*(torch.randint(4, 60, (n,)) for n in (3, 21, 9, 2, 30)))
        data = Dataset(items, [], ReadReport(), "x", torch.randn(65, backbone.hidden_size))

    def gradients_of(parts: list[list[Any]]) -> tuple[list[Tensor | None], float]:
        words = [
            f"train.stage={stage}",
            "train.dtype=fp32",
            "train.regress=2",
            f"train.accumulation={len(parts)}",
        ]
        recipe = load_recipe(None, [*words, "train.validation_every=99"])
        trainer = Gradients(backbone, heads, data, recipe, Run(tmp_path))
        trainer.groups, trainer.sizes, trainer.validation = (
            [parts] * 2,
            [positions_of(items)] * 2,
            [],
        )
        return next((trainer.gradients, event.loss) for event in trainer.events())

    together, loss = gradients_of([items])
    apart, same = gradients_of([items[:1], items[1:4], items[4:]])
    assert same == pytest.approx(loss, rel=1e-5)
    assert any(gradient is not None and gradient.abs().max() > 1e-3 for gradient in together)
    for ours, theirs in zip(apart, together, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
