"""Factors and caps that follow the lm_head reach logits, log probabilities, samples and the losses of training."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from medusa_cli.decode import Sampling
from medusa_cli.drafters import MedusaHeads
from medusa_cli.drafters.base import Batch
from medusa_cli.engine import Plan, load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone, lora
from medusa_cli.model.backbone import LOGIT_CHANGES, text_model
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.train.losses import model_loss, teacher_head, teacher_probabilities
from tests.helpers import (
    SPARSE,
    answer,
    assert_distributed,
    attach,
    decoder_of,
    forward,
    save_network,
    tokens_of,
)
from tests.models import PROMPTS, Known, tiny_network

IDS = PROMPTS[1]
# Each field with a value, in a type that has it: those that differ most from doing nothing.
CHANGED = (
    ("granite", {"logits_scaling": 4.0}),
    ("cohere2", {"logit_scale": 0.3}),
    ("falcon_h1", {"lm_head_multiplier": 0.2}),
    ("gemma3_text", {"final_logit_softcapping": 2.0}),
    ("nanochat", {"final_logit_softcapping": 3.0}),
)
EACH = pytest.mark.parametrize(("kind", "fields"), CHANGED)


def network_and_backbone(
    kind: str, fields: dict[str, Any], engine: str = "eager"
) -> tuple[Any, Backbone]:
    backbone = Backbone(tiny_network(kind, **fields))
    attach(backbone, engine)
    return tiny_network(kind, **fields), backbone


@torch.no_grad()
def logits_of(network: Any) -> torch.Tensor:
    logits: torch.Tensor = network(torch.tensor([IDS])).logits[0]
    return logits


def batch_of(backbone: Backbone) -> Batch:
    """Returns the positions of IDS as one answer."""
    hidden = backbone.states(torch.tensor([IDS]))[0, :-1]
    return Batch(hidden, torch.tensor(IDS[1:]), torch.zeros(len(IDS) - 1, dtype=torch.long))


@pytest.mark.quick("granite-fields0")
@EACH
def test_logits_are_the_networks_own(kind: str, fields: dict[str, Any]) -> None:
    network, backbone = network_and_backbone(kind, fields)
    assert torch.allclose(forward(backbone, IDS).logits, logits_of(network), atol=1e-4)


@pytest.mark.quick("granite-fields0-torch")
@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize(("kind", "fields"), [CHANGED[0], CHANGED[3]])
def test_logits_of_other_engines_are_the_networks_own(
    kind: str, fields: dict[str, Any], engine: str
) -> None:
    ones = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0}
    of_layers = ones if engine == "torch" and kind == "granite" else {}
    network, backbone = network_and_backbone(kind, fields | of_layers, engine)
    plan = Plan.chain(torch.tensor(IDS), logits="all")
    out = backbone.engine.forward(plan, backbone.engine.new_cache())
    assert torch.allclose(out.logits[0], logits_of(network), atol=1e-4)
    if engine == "native":
        assert torch.equal(out.best, out.logits.argmax(-1).int())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields", "engine"),
    [(*CHANGED[0], "eager"), (*CHANGED[3], "eager"), (*CHANGED[1], "native")],
)
def test_log_probabilities_and_samples_are_the_models(
    kind: str, fields: dict[str, Any], engine: str
) -> None:
    network, backbone = network_and_backbone(kind, fields, engine)
    with torch.no_grad():
        expected = network(torch.tensor([IDS])).logits[0, -1].softmax(-1)
    [step] = answer(decoder_of(backbone), IDS, max_new_tokens=1, stop_ids=(), top=3)
    [likely] = step.likelihoods
    assert likely.logprob == pytest.approx(math.log(expected[step.tokens[0]]), abs=1e-4)
    counts, draws = torch.zeros(backbone.vocab_size), 300
    for seed in range(draws):
        rules = {"max_new_tokens": 1, "stop_ids": (), "sampling": Sampling("exact", 1.0, seed=seed)}
        [token] = tokens_of(answer(decoder_of(backbone, Known([], 0.0), SPARSE), IDS, **rules))
        counts[token] += 1
    assert_distributed(counts, expected * draws)


@pytest.mark.quick("granite-fields0")
@EACH
def test_teachers_probabilities_are_the_models(kind: str, fields: dict[str, Any]) -> None:
    network, backbone = network_and_backbone(kind, fields)
    heads = MedusaHeads.create(backbone, 2, 1, "own")
    probabilities = teacher_probabilities(
        backbone, teacher_head(heads, backbone), batch_of(backbone).hidden
    )
    assert torch.allclose(probabilities, logits_of(network)[:-1].softmax(-1), atol=1e-5)


@pytest.mark.quick("cohere2-fields1")
@EACH
def test_loss_of_the_model_and_its_gradient_are_those_of_its_logits(
    kind: str, fields: dict[str, Any]
) -> None:
    network, backbone = network_and_backbone(kind, fields)
    batch = batch_of(backbone)
    weight = backbone.model.get_output_embeddings().weight.requires_grad_()
    loss, cost = model_loss(backbone, batch, None, "ce", True)
    loss.backward()
    ours = network.get_output_embeddings().weight
    expected = F.cross_entropy(network(torch.tensor([IDS])).logits[0, :-1], batch.next)
    [gradient] = torch.autograd.grad(expected, [ours])
    near = pytest.approx(float(expected.detach()), rel=1e-4)
    assert float(loss.detach()) == near
    assert cost["nll"] == near
    if ours is not network.get_input_embeddings().weight:
        assert torch.allclose(weight.grad, gradient, atol=1e-5)


def test_an_unknown_formula_is_refused_with_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_network(tiny_network("granite", logits_scaling=1.005), tmp_path)
    monkeypatch.delitem(LOGIT_CHANGES, "logits_scaling")
    with pytest.raises(UserError, match=r"'granite' .*0\.50%"):
        load_backbone(path, LoadOptions(dtype="fp32"))


@pytest.mark.parametrize(
    ("kind", "fields"), [("gemma2", {"attn_logit_softcapping": 50.0}), ("gpt_oss", {})]
)
def test_the_torch_engine_refuses_attention_that_caps_or_sinks_change(
    kind: str, fields: dict[str, Any]
) -> None:
    # A cap of 50 changes nothing at small scores, which the engine's own check would see.
    with pytest.raises(UsageError, match="engine torch"):
        network_and_backbone(kind, fields, "torch")


def test_adapter_of_a_model_that_sees_images_is_on_its_text_part() -> None:
    network = tiny_network("gemma3")
    lora.attach(network, rank=2, alpha=4.0, dropout=0.0)
    adapted = [name for name, _ in network.named_modules() if name.endswith(".lora_A")]
    assert len(adapted) == 7 * network.config.text_config.num_hidden_layers + 1
    text = {id(module) for module in text_model(network).modules()} | {id(network.lm_head.lora_A)}
    assert all(id(network.get_submodule(name)) in text for name in adapted)
