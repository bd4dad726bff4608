"""4-bit and 8-bit backbones through bitsandbytes: decoding, drafting, and adapters that keep their gradients."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from medusa_cli.backbone import Backbone, adapter
from medusa_cli.backbone.load import load_network
from medusa_cli.cli import app
from medusa_cli.decoding import generate, generate_plain
from medusa_cli.engines import attach, load_backbone
from tests.passes import run
from tests.runs import save_model
from tests.test_generate import SPARSE, medusa
from tests.test_joint import place, train

pytest.importorskip("bitsandbytes")
__all__ = ["place"]  # a fixture
PROMPT = [5, 9, 20, 11, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("quantised") / "model", hidden=64)


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_quantised_models_decode_with_drafts_as_without(model: str, bits: str) -> None:
    backbone = load_backbone(model, dtype="fp32", **{bits: True})
    kinds = {type(module).__name__ for module in backbone.model.modules()}
    assert ("Linear4bit" if bits == "load_in_4bit" else "Linear8bitLt") in kinds and backbone.engine.name == "eager"
    plain = [t for s in generate_plain(backbone, PROMPT, max_new_tokens=24, stop_ids=()) for t in s.tokens]
    drafted = generate(backbone, medusa(backbone), SPARSE, PROMPT, max_new_tokens=24, stop_ids=())
    tokens = [t for s in drafted for t in s.tokens]
    assert len(tokens) == 24
    if bits == "load_in_4bit":  # 8-bit products round by the row they come in, so near-ties may part there
        assert tokens == plain


def test_an_evaluation_does_not_cost_the_adapter_its_gradients(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On hosts with AVX512-BF16, bitsandbytes repacks 4-bit weights at the first inference.

    Unless that is switched off, later training passes lose the gradients of adapters with a generic warning at most.
    """
    with monkeypatch.context() as elsewhere:  # such a host, whatever this one is
        elsewhere.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
        network, _ = load_network(model, dtype="bf16", load_in_4bit=True)
    layers = [module for module in network.modules() if type(module).__name__ == "Linear4bit"]
    assert layers and not any(module.support_avx512bf16_for_cpu for module in layers)
    torch.manual_seed(0)
    adapter.attach(network, rank=4, alpha=8, dropout=0.0)
    backbone = Backbone(network)
    attach(backbone)
    adapter.unfreeze(network)
    weights = adapter.trained_weights(network)
    for name, weight in weights.items():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    ids = torch.arange(5, 25)[None]

    def gradients() -> dict[str, torch.Tensor]:
        network.train()
        with torch.autocast("cpu", torch.bfloat16):
            backbone.engine.lm_head(backbone.states(ids)).float().logsumexp(-1).sum().backward()
        found = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
        network.zero_grad()
        return found

    before = gradients()
    network.eval()
    run(backbone, ids[0])
    with adapter.adapter_off(network):
        run(backbone, ids[0])
    after = gradients()
    assert set(before) == set(after) == set(weights)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(one.abs().sum() > 0 for one in before.values())


def test_qlora_trains_and_its_adapter_decodes_over_quantised_and_whole_weights(place: tuple[str, str]) -> None:
    _, folder = place
    done = train(place, "--stage", "2", "--qlora", "train.optimizer=adamw8bit")
    assert done.exit_code == 0, done.output
    assert (Path(folder) / "adapter" / "adapter_model.safetensors").is_file()
    runner = CliRunner()
    for words in (["calibrate", "--top", "3"], ["tree", "--budget", "4"]):
        ran = runner.invoke(app, [words[0], "--run", folder, *words[1:]])
        assert ran.exit_code == 0, ran.output
    for place_words in ([], ["--load-in-4bit"]):
        said = runner.invoke(app, ["chat", "--run", folder, "--prompt", "w1", "--max-new-tokens", "8", *place_words])
        assert said.exit_code == 0, said.output
