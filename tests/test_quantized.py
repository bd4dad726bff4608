"""4-bit and 8-bit backbones through bitsandbytes: decoding, drafting, and adapters that keep their gradients."""

from pathlib import Path

import pytest
import torch

from medusa_cli.engine import load_backbone
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone, lora
from medusa_cli.model.load import load_network
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.run import rounding_in
from tests.helpers import (
    PROMPT,
    SPARSE,
    attach,
    attach_adapter,
    forward,
    generate,
    generate_plain,
    medusa,
    medusa_drafter,
    save_model,
    tiny_model,
    tokens_of,
)
from tests.test_joint import place, train

pytest.importorskip("bitsandbytes")
__all__ = ["place"]  # a fixture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("quantized") / "model", hidden=64)


@pytest.mark.quick("bnb.nf4")
@pytest.mark.parametrize("method", ["bnb.nf4", "bnb.int8"])
def test_quantized_models_decode_with_drafts_as_without(model: str, method: str) -> None:
    backbone = load_backbone(model, LoadOptions(dtype="fp32", quantize=method))
    kinds = {type(module).__name__ for module in backbone.model.modules()}
    assert ("Linear4bit" if method == "bnb.nf4" else "Linear8bitLt") in kinds
    assert backbone.engine.name == "eager"
    plain = tokens_of(generate_plain(backbone, PROMPT, max_new_tokens=24, stop_ids=()))
    drafted = generate(
        backbone, medusa_drafter(backbone), SPARSE, PROMPT, max_new_tokens=24, stop_ids=()
    )
    tokens = tokens_of(drafted)
    assert len(tokens) == 24
    # 8-bit products round by the row they come in, so near-ties may part there.
    if method == "bnb.nf4":
        assert tokens == plain


@pytest.mark.quick("bnb.int8")
@pytest.mark.parametrize("method", ["bnb.nf4", "bnb.int8"])
def test_their_layers_run_on_the_torch_engine(model: str, method: str) -> None:
    backbone = load_backbone(model, LoadOptions(dtype="fp32", quantize=method))
    ids = torch.arange(5, 25)
    expected = forward(backbone, ids).logits
    plain = tokens_of(generate_plain(backbone, PROMPT, max_new_tokens=16, stop_ids=()))
    engine = attach(backbone, "torch")
    ours = forward(backbone, ids).logits
    assert (ours - expected).norm() < 0.02 * expected.norm()
    # A weight in 4 bits takes half a byte, and its scale is not counted.
    of_weights = {"bnb.nf4": 0.5, "bnb.int8": 1.0}[method]
    whole = sum(weight.numel() for weight in tiny_model(hidden=64).model.layers.parameters())
    assert engine.weight_bytes - engine.head.weight.nbytes < 1.1 * of_weights * whole
    if method == "bnb.nf4":
        drafted = generate(
            backbone, medusa_drafter(backbone), SPARSE, PROMPT, max_new_tokens=16, stop_ids=()
        )
        assert tokens_of(drafted) == plain


def test_evaluation_keeps_the_adapters_gradients(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On hosts with AVX512-BF16, bitsandbytes repacks 4-bit weights at the first inference.

    Unless that is switched off, later training passes lose the gradients of adapters with a generic warning at most.
    """
    with monkeypatch.context() as elsewhere:  # such a host, whatever this one is
        elsewhere.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
        network, _ = load_network(
            ModelSource.of(model), LoadOptions(dtype="bf16", quantize="bnb.nf4")
        )
    layers = [module for module in network.modules() if type(module).__name__ == "Linear4bit"]
    assert layers
    assert not any(module.support_avx512bf16_for_cpu for module in layers)
    attach_adapter(network)
    backbone = Backbone(network)
    attach(backbone)
    lora.unfreeze(network)
    weights = lora.trained_weights(network)
    ids = torch.arange(5, 25)[None]

    def backward() -> dict[str, torch.Tensor]:
        network.train()
        with torch.autocast("cpu", torch.bfloat16):
            backbone.engine.lm_head(backbone.states(ids)).float().logsumexp(-1).sum().backward()
        gradients = {
            name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None
        }
        network.zero_grad()
        return gradients

    before = backward()
    network.eval()
    forward(backbone, ids[0])
    with lora.adapter_off(network):
        forward(backbone, ids[0])
    after = backward()
    assert set(before) == set(after) == set(weights)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(gradient.abs().sum() > 0 for gradient in before.values())


def loads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns True for each model loaded from now on that is in 4 bits."""
    in_4bit: list[bool] = []

    def spy(model, options, **rest):
        in_4bit.append(options.quantize == "bnb.nf4")
        return load_network(model, options, **rest)

    monkeypatch.setattr("medusa_cli.engine.load.load_network", spy)
    return in_4bit


def test_commands_after_qlora_load_the_model_in_4_bits_unless_quantize_is_given(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = place
    train(place, "--stage", "2", "--tuning", "qlora", "train.optimizer=adamw8bit")
    assert (Path(run) / "adapter" / "adapter_model.safetensors").is_file()
    in_4bit = loads(monkeypatch)
    chat = ["chat", "--prompt", "w1", "--max-new-tokens", "8"]
    for words in (
        ["calibrate", "--top", "3"],
        ["tree", "--budget", "auto"],
        chat,
        [*chat, "--baseline"],
    ):
        ran = medusa(words[0], "--run", run, *words[1:])
        assert "quantizing the model by bnb.nf4" in ran.stderr, words
        assert in_4bit == [True], words
        in_4bit.clear()
    done = medusa(*chat, "--run", run, "--quantize", "bnb.nf4")
    assert in_4bit == [True]
    assert "quantizing the model" not in done.stderr
    for method in ("none", "bnb.int8"):
        in_4bit.clear()
        other = medusa(*chat, "--run", run, "--quantize", method)
        assert in_4bit == [False]
        assert other.stderr.count("was trained on the model quantized by bnb.nf4") == 1


def test_heads_trained_on_4_bits_resume_and_calibrate_in_4_bits(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run = place
    train(place, "--quantize", "bnb.nf4")
    assert rounding_in(Path(run) / "drafter") == "bnb.nf4"
    assert "give --quantize bnb.nf4" in train(place, "--resume", exit_code=2).stderr
    train(place, "--resume", "--quantize", "bnb.nf4")
    joint = train((model, f"{run}/joint"), "--stage", "2", "--from", run)
    assert "was trained on the model quantized by bnb.nf4" in joint.stderr
    assert rounding_in(Path(run) / "joint" / "drafter") is None  # its adapter is over whole weights
    in_4bit = loads(monkeypatch)
    for name in (run, f"{run}/joint"):
        medusa("calibrate", "--run", name, "--top", "3")
    assert in_4bit == [True, False]
