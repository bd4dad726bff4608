"""Fuzzing, `make fuzz`: valid files changed byte by byte and value by value, and flags of any value.

Every case must end in a result, or in an error of a few lines with exit code 1 or 2, within bounds on time and memory.
`tests/test_fuzz.py` runs a few cases of each kind, `python -m tests.fuzz` as many as fit a time.
"""

import argparse
import contextlib
import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition
from safetensors.torch import load, load_file, save

from medusa_cli.cli import load_command
from medusa_cli.export.folder import find_source
from medusa_cli.export.medusa_format import export_medusa
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import lora as adapter
from medusa_cli.model.load import load_network
from medusa_cli.runs.load_options import LoadOptions
from tests.helpers import medusa, save_model, save_questions, save_run

# A case takes a fraction of a second: bounds on processor time, and on the clock of a busy machine.
SECONDS, WAITED = 20, 300
MEMORY = 2 << 30
MAX_LINES, WIDTH = 6, 120
BLOCK = 12  # cases of one kind in a row
EVERYTHING = list(HealthCheck)

SHORT = "--dtype fp32 --max-new-tokens 3"
CHAT = f"chat --run {{run}} {SHORT} --prompt w1 --json --tree static"
JOINT = f"chat --run {{joint}} {SHORT} --baseline --prompt w1 --json"
PLAIN = f"{SHORT} --baseline --prompt w1 --json"
TREE = "tree --run {run} --budget 4 --json"
TRAIN = "train --run {run} --dtype fp32 --quiet train.max_tokens=32 train.batch_tokens=16 drafter.num_heads=3"
TRAIN += " drafter.vocabulary=draft drafter.draft_vocab_size=20"
DISTILL = (
    f"distill --run {{run}} {SHORT} --model {{home}}/model --seed {{home}}/seeds.json"
    " distill.max_turns=1 distill.batch_size=2"
)
IMPORT = "--run {home}/new/ --model {home}/model --json"
BENCH = f"bench --run {{run}} --questions {{home}}/questions.jsonl {SHORT} --methods ar --limit 1"
DOCTOR = "doctor --run {run} --quick --dtype fp32"
REPORT = "report {run}/bench/one.json --json"
SHARDS = f"chat --model {{home}}/shards {PLAIN}"
# Every file that the program reads, and commands that read it.
FILES: dict[str, tuple[str, ...]] = {
    "run/run.json": (CHAT,),
    "run/drafter/config.json": (CHAT,),
    "run/drafter/medusa_lm_head.safetensors": (CHAT,),
    "run/tree.json": (CHAT,),
    "run/calibration.json": (TREE, f"{CHAT} --tree dynamic:6"),
    "run/recipe.yaml": ("train {run}/recipe.yaml --run {run} --dtype fp32 --quiet",),
    "run/distill.jsonl": (TRAIN, DISTILL, DOCTOR),
    "run/states.bin": (TRAIN,),
    "run/distill.json": (DISTILL,),
    "run/train.jsonl": ("compare {run} --json", DOCTOR),
    "run/checkpoint.pt": (f"{TRAIN} --resume",),
    "run/checkpoint_best.pt": (f"{TRAIN} --resume",),
    "run/bench/one.json": (REPORT,),
    "cache/timings.json": (f"{CHAT} --tree auto", SHARDS),
    "joint/adapter/adapter_config.json": (JOINT,),
    "joint/adapter/adapter_model.safetensors": (JOINT,),
    "theirs/config.json": (f"import {{home}}/theirs {IMPORT}",),
    "theirs/medusa_lm_head.safetensors": (f"import {{home}}/theirs {IMPORT}",),
    "heads.pt": (f"import {{home}}/heads.pt {IMPORT}",),
    "model/chat_template.jinja": (f"chat --model {{home}}/model {PLAIN}",),
    **{
        f"model/{name}": (CHAT,)
        for name in ("config.json", "generation_config.json", "tokenizer.json")
    },
    "model/tokenizer_config.json": (CHAT,),
    "model/model.safetensors": (CHAT,),
    "shards/model.safetensors.index.json": (SHARDS,),
    "seeds.json": (DISTILL,),
    "questions.jsonl": (BENCH,),
}
# Commands whose flags are tried, with words that make them end soon; others fetch data or take minutes.
COMMANDS: dict[str, str] = {
    "chat": CHAT,
    "tree": TREE,
    "train": TRAIN,
    "distill": DISTILL,
    "bench": BENCH,
    "calibrate": "calibrate --run {run} --dtype fp32",
    "compare": "compare {run}",
    "doctor": DOCTOR,
    "import": f"import {{home}}/theirs {IMPORT}",
    "export": "export --run {run}/ --output {home}/out --to medusa --json",
    "report": REPORT,
    "serve": "serve --run {run}/ --port 0 --dtype fp32 --tree static",
}
KINDS = [
    *COMMANDS,
    *(f"{name}#{index}" for name, lines in FILES.items() for index in range(len(lines))),
]
# These would leave the machine, wait for others, ask for one that is not here, or print tracebacks.
LEFT_OUT = {
    "--endpoint",
    "--judge",
    "--host",
    "--device",
    "--quantize",
    "--gguf",
    "--help",
    "--debug",
}
DEEP, LONG = "\0deep", "\0long"  # what json.dumps does not write; put in by `dumped`
NASTY: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3.5,
    -0.5,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
    LONG,
    DEEP,
]
NASTY += [
    2**31,
    2**63,
    -(2**63),
    10**12,
    10**30,
    "",
    "x",
    "1",
    "-1",
    "²",
    "\x00",
    "\x1b]0;x\x07",
    "\ud800",
    "é" * 300,
]
NASTY += [
    "x" * 100_000,
    "/etc/passwd",
    "../..",
    "{%",
    [],
    {},
    [[]],
    [None],
    [0],
    [-1],
    [[0], [0]],
    {"": 0},
    {"id": []},
]
NASTY += [list(range(2000))]
WORDS = "x 0 1 -1 2.5 1e-300 1e300 nan inf ² auto all a=b 1,2 , 1,,2 / . .. "
WORDS += "/dev/null /dev/full /nowhere/x ~ {home} {run}"
WORDS += " {run}/tree.json é dynamic dynamic:0 dynamic:² static:9 greedy exact typical medusa ar hf -- train.lr=["
WORDS += " drafter=hydra train.stage=2 {run}/distill.jsonl {run}/pipe " + " ".join(
    ("9" * 40, "9" * 5000, "x" * 5000)
)
YAML = (
    "2020-01-01",
    "&a [*a, *a]",
    "*a",
    "!!python/name:os.system",
    "{a: 1, a: 2}",
    "0x" + "f" * 5000,
    ".inf",
    "1e-3",
)
Draw = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A command, and the file that is changed before it runs, with its new content."""

    words: tuple[str, ...]
    name: str = ""
    data: bytes = b""

    def __repr__(self) -> str:
        content = (
            self.data if len(self.data) < 600 else self.data[:300] + b" ... " + self.data[-300:]
        )
        return f"{self.name} = {content!r}; " * bool(self.name) + f"medusa {self.words!a}"


class Ground:
    """A folder with a tiny model and runs, put back as it was before every case."""

    def __init__(self, folder: Path) -> None:
        self.home, self._whole, self.count = folder / "home", folder / "whole", 0
        self.home.mkdir()
        os.environ["MEDUSA_HOME"] = str(self.home / "cache")
        model = save_model(self.home / "model")
        shutil.copytree(model, self.home / "shards")
        (self.home / "shards" / "model.safetensors").unlink()
        load_network(ModelSource.of(model), LoadOptions(dtype="bf16"))[0].save_pretrained(
            self.home / "shards", max_shard_size="20KB"
        )
        run = save_run(self.home / "run", model, calibrated=True)
        shutil.copytree(run.drafter_dir, Path(save_run(self.home / "joint", model).path) / "kept")
        network, _ = load_network(ModelSource.of(model), LoadOptions(dtype="fp32"))
        adapter.attach(network, rank=2, alpha=4.0, dropout=0.0)
        adapter.save(network, self.home / "joint" / "adapter", model)
        seeds = [
            {"id": f"s{n}", "messages": [{"role": "user", "content": f"w{n} w{n + 1}"}]}
            for n in range(6)
        ]
        (self.home / "seeds.json").write_text(
            "".join(json.dumps(record) + "\n" for record in seeds)
        )
        save_questions(self.home / "questions.jsonl")
        export_medusa(find_source(f"{run.path}/"), self.home / "theirs")
        torch.save(
            load_file(self.home / "theirs" / "medusa_lm_head.safetensors"), self.home / "heads.pt"
        )
        # Measurements of the machine are kept however busy it is.
        with patch("medusa_cli.engine.timing.UNDISTURBED", 0.0):
            for line in (DISTILL, TRAIN, *FILES["cache/timings.json"], BENCH):
                medusa(*self.filled(line.split()))
        max(run.bench_dir.glob("*.json")).rename(run.bench_dir / "one.json")
        shutil.copytree(self.home, self._whole)

    def filled(self, words: "tuple[str, ...] | list[str]") -> list[str]:
        """Returns words with the folder's own paths in place of {home}, {run} and {joint}."""
        paths = {"{home}": self.home, "{run}": self.home / "run", "{joint}": self.home / "joint"}
        filled = list(words)
        for name, path in paths.items():
            filled = [word.replace(name, str(path)) for word in filled]
        return filled

    def original(self, name: str) -> bytes:
        return (self._whole / name).read_bytes()

    def check(self, case: Case) -> None:
        """Runs a case; raises AssertionError if it does not end as it must."""
        self.count += 1
        shutil.rmtree(self.home)
        shutil.copytree(self._whole, self.home, symlinks=True)
        os.mkfifo(self.home / "run" / "pipe")
        if case.name:
            (self.home / case.name).write_bytes(case.data)
        # A server would wait for requests.
        with limits(), patch("medusa_cli.serve.server.Server.run"):
            done = medusa(*self.filled(case.words), exit_code=None)
        text = done.stderr
        assert isinstance(done.exception, SystemExit | type(None)), f"{done.exception!r}\n{case!r}"
        assert "internal error" not in text, f"{text}\n{case!r}"
        assert "Traceback" not in text, f"{text}\n{case!r}"
        assert done.exit_code in (0, 1, 2), f"exit code {done.exit_code}\n{text}\n{case!r}"
        if done.exit_code:
            message = text[max(0, text.rfind("error: ")) :].strip()
            assert message, f"exit code {done.exit_code} without a word\n{case!r}"
            lines = sum(1 + len(line) // WIDTH for line in message.splitlines())
            assert lines <= MAX_LINES, f"{lines} lines:\n{message}\n{case!r}"


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Bounds the time and the memory of the block."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError(f"it takes longer than {SECONDS} s, or waits for {WAITED} s")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, WAITED),
    )
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


def cases(ground: Ground, kind: str) -> st.SearchStrategy[Case]:
    """Returns changes of a file, or values for the flags of a command."""
    if kind in COMMANDS:
        return flags(kind).map(lambda more: Case((*COMMANDS[kind].split(), *more)))
    name, _, index = kind.partition("#")
    whole, words = ground.original(name), tuple(FILES[name][int(index)].split())
    changes = {".json": changed_values, ".jsonl": changed_values, ".yaml": changed_recipe}
    changes |= {".safetensors": changed_tensors, ".pt": changed_checkpoint}
    change = changes.get(Path(name).suffix) if name != "heads.pt" else None
    ways = [changed_bytes(whole), *([change(whole)] * 2 if change else [])]
    return st.one_of(ways).map(lambda data: Case(words, name, data))


@st.composite
def changed_bytes(draw: Draw, whole: bytes) -> bytes:
    """Draws a file with bytes changed, cut out, doubled or put in, most often near its beginning or its end."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        near = st.integers(0, min(len(data), 400))
        at = draw(
            st.one_of(near, near.map(lambda back: len(data) - back), st.integers(0, len(data)))
        )
        end = min(len(data), at + draw(st.sampled_from((1, 1, 2, 8, 64, len(data)))))
        new = draw(
            st.sampled_from(
                (b"\xff", b"\x00", b"[", b"{", b'"', b"-", b"9" * 30, b"e9", b"null", b"\n")
            )
        )
        change = draw(st.sampled_from(("set", "cut", "double", "insert")))
        if change == "set":
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif change == "cut":
            del data[at:end]
        else:
            data[at:at] = data[at:end] if change == "double" else new
    return bytes(data)


@st.composite
def changed_values(draw: Draw, whole: bytes) -> bytes:
    """Draws JSON, or a line of JSONL, with a value replaced, a key left out, or a key twice."""
    lines = (
        [whole] if not whole.startswith(b"{") or b"\n" in whole.strip()[:3] else whole.split(b"\n")
    )
    number = draw(st.integers(0, len(lines) - 1))
    number = number if lines[number].strip() else 0
    document = json.loads(lines[number])
    for _ in range(draw(st.integers(1, 2))):
        document = with_change(draw, document)
    lines[number] = dumped(document)
    if draw(st.integers(0, 9)) == 0:
        lines[number] = lines[number].replace(b"{", b'{"id": 1, "id": 2, ', 1)
    return b"\n".join(lines)


def with_change(draw: Draw, document: Any) -> Any:
    """Returns a document with one of its values changed."""
    path = draw(st.sampled_from(list(paths_of(document))))
    value = copy.deepcopy(draw(st.sampled_from(NASTY)))  # a later change must not change NASTY
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


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths to a document's values; of a long list, the first few and the last."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_of(inner, (*path, key))
    elif isinstance(value, list):
        for index in {*range(min(len(value), 3)), *range(max(0, len(value) - 1), len(value))}:
            yield from paths_of(value[index], (*path, index))


def dumped(document: Any) -> bytes:
    text = json.dumps(document)
    return (
        text.replace(json.dumps(DEEP), "[" * 3000 + "]" * 3000)
        .replace(json.dumps(LONG), "9" * 5000)
        .encode()
    )


@st.composite
def changed_recipe(draw: Draw, whole: bytes) -> bytes:
    """Draws YAML with the value of a key replaced, or a line doubled."""
    lines = whole.decode().split("\n")
    place = draw(st.sampled_from([place for place, line in enumerate(lines) if ":" in line]))
    value = draw(
        st.one_of(
            st.sampled_from(YAML), st.sampled_from(NASTY).map(lambda value: dumped(value).decode())
        )
    )
    lines[place] = f"{lines[place].partition(':')[0]}: {value}"
    if draw(st.integers(0, 5)) == 0:
        lines.insert(place, lines[place])
    return "\n".join(lines).encode("utf-8", "surrogatepass")


@st.composite
def changed_tensors(draw: Draw, whole: bytes) -> bytes:
    """Draws weights with a tensor of other numbers, type or shape, or under another name."""
    tensors = load(whole)
    name = draw(st.sampled_from(sorted(tensors)))
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(
            lambda x: x * float("nan"),
            lambda x: x * float("inf"),
            lambda x: x * 1e30,
            lambda x: x * 0,
            lambda x: -x,
        ),
        *(lambda x: x.to(torch.int8), lambda x: x.bool(), lambda x: x.double(), lambda x: x.long()),
        *(
            lambda x: x[:1],
            lambda x: x[..., :0],
            lambda x: x.flatten(),
            lambda x: x[None],
            lambda x: x[::2],
        ),
    ]
    tensor = draw(st.sampled_from(changes))(tensors.pop(name).float()).contiguous()
    key = draw(st.sampled_from((name, name, name, "other", "")))
    return save({**tensors, key: tensor} if key else tensors, {"format": "pt"})


@st.composite
def changed_checkpoint(draw: Draw, whole: bytes) -> bytes:
    """Draws a checkpoint with a value replaced."""
    document = torch.load(io.BytesIO(whole), weights_only=True)
    value = draw(st.sampled_from([value for value in NASTY if value != DEEP]))
    key = draw(st.sampled_from(sorted(document)))
    inner = document[key]
    if isinstance(inner, dict) and inner and draw(st.booleans()):
        inner[draw(st.sampled_from(sorted(inner)))] = value
    else:
        document[key] = value
    out = io.BytesIO()
    torch.save(document, out)
    return out.getvalue()


def flags(command: str) -> st.SearchStrategy[tuple[str, ...]]:
    """Draws one to three flags of a command with any word for a value."""
    plain, valued = [], []
    for param in load_command(command).params:
        names = [
            name
            for name in getattr(param, "opts", ())
            if name.startswith("--") and name not in LEFT_OUT
        ]
        if param.param_type_name == "option" and names:
            (plain if param.is_flag else valued).append(names[0])
    fixed = st.sampled_from([*WORDS.split(), "", " ", "\x1b[2J", "\udcff"])
    word = st.one_of(fixed, st.integers(-3, 70).map(str), st.text(max_size=8))
    pair = st.tuples(st.sampled_from(sorted(valued)), word)
    alone = st.one_of(st.sampled_from(sorted(plain)), word).map(lambda text: (text,))
    return st.lists(st.one_of(pair, pair, pair, alone), min_size=1, max_size=3).map(
        lambda groups: sum(groups, ())
    )


def fuzz(number: int, seconds: float) -> tuple[int, int, list[str]]:
    """Fuzzes in this process; returns the cases, the most kilobytes held, and the faults, each kind once."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    chance, faults = random.Random(number), {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        ground = Ground(Path(folder))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            kind = chance.choice(KINDS)
            for fault in block(ground, kind, chance.getrandbits(60), end):
                # The same fault again and again says no more: the words before the case tell faults apart.
                if faults.setdefault((kind, fault.split("\n")[0][-60:]), fault) is fault:
                    print(f"FAULT by {kind}: {fault}\n", flush=True)
    return ground.count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list(faults.values())


def block(ground: Ground, kind: str, number: int, end: float) -> list[str]:
    """Runs a few cases of one kind; returns the faults."""
    faults: list[str] = []

    @seed(number)
    @settings(
        max_examples=BLOCK,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=EVERYTHING,
    )
    @given(st.data())
    def fuzzed(data: st.DataObject) -> None:
        case = data.draw(cases(ground, kind))
        if time.monotonic() < end:
            try:
                ground.check(case)
            except AssertionError as reason:
                faults.append(str(reason))

    # What a case draws may depend on files that an earlier one left in the run: the block then ends there.
    with contextlib.suppress(FlakyStrategyDefinition):
        fuzzed()
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    asked = parser.parse_args()
    print(
        f"fuzzing for {asked.seconds:g} s in {asked.processes} processes, --seed {asked.seed}",
        flush=True,
    )
    seeds = [asked.seed * 1000 + rank for rank in range(asked.processes)]
    with ProcessPoolExecutor(asked.processes) as pool:
        done = list(pool.map(fuzz, seeds, [asked.seconds] * asked.processes))
    counts, peaks, faults = zip(*done, strict=True)
    count, peak, faults = sum(counts), max(peaks) << 10, sum(faults, [])
    print(
        f"{count:,} cases, {len(faults)} faults, at most {peak / 1e9:.2f} GB held; --seed {asked.seed}"
    )
    sys.exit(bool(faults) or peak > MEMORY)


if __name__ == "__main__":
    main()
