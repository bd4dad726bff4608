"""Step times: contexts of every size, long texts, experts, and the file that keeps them."""

import json
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from medusa_cli.bench.steps import time_rows
from medusa_cli.decode import step_times
from medusa_cli.decode.step_times import measure_step_times
from medusa_cli.drafters.kinds import DRAFTERS
from medusa_cli.engine import timing
from medusa_cli.model import Backbone
from medusa_cli.tree.search import StepTimes
from tests.helpers import attach, medusa, save_network, tiny_backbone, tiny_model, tiny_tokenizer
from tests.test_drafters import drafter_of


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.quick("firp-512")
@pytest.mark.parametrize("positions", [16, 64, 128, 512])
@pytest.mark.parametrize("kind", [None, "medusa", "eagle", "firp"])
def test_steps_are_timed_in_contexts_of_every_size(kind: str | None, positions: int) -> None:
    backbone = tiny_backbone(layers=4, positions=positions)
    drafter = step_times.NullDrafter()
    if kind is not None:
        drafter = DRAFTERS[kind].create(
            backbone, 10, vocabulary="shared" if kind == "firp" else "own"
        )
    costs = measure_step_times(backbone, drafter, rounds=1, sizes=(1, 2, 3, 8, 16))
    assert sorted(costs.verify) == [1, 2, 3, 8, 16]
    assert sorted(costs.draft) == list(range(1, drafter.num_heads + 1))


@pytest.mark.quick("medusa-native")
@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("kind", [None, "medusa", "hydra-draft", "eagle", "firp"])
def test_steps_are_timed_after_a_long_text_too(
    kind: str | None, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = tiny_backbone(layers=4, positions=4096, engine=engine)
    drafter = step_times.NullDrafter() if kind is None else drafter_of(backbone, kind)
    lengths: set[int] = set()
    forward = type(backbone.engine).forward

    def watch(self: Any, plan: Any, cache: Any) -> Any:
        lengths.update(cache.lengths)
        return forward(self, plan, cache)

    monkeypatch.setattr(type(backbone.engine), "forward", watch)
    costs = measure_step_times(backbone, drafter, rounds=1, sizes=(1, 2))
    assert costs.longer is not None
    assert costs.longer.context > 3500
    assert max(lengths) > 3500
    assert sorted(costs.longer.verify) == [1, 2]
    assert not lengths & set(range(300 + 64, 3500))  # the tokens between are not run
    assert costs.step(2, 1, length=2000) >= costs.step(2, 1)
    monkeypatch.setattr(step_times, "free_memory", lambda device: 0)
    assert measure_step_times(backbone, drafter, rounds=1, sizes=(1, 2)).longer is None


def test_each_sequence_of_a_batch_attends_to_its_own_text() -> None:
    longer = StepTimes({1: 5.0, 2: 8.0}, {1: 0.7}, 1000)
    times = StepTimes({1: 1.0, 2: 1.5, 4: 2.0}, {1: 0.2}, 200, longer)
    assert times.step(2, 1) == times.step(2, 1, length=200) == pytest.approx(1.7)
    assert times.step(2, 1, length=1000) == pytest.approx(8.7)
    assert times.step(2, 1, 2, 600) == pytest.approx(2.2 + 2 * 0.5 * 7.0)


@pytest.mark.slow
def test_timed_rows_of_a_mixture_choose_different_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over the same token in each row reads the weights of few experts."""
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=16,
        num_experts_per_tok=2, max_position_embeddings=512, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    backbone = Backbone(MixtralForCausalLM(config).eval(), tiny_tokenizer())
    attach(backbone)
    chosen: dict[int, list[int]] = {}

    def watch(module: Any, given: Any, out: Any) -> None:
        indices = out[2] if isinstance(out, tuple) else out.topk(2).indices
        chosen.setdefault(len(indices), []).append(len(indices.unique()))

    for module in backbone.model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(watch)
    measure_step_times(backbone, step_times.NullDrafter(), context=20, rounds=1, sizes=(1, 8))
    time_rows(backbone, (1, 12), context=20, rounds=1)
    assert set(chosen[1]) == {2}
    assert min(chosen[8]) > 4
    assert min(chosen[12]) > 5


def test_times_are_those_of_one_build_of_the_library_and_one_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of times names everything on which they depend, but no model's name."""
    config = tiny_model().config
    key = timing.machine_key(config)
    for name, value in (
        ("head_dim", 16), ("num_key_value_heads", 4), ("hidden_act", "gelu"), ("attention_bias", True)
    ):  # fmt: skip
        other = tiny_model().config
        setattr(other, name, value)
        assert timing.machine_key(other) != key
    config._name_or_path = "elsewhere"
    assert timing.machine_key(config) == key
    (tmp_path / "lib.so").write_bytes(b"another build")
    monkeypatch.setattr(timing, "LIBRARY", tmp_path / "lib.so")
    assert timing.machine_key(config) != key


def test_processes_that_keep_times_at_once_lose_none(own_home: Path) -> None:
    def keep(process: int) -> None:
        for number in range(20):
            timing.keep_timings(f"{process}-{number}", {"verify": {}})

    processes = [get_context("fork").Process(target=keep, args=(i,)) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(json.loads((own_home / "timings.json").read_text())) == 60


@pytest.mark.quick("128")
@pytest.mark.parametrize("positions", [16, 64, 128, 256])
def test_machine_times_models_of_every_context_by_default(positions: int, tmp_path: Path) -> None:
    model = save_network(tiny_model(positions=positions), tmp_path / "small")
    document = json.loads(medusa("machine", "--model", model, "--json").stdout)
    assert list(document["contexts"]) == [str(positions - 3)]
    assert "random" in document["tokens"]
    wrong = medusa("machine", "--model", model, "--context", positions, exit_code=2)
    assert "--context" in wrong.stderr
    assert str(positions - 3) in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("positions", [32, 128])
def test_chat_runs_on_a_small_context(positions: int, tmp_path: Path, own_home: Path) -> None:
    model = save_network(tiny_model(positions=positions), tmp_path / "small")
    medusa("chat", "--model", model, "--prompt", "w1", "--max-new-tokens", "4")
