"""Fuzzing the program: valid files changed byte by byte and value by value, and flags of any value.

Every case must end in a result, or in an error of a few lines with exit code 1 or 2, within seconds and within a bound
on memory. `tests/test_fuzz.py` runs a few of each kind, `python -m tests.fuzz` (make fuzz) as many as fit a time.
"""

import contextlib
import copy
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.main import get_command

from medusa_cli.cli import app
from medusa_cli.export.folder import find_source
from medusa_cli.export.medusa_format import export_medusa
from medusa_cli.model import lora as adapter
from medusa_cli.model.load import load_network
from medusa_cli.runs.resolve import LoadOptions
from tests.helpers import medusa, save_model, save_questions, save_run

# A case takes a fraction of a second: bounds on what it computes, and on what it waits for on a busy machine.
SECONDS, WAITED = 20, 300
MEMORY = 2 << 30
MOST_LINES = 5
WIDTH = 120
SHORT = ("--dtype", "fp32", "--max-new-tokens", "3")
CHAT = ("chat", "--run", "{run}", *SHORT, "--prompt", "w1 w2", "--json", "--tree", "static")
JOINT = ("chat", "--run", "{joint}", *SHORT, "--baseline", "--prompt", "w1", "--json")
DYNAMIC = (*CHAT, "--tree", "dynamic:6")
TREE = ("tree", "--run", "{run}", "--budget", "4", "--json")
SIZE = ("drafter.draft_vocab_size=20",)
BRIEF = ("train.max_tokens=32", "train.batch_tokens=16", "drafter.num_heads=3")
TRAIN = ("train", "--run", "{run}", "--dtype", "fp32", "--quiet", *BRIEF, "drafter.vocabulary=draft", *SIZE)
RECIPE = ("train", "{run}/recipe.yaml", "--run", "{run}", "--dtype", "fp32", "--quiet")
SEEDS = ("--model", "{home}/model", "--seed", "{home}/seeds.json", "--max-turns", "1", "--batch-size", "2")
DISTILL = ("distill", "--run", "{run}", *SHORT, *SEEDS)
PLAIN = ("chat", "--model", "{home}/model", *SHORT, "--baseline", "--prompt", "w1", "--json")
IMPORT = ("import", "{home}/theirs", "--run", "{home}/new/", "--model", "{home}/model", "--json")
EXPORT = ("export", "--run", "{run}/", "--output", "{home}/out", "--to", "medusa", "--json")
REPORT = ("report", "{run}/bench/one.json", "--json")
SERVE = ("serve", "--run", "{run}/", "--port", "0", "--dtype", "fp32", "--tree", "static")
BENCH = ("bench", "--run", "{run}", "--questions", "{home}/questions.jsonl", *SHORT, "--methods", "ar", "--limit", "1")
MERGE = ("merge", "{run}/", "--run", "{home}/merged/", "--json")
DOCTOR = ("doctor", "--run", "{run}", "--quick", "--dtype", "fp32")

# Every file that the program reads, and a command that reads it.
FILES: dict[str, tuple[str, ...]] = {
    "run/run.json": CHAT,
    "run/drafter/config.json": CHAT,
    "run/drafter/medusa_lm_head.safetensors": CHAT,
    "run/tree.json": CHAT,
    "run/calibration.json": TREE,
    "run/calibration.json ": DYNAMIC,
    "run/recipe.yaml": RECIPE,
    "run/distill.jsonl": TRAIN,
    "run/distill.jsonl ": DISTILL,
    "run/states.bin": TRAIN,
    "run/distill.jsonl   ": MERGE,
    "run/states.bin ": MERGE,
    "run/distill.json": DISTILL,
    "run/distill.json ": MERGE,
    "run/train.jsonl": ("compare", "{run}", "--json"),
    "run/train.jsonl ": DOCTOR,
    "run/distill.jsonl  ": DOCTOR,
    "run/checkpoint.pt": (*TRAIN, "--resume"),
    "cache/timings.json": (*CHAT, "--tree", "auto"),
    "cache/timings.json ": ("chat", "--model", "{home}/shards", *PLAIN[5:]),
    "joint/adapter/adapter_config.json": JOINT,
    "joint/adapter/adapter_model.safetensors": JOINT,
    "run/bench/one.json": REPORT,
    "theirs/config.json": IMPORT,
    "theirs/medusa_lm_head.safetensors": IMPORT,
    "heads.pt": ("import", "{home}/heads.pt", *IMPORT[2:]),
    "model/chat_template.jinja": PLAIN,
    "model/config.json": CHAT,
    "model/generation_config.json": CHAT,
    "model/tokenizer.json": CHAT,
    "model/tokenizer_config.json": CHAT,
    "model/model.safetensors": CHAT,
    "shards/model.safetensors.index.json": ("chat", "--model", "{home}/shards", *PLAIN[3:]),
    "seeds.json": DISTILL,
    "questions.jsonl": BENCH,
}
# Commands whose flags are tried, each with words that make it end soon. Elsewhere data is fetched or minutes pass.
COMMANDS: dict[str, tuple[str, ...]] = {
    "chat": CHAT,
    "tree": TREE,
    "train": TRAIN,
    "distill": DISTILL,
    "bench": BENCH,
    "calibrate": ("calibrate", "--run", "{run}", "--dtype", "fp32"),
    "compare": ("compare", "{run}"),
    "doctor": DOCTOR,
    "import": IMPORT,
    "merge": MERGE,
    "export": EXPORT,
    "report": REPORT,
    "serve": SERVE,
}
# These would leave the machine, wait for other machines, ask for one that is not here, or show tracebacks.
LEFT_OUT = {"--endpoint", "--judge", "--host", "--device", "--quantize", "--gguf"}
LEFT_OUT |= {"--help", "--debug"}

# What json.dumps does not write is put in by _dump.
DEEP, LONG = "\0deep", "\0long"
NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.5, 1e-300, 1e300, 2**31, 2**63, -(2**63), 10**12, 10**30, LONG),
    *(
        "",
        "x",
        "1",
        "-1",
        "²",
        "\x00",
        "\x1b]0;x\x07",
        "\ud800",
        "é" * 300,
        "x" * 100_000,
        "/etc/passwd",
        "../..",
        "{%",
    ),
    *([], {}, [[]], [None], [0], [-1], [[0], [0]], {"": 0}, {"id": []}, list(range(2000)), DEEP),
    *(float("nan"), float("inf")),
]
WORDS = [
    *("", " ", "x", "0", "1", "-1", "2.5", "1e-300", "1e300", "nan", "inf", "²", "9" * 40, "9" * 5000, "auto", "all"),
    *(
        "a=b",
        "1,2",
        ",",
        "1,,2",
        "/",
        ".",
        "..",
        "/dev/null",
        "/dev/full",
        "/nowhere/x",
        "~",
        "{home}",
        "{run}",
        "{run}/tree.json",
    ),
    *(
        "\x1b[2J",
        "é",
        "\udcff",
        "x" * 5000,
        "dynamic",
        "dynamic:0",
        "dynamic:²",
        "static:9",
        "greedy",
        "exact",
        "typical",
    ),
    *("medusa", "ar", "hf", "--", "train.lr=[", "drafter=hydra", "train.stage=2", "{run}/distill.jsonl", "{run}/pipe"),
]


@dataclass(frozen=True)
class Case:
    """A command, and the file that was changed before it ran, with its new content."""

    words: tuple[str, ...]
    name: str = ""
    data: bytes = b""

    def __repr__(self) -> str:
        shown = self.data if len(self.data) < 600 else self.data[:300] + b" ... " + self.data[-300:]
        return (
            f"{self.name.strip()} = {shown!r}; medusa {' '.join(self.words)!a}"
            if self.name
            else f"medusa {self.words!a}"
        )


class Ground:
    """A folder with a tiny model and runs in it, made once, and put back as it was before every case."""

    def __init__(self, folder: Path) -> None:
        self.home, self._whole, self.count = folder / "home", folder / "whole", 0
        self.home.mkdir()
        os.environ["MEDUSA_HOME"] = str(self.home / "cache")
        model = save_model(self.home / "model")
        shutil.copytree(model, self.home / "shards")
        (self.home / "shards" / "model.safetensors").unlink()
        load_network(model, LoadOptions(dtype="bf16"))[0].save_pretrained(self.home / "shards", max_shard_size="20KB")
        run = save_run(self.home / "run", model, calibrated=True)
        shutil.copytree(run.drafter_dir, Path(save_run(self.home / "joint", model).path) / "kept")
        network, _ = load_network(model, LoadOptions(dtype="fp32"))
        adapter.attach(network, rank=2, alpha=4.0, dropout=0.0)
        adapter.save(network, self.home / "joint" / "adapter", model)
        seeds = [{"id": f"s{n}", "messages": [{"role": "user", "content": f"w{n} w{n + 1}"}]} for n in range(6)]
        (self.home / "seeds.json").write_text("".join(json.dumps(one) + "\n" for one in seeds))
        save_questions(self.home / "questions.jsonl")
        export_medusa(find_source(f"{run.path}/"), self.home / "theirs")
        torch.save(load_file(self.home / "theirs" / "medusa_lm_head.safetensors"), self.home / "heads.pt")
        # However busy the machine is, what it takes is kept.
        with patch("medusa_cli.engine.autotune.UNDISTURBED", 0.0):
            for words in (DISTILL, TRAIN, FILES["cache/timings.json"], FILES["cache/timings.json "], BENCH):
                done = medusa(*self.filled(words))
                assert done.exit_code == 0, done.output
        max(run.bench_dir.glob("*.json")).rename(run.bench_dir / "one.json")
        shutil.copytree(self.home, self._whole)

    def filled(self, words: tuple[str, ...]) -> list[str]:
        """Words with the folder's own paths in them."""
        places = {"home": self.home, "run": self.home / "run", "joint": self.home / "joint"}
        found = []
        for word in words:
            for name, place in places.items():
                word = word.replace("{" + name + "}", str(place))
            found.append(word)
        return found

    def original(self, name: str) -> bytes:
        return (self._whole / name.strip()).read_bytes()

    def check(self, case: Case) -> None:
        """Run a case; AssertionError where it does not end as it must."""
        self.count += 1
        shutil.rmtree(self.home)
        shutil.copytree(self._whole, self.home, symlinks=True)
        os.mkfifo(self.home / "run" / "pipe")
        if case.name:
            (self.home / case.name.strip()).write_bytes(case.data)
        # A server would wait for requests.
        with limits(), patch("medusa_cli.serve.server.Server.run"):
            done = medusa(*self.filled(case.words))
        said = done.stderr
        assert isinstance(done.exception, SystemExit | type(None)), f"{done.exception!r}\n{case!r}"
        assert "internal error" not in said and "Traceback" not in said, f"{said}\n{case!r}"
        assert done.exit_code in (0, 1, 2), f"exit code {done.exit_code}\n{said}\n{case!r}"
        if done.exit_code:
            message = said[said.rfind("error: ") :] if "error: " in said else said
            assert message.strip(), f"exit code {done.exit_code} without a word\n{case!r}"
            lines = sum(1 + len(line) // WIDTH for line in message.strip().splitlines())
            assert lines <= MOST_LINES + 1, f"{lines} lines:\n{message}\n{case!r}"


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Bound the time and the memory of what runs inside."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError(f"it takes longer than {SECONDS} s, or waits for {WAITED} s")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    timers = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WAITED))
    before = [signal.signal(number, late) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def cases(ground: Ground, name: str) -> st.SearchStrategy[Case]:
    """Changes of a file, or values for the flags of a command."""
    if name in COMMANDS:
        return flags(name).map(lambda more: Case((*COMMANDS[name], *more)))
    whole = ground.original(name)
    ways = [changed_bytes(whole)]
    if name.strip().endswith((".json", ".jsonl")):
        ways += [changed_values(whole)] * 2
    elif name.endswith(".yaml"):
        ways += [changed_recipe(whole)] * 2
    elif name.endswith(".safetensors"):
        ways += [changed_tensors(whole)] * 2
    elif name.endswith("checkpoint.pt"):
        ways += [changed_checkpoint(ground)]
    return st.one_of(ways).map(lambda data: Case(FILES[name], name, data))


@st.composite
def changed_bytes(draw: Callable[..., Any], whole: bytes) -> bytes:
    """A file with some bytes changed, cut out, doubled or put in, most often near its beginning or its end."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        near = st.integers(0, min(len(data), 400))
        at = draw(st.one_of(near, near.map(lambda back: len(data) - back), st.integers(0, len(data))))
        end = min(len(data), at + draw(st.sampled_from((1, 1, 2, 8, 64, len(data)))))
        way = draw(st.sampled_from(("set", "cut", "double", "insert")))
        if way == "set" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif way == "cut":
            del data[at:end]
        elif way == "double":
            data[at:at] = data[at:end]
        else:
            data[at:at] = draw(
                st.sampled_from((b"\xff", b"\x00", b"[", b"{", b'"', b"-", b"9" * 30, b"e9", b"null", b"\n"))
            )
    return bytes(data)


@st.composite
def changed_values(draw: Callable[..., Any], whole: bytes) -> bytes:
    """JSON, or a line of JSONL, with a value replaced, a key left out, or a key twice."""
    lines = [whole] if not whole.startswith(b"{") or b"\n" in whole.strip()[:3] else whole.split(b"\n")
    number = draw(st.integers(0, len(lines) - 1))
    if not lines[number].strip():
        number = 0
    document = json.loads(lines[number])
    for _ in range(draw(st.integers(1, 2))):
        document = _put(draw, document)
    lines[number] = _dump(document)
    if draw(st.integers(0, 9)) == 0:
        lines[number] = lines[number].replace(b"{", b'{"id": 1, "id": 2, ', 1)
    return b"\n".join(lines)


def _put(draw: Callable[..., Any], document: Any) -> Any:
    """A document with one of its values changed."""
    paths = list(_paths(document))
    path = draw(st.sampled_from(paths))
    value = copy.deepcopy(draw(st.sampled_from(NASTY)))  # one that is changed itself would be another from then on
    if not path:
        return value
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    if isinstance(parent, dict) and draw(st.integers(0, 4)) == 0:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return document


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a document are; of a long list, the first few and the last."""
    yield path
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _paths(one, (*path, key))
    elif isinstance(value, list):
        for place in {*range(min(len(value), 3)), *range(max(0, len(value) - 1), len(value))}:
            yield from _paths(value[place], (*path, place))


def _dump(document: Any) -> bytes:
    text = json.dumps(document, indent=None)
    return text.replace(json.dumps(DEEP), "[" * 3000 + "]" * 3000).replace(json.dumps(LONG), "9" * 5000).encode()


@st.composite
def changed_recipe(draw: Callable[..., Any], whole: bytes) -> bytes:
    """YAML with the value of a key replaced, or a line doubled."""
    lines = whole.decode().split("\n")
    keyed = [place for place, line in enumerate(lines) if ":" in line]
    place = draw(st.sampled_from(keyed))
    head = lines[place].partition(":")[0]
    words = (
        "2020-01-01",
        "&a [*a, *a]",
        "*a",
        "!!python/name:os.system",
        "{a: 1, a: 2}",
        "0x" + "f" * 5000,
        ".inf",
        "1e-3",
    )
    value = draw(st.one_of(st.sampled_from(words), st.sampled_from(NASTY).map(lambda one: _dump(one).decode())))
    lines[place] = f"{head}: {value}"
    if draw(st.integers(0, 5)) == 0:
        lines.insert(place, lines[place])
    return "\n".join(lines).encode("utf-8", "surrogatepass")


@st.composite
def changed_tensors(draw: Callable[..., Any], whole: bytes) -> bytes:
    """Weights with a tensor of other numbers, another type or shape, or another name."""
    from safetensors.torch import load, save

    tensors = load(whole)
    name = draw(st.sampled_from(sorted(tensors)))
    one = tensors.pop(name)
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(lambda x: x * float("nan"), lambda x: x * float("inf"), lambda x: x * 1e30, lambda x: x * 0, lambda x: -x),
        *(lambda x: x.to(torch.int8), lambda x: x.bool(), lambda x: x.double(), lambda x: x.long()),
        *(lambda x: x[:1], lambda x: x[..., :0], lambda x: x.flatten(), lambda x: x[None], lambda x: x[::2]),
    ]
    made = draw(st.sampled_from(ways))(one.float()).contiguous()
    where = draw(st.sampled_from((name, name, name, "other", "")))
    return save({**tensors, where: made} if where else tensors, {"format": "pt"})


@st.composite
def changed_checkpoint(draw: Callable[..., Any], ground: Ground) -> bytes:
    """A checkpoint with a value replaced."""
    import io

    found = torch.load(io.BytesIO(ground.original("run/checkpoint.pt")), weights_only=True)
    value = draw(st.sampled_from([one for one in NASTY if one != DEEP]))
    key = draw(st.sampled_from(sorted(found)))
    inner = found[key]
    if isinstance(inner, dict) and inner and draw(st.booleans()):
        inner[draw(st.sampled_from(sorted(inner)))] = value
    else:
        found[key] = value
    out = io.BytesIO()
    torch.save(found, out)
    return out.getvalue()


def flags(command: str) -> st.SearchStrategy[tuple[str, ...]]:
    """One to three flags of a command with any word for a value."""
    known = get_command(app).commands[command]  # type: ignore[attr-defined]
    plain, valued = [], []
    for one in known.params:
        names = [name for name in getattr(one, "opts", ()) if name.startswith("--") and name not in LEFT_OUT]
        if one.param_type_name == "option" and names:
            (plain if one.is_flag else valued).append(names[0])
    word = st.one_of(st.sampled_from(WORDS), st.integers(-3, 70).map(str), st.text(max_size=8))
    pair = st.tuples(st.sampled_from(sorted(valued)), word)
    single = st.sampled_from(sorted(plain)).map(lambda name: (name,))
    argument = word.map(lambda one: (one,))
    return st.lists(st.one_of(pair, pair, pair, single, argument), min_size=1, max_size=3).map(
        lambda chosen: tuple(word for words in chosen for word in words)
    )
