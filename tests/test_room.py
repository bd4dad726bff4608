"""How many conversations `distill` decodes at once: by the memory there is, by a recipe, by a flag."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner, Result

from medusa_cli.backbone import memory
from medusa_cli.backbone.memory import free_memory
from medusa_cli.cli import app
from medusa_cli.distilling.distilled import Distilled
from medusa_cli.distilling.room import fitting
from tests.runs import save_model

VICUNA = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32)
CPU = torch.device("cpu")


def test_a_batch_of_the_papers_recipe_fits_the_memory_there_is() -> None:
    slot = 2 * 32 * 4096 * 4096 * 2  # keys and values of 4,096 positions in bf16: 2.1 GB, 137 GB for 64
    found = fitting(VICUNA, torch.bfloat16, 4096, 64 * 10**9, states_there=0)
    assert 16 <= found < 64 and found * slot < 64 * 10**9
    assert fitting(VICUNA, torch.bfloat16, 4096, 10**9, states_there=0) == 1
    assert fitting(VICUNA, torch.bfloat16, 512, 64 * 10**9, states_there=0) == 64
    few = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    assert fitting(few, torch.bfloat16, 4096, 30 * 10**9, states_there=0) > 30
    states = fitting(few, torch.bfloat16, 4096, 30 * 10**9, states_there=1)
    assert states < fitting(few, torch.bfloat16, 4096, 30 * 10**9, states_there=0)
    assert fitting(few, torch.bfloat16, 4096, 30 * 10**9, states_there=4) < states  # and those of three layers more


def test_free_memory_is_the_systems_or_what_the_container_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2**20 < free_memory(CPU) < 2**50
    system = tmp_path / "meminfo"
    system.write_text("MemTotal:       4000 kB\nMemAvailable:   3000 kB\nHugePages_Total:    0\n")
    monkeypatch.setattr(memory, "_SYSTEM", system)
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    assert free_memory(CPU) == 3000 * 1024
    (tmp_path / "memory.current").write_text("1500000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 250000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(CPU) == 3000 * 1024
    (tmp_path / "memory.max").write_text("2000000\n")
    assert free_memory(CPU) == 750000


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that the engine is run with, where free memory holds five conversations of 64 positions."""
    found: list[int] = []

    def distill(backbone: Any, seeds: Any, settings: Any, **watch: Any) -> Any:
        found.append(settings.batch_size)
        return iter([Distilled("a", [], [1, 2], [(1, 2)], torch.empty(0, 0))])

    slot = (2 * 2 * 2 * 8 + 32) * 4 * 64  # of the tiny model in fp32, its states included
    monkeypatch.setattr("medusa_cli.distilling.distill", distill)
    monkeypatch.setattr("medusa_cli.distilling.room.free_memory", lambda device: int(5.5 * slot / 0.7))
    return found


def test_a_flag_goes_before_the_recipe_and_that_before_the_memory(tmp_path: Path, batches: list[int]) -> None:
    model = save_model(tmp_path / "model")
    seeds, recipe = tmp_path / "seeds.jsonl", tmp_path / "recipe.yaml"
    seeds.write_text(json.dumps({"messages": [{"role": "user", "content": "w1 w2"}]}) + "\n")
    recipe.write_text(f"model: {model}\ndistill: {{batch_size: 7}}\n")

    def distil(*words: str) -> Result:
        common = ["--run", str(tmp_path / "run"), "--seed", str(seeds), "--dtype", "fp32", "--context", "64"]
        done = CliRunner().invoke(app, ["distill", *common, "--max-new-tokens", "4", *words])
        assert done.exit_code == 0, done.output
        return done

    said = distil("--model", model).stderr
    assert batches == [5] and "5 conversations at a time" in said and "--batch-size N" in said
    assert "at a time" not in distil("--recipe", str(recipe)).stderr
    distil("--recipe", str(recipe), "--batch-size", "3")
    assert batches == [5, 7, 3]
