"""Python files that come with a model, tokenizer or adapter: never run without the flag, and nobody is asked."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import Result

from medusa_cli.cli import COMMANDS, load_command
from medusa_cli.distill.endpoint import Tokenizer
from medusa_cli.errors import UserError
from medusa_cli.model import lora
from tests.checkpoints import medusa_heads, write
from tests.helpers import change_json, medusa, save_model, save_run, tiny_model

FLAG = "--trust-remote-code"
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).write_text("it ran")

class OwnConfig(LlamaConfig):
    model_type = {kind!r}

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def save_with_code(folder: Path, kind: str = "own-kind", *, tokenizer: bool = False) -> str:
    """Saves a tiny Llama whose config (or tokenizer) names a Python file beside it, which writes FOLDER/ran."""
    save_model(folder)
    (folder / "own.py").write_text(CODE.format(marker=str(folder / "ran"), kind=kind))
    if tokenizer:
        own = {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}
        change_json(folder / "tokenizer_config.json", auto_map=own, tokenizer_class="OwnTokenizer")
    else:
        own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        change_json(folder / "config.json", auto_map=own, model_type=kind)
    return str(folder)


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets the folder from which transformers runs files."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    yield
    sys.path[:] = [path for path in sys.path if path != str(tmp_path / "modules")]


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Returns the file that the model's code writes."""
    return tmp_path / "model" / "ran"


def chat(model: str, *words: str, exit_code: int | None = 0) -> Result:
    common = [
        "--model",
        model,
        "--dtype",
        "fp32",
        "--baseline",
        "--prompt",
        "w1",
        "--max-new-tokens",
        "4",
    ]
    return medusa("chat", *common, *words, input="y\ny\ny\n", exit_code=exit_code)


@pytest.mark.parametrize("place", ["model", "tokenizer", "model, asked line by line"])
def test_code_is_not_run_and_no_line_of_a_chat_is_consent(
    tmp_path: Path, ran: Path, place: str
) -> None:
    model = save_with_code(tmp_path / "model", tokenizer=place == "tokenizer")
    words = ["chat", "--model", model, "--dtype", "fp32", "--baseline"]
    asking = {"input": "y\ny\ny\n", "exit_code": None}
    done = medusa(*words, **asking) if "line" in place else chat(model, exit_code=None)
    assert not ran.exists()
    assert "y/N" not in done.output
    if place != "tokenizer":  # a tokenizer's class may be known without the file
        assert done.exit_code == 1
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert FLAG in done.stderr
        assert model in done.stderr


def test_known_model_type_runs_without_the_code_beside_it(tmp_path: Path, ran: Path) -> None:
    done = chat(save_with_code(tmp_path / "model", "llama"))
    assert done.stdout.strip()
    assert not ran.exists()


def test_flag_runs_the_code_and_the_greeting_names_it(tmp_path: Path, ran: Path) -> None:
    done = chat(save_with_code(tmp_path / "model"), FLAG)
    assert ran.exists()
    assert FLAG in done.stderr.splitlines()[0]


def test_tokenizer_of_an_endpoint_is_loaded_without_its_code(tmp_path: Path, ran: Path) -> None:
    model = save_with_code(tmp_path / "model")
    with pytest.raises(UserError, match="trust_remote_code"):
        Tokenizer(model)
    assert not ran.exists()
    assert Tokenizer(model, trust_remote_code=True).hidden_size == 32
    assert ran.exists()


LOADING = {
    "machine": ("--model", "{model}", "--json"),
    "import": ("{home}/theirs", "--model", "{model}", "--run", "{home}/new"),
    "export": ("--run", "{home}/run/", "--output", "{home}/out"),
    "serve": ("--run", "{home}/run/", "--port", "0", "--dtype", "fp32", "--tree", "static"),
    "tree": ("--run", "{home}/run/", "--budget", "auto", "--measure"),
}


@pytest.mark.quick("tree", "serve")
@pytest.mark.parametrize("name", LOADING)
def test_commands_run_code_with_the_flag_alone(
    tmp_path: Path, ran: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model")
    run = save_run(tmp_path / "run", model, calibrated=True)
    for path in (run.path / "run.json", run.drafter_dir / "config.json"):
        path.write_text(path.read_text().replace('"llama"', '"own-kind"'))
    write(tmp_path / "theirs", "medusa_lm_head.pt", medusa_heads(), {})
    save_with_code(tmp_path / "model")
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(
        "medusa_cli.serve.server.Server", lambda *_: SimpleNamespace(run=lambda listener: None)
    )
    words = [name, *(word.format(model=model, home=tmp_path) for word in LOADING[name])]
    assert FLAG in medusa(*words, exit_code=1).stderr
    assert not ran.exists()
    medusa(*words, FLAG)
    assert ran.exists()


def test_every_command_that_takes_a_model_has_the_flag() -> None:
    flags = {}
    for name in COMMANDS:
        flags[name] = {flag for option in load_command(name).params for flag in option.opts}
    loading = {name for name, words in flags.items() if words & {"--model", "--drafter"}}
    assert loading >= {
        "chat",
        "bench",
        "serve",
        "machine",
        "export",
        "import",
        "train",
        "distill",
        "calibrate",
    }
    assert all(FLAG in flags[name] for name in loading), loading


def save_adapter(tmp_path: Path, **fields: Any) -> Path:
    """Saves an adapter with changed fields in its config."""
    network = tiny_model()
    lora.attach(network, rank=2, alpha=2.0, dropout=0.0)
    lora.save(network, tmp_path / "adapter", "tiny")
    change_json(tmp_path / "adapter" / "adapter_config.json", **fields)
    return tmp_path / "adapter"


def test_adapter_of_a_kind_that_names_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="PROMPT_TUNING.* at peft_type"):
        lora.merge(tiny_model(), save_adapter(tmp_path, peft_type="PROMPT_TUNING"))


def test_modules_that_an_adapter_names_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "medusa_foreign.py").write_text("raise AssertionError('foreign code ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lora.merge(
        tiny_model(),
        save_adapter(tmp_path, megatron_config={"a": 1}, megatron_core="medusa_foreign"),
    )
    assert "medusa_foreign" not in sys.modules
