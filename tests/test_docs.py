"""Checks the documents: their code runs, links resolve, named files, functions and targets exist."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from medusa_cli import cli
from medusa_cli.files.catalogue import DEFAULT_MODEL
from medusa_cli.runs.run import Run
from tests import helppage, recipepage

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = set(
    re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
)

MODEL = "my-org/my-model"  # of the examples; a tiny one here
# Commands that are parsed and not run, by what they contain, and why.
PARSED_ONLY = {
    "medusa serve": "it serves until it is stopped; tests/serving.py runs servers",
    "medusa tune": "it runs for the time that it is given; test_tune.py tunes",
    "--endpoint": "it asks a server; test_endpoint.py has one",
    "--judge": "it asks a server; test_bench.py has one",
    "nvidia/SPEED-Bench": "it fetches a data set from the hub",
    "openai/gsm8k": "it fetches a data set from the hub",
    "openai/openai_humaneval": "it fetches a data set from the hub",
    "my-org/my-drafter": "it needs the hub; test_hub.py has a stand-in",
    "random:1b": "a random model of this size takes minutes",
    "llama.cpp": "it needs xllamacpp",
    "--peer": "it asks servers; test_bench.py has some",
    "qlora": "it needs a GPU, or minutes",
    "--logger": "it needs the logger's package",
    "--sweep": "a sweep takes a bench a point; test_bench.py runs each axis",
    "smollm2-135m-hydra": "a training of hours, whose steps need each other",
    "static:64": "the tiny heads allow 40 nodes",
    "vicuna.jinja": "the tiny tokenizer does not bring its texts back",
    "runs/smollm2/": "it follows that training",
    "medusa doctor": "it decodes with the drafter that ships; test_doctor.py runs all checks",
}
# Flags that make a command short enough for a test: of a flag given twice the last one counts.
SHORT = {
    "bench": ["--limit", "1", "--max-new-tokens", "4"],
    "chat": ["--max-new-tokens", "4"],
    "distill": ["--max-samples", "4", "--max-new-tokens", "24"],
    "train": [
        "train.max_tokens=200",
        "train.batch_tokens=100",
        "train.max_length=100",
        "drafter.vocabulary=own",
    ],
}


class Block(NamedTuple):
    """A code block of a page, by the word of its fence and the line at which it begins."""

    page: Path
    line: int
    kind: str
    code: str


def blocks_of(page: Path) -> Iterator[Block]:
    """Yields the fenced blocks of a page; a block that is only indented fails, as nothing tells what it is."""
    lines = page.read_text(encoding="utf-8").splitlines()
    opened = None
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            if opened is None:
                opened = number
            else:
                yield Block(
                    page,
                    opened,
                    lines[opened - 1].strip("` "),
                    "\n".join(lines[opened : number - 1]) + "\n",
                )
                opened = None
        elif opened is None:
            assert not line.startswith("    "), (
                f"{page.name}:{number} has a code block without a fence"
            )
    assert opened is None, f"{page.name}:{opened} is never closed"


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.kind == "sh"]
PYTHON = [block for block in BLOCKS if block.kind in ("python", "py")]
PARSERS = {"json": json.loads, "toml": tomllib.loads}
SETTINGS = [block for block in BLOCKS if block.kind in PARSERS]


def commands_of(block: Block) -> list[list[str]]:
    """Returns the words of a shell block's commands, without comments."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_each_block_is_of_a_kind_that_runs() -> None:
    assert len(SHELL) > 20
    assert len(PYTHON) > 10
    # Help texts are compared with the program's own below.
    rest = [block for block in BLOCKS if block not in (*SHELL, *PYTHON, *SETTINGS)]
    assert {block.page.name for block in rest} == {"commands.md"}


@pytest.mark.parametrize("block", SETTINGS, ids=lambda block: f"{block.page.name}:{block.line}")
def test_settings_of_other_programs_parse(block: Block) -> None:
    PARSERS[block.kind](block.code)


@pytest.mark.parametrize("block", SHELL, ids=lambda block: f"{block.page.name}:{block.line}")
def test_shell_block_parses(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=block.code, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    extras = set(
        re.findall(
            r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    for program, *words in commands_of(block):
        if program == "torchrun":
            program, *words = ("medusa", *words[words.index("medusa_cli") + 1 :])
        if program == "medusa":
            cli.load_command(words[0]).make_context(words[0], words[1:])
        elif program == "make":
            assert words[0] in TARGETS
        elif program in ("pip", "pipx", "uv"):
            assert set(re.findall(r"\w+", " ".join(re.findall(r"\[(.*?)\]", words[-1])))) <= extras
        else:
            # Of docker only what runs inside is checked.
            known = ("cat", "source", "docker", "lm_eval", "guidellm", "vllm", "until", "kill")
            assert program in known or "=" in program, f"nothing checks {program}"
            if program == "docker" and (name := next(iter({*words} & {*cli.COMMANDS}), None)):
                inside = words[words.index(name) + 1 :]
                cli.load_command(name).make_context(name, inside)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with what the pages' examples name: models, runs, questions, prompts."""
    from medusa_cli.drafters import Eagle
    from medusa_cli.model import lora
    from tests.helpers import (
        attach_adapter,
        byte_tokenizer,
        medusa,
        save_conversations,
        save_questions,
        save_run,
        tiny_model,
        write_lines,
    )
    from tests.test_gguf import write_gguf

    folder = tmp_path_factory.mktemp("docs")
    model = folder / "my-org" / "my-model"
    network = tiny_model(vocab=320, positions=2048)
    network.save_pretrained(model)
    byte_tokenizer(320).save_pretrained(model)
    for copy in (folder / "my-org" / "base-model", folder / "tuned"):
        shutil.copytree(model, copy)
    for name in ("mine", "other", "default"):
        save_run(folder / "runs" / name, str(model), calibrated=True)
        save_conversations(folder / "runs" / name)
    save_run(folder / "runs" / "eagle", str(model), kind=Eagle)
    attach_adapter(network)
    lora.save(network, folder / "lora", str(model))
    for name in ("monday", "tuesday"):
        save_conversations(folder / "runs" / name, 12)
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    turns = [{"from": "human", "value": "What is a tree?"}, {"from": "gpt", "value": "A plant."}]
    write_lines(
        folder / "prompts.jsonl", [{"id": str(i), "conversations": turns} for i in range(3)]
    )
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two and three."},
    ]
    write_lines(folder / "held-out.jsonl", [{"id": str(i), "messages": messages} for i in range(3)])
    (folder / "spec_bench").mkdir()
    save_questions(folder / "spec_bench" / "question.jsonl")
    schema = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"]}
    (folder / "person.json").write_text(json.dumps(schema))
    write_gguf(folder / "model.gguf")
    words = [
        "--questions",
        folder / "spec_bench" / "question.jsonl",
        *SHORT["bench"],
        "--methods",
        "ar,medusa",
    ]
    medusa("bench", "--run", folder / "runs" / "mine", *words)
    shutil.copytree(folder / "runs" / "mine" / "bench", folder / "runs" / "other" / "bench")
    return folder


@pytest.fixture
def place(sandbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enters a copy of the sandbox, whose model is the default one and has a drafter that ships."""
    from medusa_cli.runs import resolve

    folder = shutil.copytree(sandbox, tmp_path / "place")
    model = str(folder / "my-org" / "my-model")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(resolve, "DEFAULT_MODEL", model)
    shipped = Run(folder / "runs" / "mine")
    named = (MODEL, model, DEFAULT_MODEL)
    monkeypatch.setattr(Run, "pretrained", lambda name: shipped if name in named else None)
    monkeypatch.setattr(
        "medusa_cli.files.fetch.mt_bench_path", lambda: folder / "spec_bench" / "question.jsonl"
    )
    monkeypatch.setattr("medusa_cli.files.fetch.sharegpt_path", lambda: folder / "prompts.jsonl")
    return folder


def form_of(words: list[str]) -> tuple[str, ...]:
    """Returns a command without the values of its flags and settings."""
    names = {word.partition("=")[0] for word in words[1:] if word.startswith("-") or "=" in word}
    kinds = [word for word in words if word.startswith(("recipes/", "runs/"))]
    kinds += [words[words.index("--to") + 1]] if "--to" in words else []
    return (words[0], *sorted(names), *kinds)


def runnable() -> dict[str, list[list[str]]]:
    """Returns the commands to run by page, in order; of the commands of one form only the first."""
    chosen: dict[str, list[list[str]]] = {}
    forms = set()
    for block in SHELL:
        for words in commands_of(block):
            kept = words[0] == "cat"
            if words[0] == "medusa" and not any(part in " ".join(words) for part in PARSED_ONLY):
                kept = form_of(words[1:]) not in forms
                forms.add(form_of(words[1:]))
            if kept:
                chosen.setdefault(block.page.name, []).append(words)
    return chosen


def with_model(words: list[str]) -> list[str]:
    """Returns a command with the tiny model in the place of the default one, if it would take that."""
    name = words[0]
    run = words[words.index("--run") + 1] if "--run" in words else None
    new = name in ("bench", "chat", "demo", "distill", "export", "machine") and run is None
    new = new or (name == "train" and run is not None and not Path("runs", run).exists())
    return [*words, "--model", MODEL] if new and "--model" not in words else words


@pytest.mark.quick("README.md", "exporting.md")
@pytest.mark.parametrize("name", runnable())
def test_commands_of_a_page_run_in_order(place: Path, name: str) -> None:
    from tests.helpers import medusa

    for program, *words in runnable()[name]:
        if program == "cat":
            [*sources, _, target] = words
            Path(target).write_text("".join(Path(source).read_text() for source in sources))
            continue
        short = [] if "--dry-run" in words else SHORT.get(words[0], [])
        medusa(*with_model(words), *short, input="w1 w2\n" if words[0] == "chat" else None)


def run_python(*blocks: Block) -> dict[str, Any]:
    """Runs Python blocks in order, as one program; returns its names."""
    names: dict[str, Any] = {}
    for block in blocks:
        code = "\n" * block.line + block.code  # so that tracebacks name the line
        exec(compile(code, str(block.page), "exec"), names)
    return names


def test_python_pages_are_those_that_are_run() -> None:
    # tests/test_integrations.py runs each program of integrations.md with what it needs.
    assert {block.page.name for block in PYTHON} == {
        "README.md",
        "python.md",
        "serve.md",
        "integrations.md",
    }


@pytest.mark.slow
def test_python_of_the_readme_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = [block for block in PYTHON if block.page.name == "README.md"]
    code = block.code.replace('"qwen2.5-coder-0.5b"', repr(MODEL))
    assert code != block.code
    names = run_python(block._replace(code=code))
    assert names["text"] is not None


@pytest.mark.slow
def test_python_page_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    names = run_python(*(block for block in PYTHON if block.page.name == "python.md"))
    assert "drafter" in capsys.readouterr().out  # of the run's description
    assert names["stream"].answer.finish_reason in ("stop", "length")
    assert Path("runs/mine/drafter") == names["trained"].run.drafter_dir


@pytest.mark.slow
def test_python_of_the_server_runs(place: Path) -> None:
    pytest.importorskip("openai")
    from medusa_cli import Medusa
    from tests.serving import Served, serving

    [block] = [block for block in PYTHON if block.page.name == "serve.md"]
    with serving(Medusa.from_pretrained(dtype="fp32"), names=("qwen2.5-coder-0.5b",)) as server:
        port = Served(server.port).port
        names = run_python(block._replace(code=block.code.replace(":8000/", f":{port}/")))
    assert names["answer"].choices[0].finish_reason in ("stop", "length")


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as mkdocs and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"
    for name in re.findall(r"\brecipes/[\w.+-]+\.(?:yaml|jinja)", text):
        assert (ROOT / name).is_file(), name
    for first, second in re.findall(
        r"^make ([a-z0-9-]+)|`make ([a-z0-9-]+)[` ]", text, re.MULTILINE
    ):
        assert (first or second) in TARGETS


def test_structure_names_every_module_and_what_exists() -> None:
    text = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/[\w/]+\.py|[a-z_]+\.py)(?::(\w+))?`", text)
    modules = {
        str(path.relative_to(ROOT / "medusa_cli")) for path in (ROOT / "medusa_cli").rglob("*.py")
    }
    # Its first row on commands stands for all of them.
    expected = {
        name for name in modules if not name.startswith("commands/") and not name.endswith("__.py")
    }
    assert not expected - {path for path, _ in named}
    tables = text[: text.index("## Rules of the papers")]
    listed = re.findall(r"`([\w/]+\.(?:py|cpp|h))`", tables)
    assert len(listed) == len(set(listed)), "a module has one line"
    for path, name in named:
        tree = ast.parse((ROOT / "medusa_cli" / path).read_text(encoding="utf-8"))
        defined = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        assert not name or name in defined, f"{path} has no {name}"


def test_recipe_keys_of_the_docs_are_current() -> None:
    assert recipepage.PAGE.read_text(encoding="utf-8") == recipepage.page(), "run `make help-page`"


def test_help_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HOME", "")  # the page unsets it: put back at the end
    assert (ROOT / "docs/commands.md").read_text(encoding="utf-8") == helppage.page(), (
        "run `make help-page`"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None, reason="needs mkdocs"
)
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
