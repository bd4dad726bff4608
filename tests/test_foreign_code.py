"""Python files that come with a model, a tokenizer or an adapter: never run, never asked about, but with the flag."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import Result

from medusa_cli.cli import COMMANDS, app
from medusa_cli.distill.endpoint import Tokenizer
from medusa_cli.errors import UserError
from medusa_cli.model import lora as adapter
from tests.checkpoints import medusa_heads, write
from tests.helpers import medusa, save_model, save_run, tiny_model

PACKAGE = Path(__file__).parent.parent / "medusa_cli"
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


def booby_trapped(folder: Path, kind: str, *, tokenizer: bool = False) -> str:
    """A tiny Llama whose config (or tokenizer) names a Python file beside it, which leaves FOLDER/ran behind."""
    save_model(folder)
    (folder / "own.py").write_text(CODE.format(marker=str(folder / "ran"), kind=kind))
    name = "tokenizer_config.json" if tokenizer else "config.json"
    config = json.loads((folder / name).read_text())
    own = {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]} if tokenizer else None
    config["auto_map"] = own or {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    if tokenizer:
        config["tokenizer_class"] = "OwnTokenizer"
    else:
        config["model_type"] = kind
    (folder / name).write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where transformers copies the files that it runs to."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield
    sys.path[:] = [one for one in sys.path if one != str(tmp_path / "modules")]


def ask(model: str, *words: str, input: str = "y\ny\ny\n") -> Result:
    common = ["--model", model, "--dtype", "fp32", "--baseline", "--prompt", "w1", "--max-new-tokens", "4"]
    return medusa("chat", *common, *words, input=input)


@pytest.mark.parametrize("tokenizer", [False, True], ids=["model", "tokenizer"])
def test_a_models_own_code_is_not_run_and_nobody_is_asked(tmp_path: Path, tokenizer: bool) -> None:
    model = booby_trapped(tmp_path / "model", "own-kind", tokenizer=tokenizer)
    shown = ask(model)
    assert not (tmp_path / "model" / "ran").exists()
    assert shown.stdout == "" or tokenizer  # a tokenizer's class may be known without the file
    assert "y/N" not in shown.output
    if not tokenizer:
        assert shown.exit_code == 1 and shown.stderr.count("\n") == 1
        assert "--trust-remote-code" in shown.stderr and model in shown.stderr


def test_a_known_kind_runs_without_the_code_that_comes_with_it(tmp_path: Path) -> None:
    shown = ask(booby_trapped(tmp_path / "model", "llama"))
    assert shown.exit_code == 0 and shown.stdout.strip()
    assert not (tmp_path / "model" / "ran").exists()


def test_a_chats_first_line_is_no_consent(tmp_path: Path) -> None:
    model = booby_trapped(tmp_path / "model", "own-kind")
    words = [sys.executable, "-m", "medusa_cli", "chat", "--model", model, "--baseline", "--dtype", "fp32"]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(words, input="y\ny\ny\n", capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stdout == ""
    assert "--trust-remote-code" in done.stderr and not (tmp_path / "model" / "ran").exists()


def test_the_flag_runs_it_and_the_greeting_says_so(tmp_path: Path) -> None:
    model = booby_trapped(tmp_path / "model", "own-kind")
    shown = ask(model, "--trust-remote-code")
    assert (tmp_path / "model" / "ran").exists(), shown.output
    greeting = shown.stderr.splitlines()[0]
    assert shown.exit_code == 0 and model in greeting and "its own code trusted (--trust-remote-code)" in greeting


def test_a_servers_tokenizer_is_loaded_without_its_code(tmp_path: Path) -> None:
    model = booby_trapped(tmp_path / "model", "own-kind")
    with pytest.raises(UserError, match="trust_remote_code"):
        Tokenizer(model)
    assert not (tmp_path / "model" / "ran").exists()
    assert Tokenizer(model, trust_remote_code=True).hidden_size == 32
    assert (tmp_path / "model" / "ran").exists()


LOADING = {
    "machine": ("--model", "{model}", "--json"),
    "import": ("{home}/theirs", "--model", "{model}", "--run", "{home}/new"),
    "export": ("--run", "{home}/run/", "--output", "{home}/out"),
    "serve": ("--run", "{home}/run/", "--port", "0", "--dtype", "fp32", "--tree", "static"),
    "tree": ("--run", "{home}/run/", "--budget", "auto", "--measure"),
}


@pytest.mark.parametrize("name", LOADING)
def test_a_command_runs_a_models_code_with_the_flag_alone(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model")
    run = save_run(tmp_path / "run", model, calibrated=True)
    for path in (run.path / "run.json", run.drafter_dir / "config.json"):
        path.write_text(path.read_text().replace('"llama"', '"own-kind"'))
    write(tmp_path / "theirs", "medusa_lm_head.pt", medusa_heads(), {})
    booby_trapped(tmp_path / "model", "own-kind")
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("medusa_cli.serve.server.Server", lambda *_: SimpleNamespace(run=lambda listener: None))
    words = [name, *(word.format(model=model, home=tmp_path) for word in LOADING[name])]
    done = medusa(*words)
    assert done.exit_code == 1 and "--trust-remote-code" in done.stderr, done.output
    assert not (tmp_path / "model" / "ran").exists()
    done = medusa(*words, "--trust-remote-code")
    assert done.exit_code == 0, (done.exception, done.output)
    assert (tmp_path / "model" / "ran").exists()


def test_every_command_that_takes_a_model_has_the_flag() -> None:
    names = {}
    for name in COMMANDS:
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
        names[name] = {word for one in command.params for word in one.opts}
    loading = {name for name, words in names.items() if words & {"--model", "--drafter"}}
    assert loading >= {"chat", "bench", "serve", "machine", "export", "import", "train", "distill", "calibrate"}
    assert all("--trust-remote-code" in names[name] for name in loading), loading


def changed_adapter(tmp_path: Path, change: dict[str, Any]) -> Path:
    network = tiny_model()
    adapter.attach(network, rank=2, alpha=2.0, dropout=0.0)
    adapter.save(network, tmp_path / "adapter", "tiny")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return tmp_path / "adapter"


def test_an_adapter_of_a_kind_that_names_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="PROMPT_TUNING.* at peft_type"):
        adapter.merge(tiny_model(), changed_adapter(tmp_path, {"peft_type": "PROMPT_TUNING"}))


def test_modules_that_an_adapter_names_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "medusa_foreign.py").write_text("raise AssertionError('foreign code ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = changed_adapter(tmp_path, {"megatron_config": {"a": 1}, "megatron_core": "medusa_foreign"})
    adapter.merge(tiny_model(), folder)
    assert "medusa_foreign" not in sys.modules


def loads(tree: ast.AST) -> Iterator[ast.Call]:
    """Every call by which transformers or datasets load what somebody else made."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "datasets"]
    theirs = {alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in theirs or re.fullmatch(r"Auto\w+\.from_\w+", name):
                yield node


def test_every_load_says_whether_it_trusts() -> None:
    found = {path: list(loads(ast.parse(path.read_text(encoding="utf-8")))) for path in PACKAGE.rglob("*.py")}
    assert sum(map(len, found.values())) >= 8
    for path, calls in found.items():
        for call in calls:
            assert "trust_remote_code" in {word.arg for word in call.keywords}, f"{path.name}:{call.lineno}"


def test_nothing_is_unpickled() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("weights_only") == "True", f"{path.name}:{node.lineno}"
            if isinstance(node, ast.Call):
                module, _, name = ast.unparse(node.func).rpartition(".")
                unpickles = module in {"pickle", "dill", "joblib", "shelve", "marshal"} and name in {"load", "loads"}
                assert not unpickles and name != "Unpickler", f"{path.name}:{node.lineno}"
