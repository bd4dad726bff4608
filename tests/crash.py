"""kill -9 in every command that writes, over and over: afterwards nothing may be lost, doubled or changed.

Half of the kills come after a random time, half just before a random file operation inside the run. Then the command
runs to its end, and its files are compared with an uninterrupted run's by hash. At last two and three commands write
one run at the same time: one may, the others are refused. See `make crash` and `python -m tests.crash --help`.
"""

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any

import torch

from medusa_cli.data.states import StateStore, read_rows
from medusa_cli.errors import UserError
from medusa_cli.export.folder import CHECKSUMS, find_source
from medusa_cli.export.medusa_format import export_medusa
from tests.forked import RUN, Child, end, free_port, start
from tests.helpers import save_model, save_questions, save_run

# Imported once here, not by each fork.
WARM = (
    "transformers.models.llama.modeling_llama",
    "matplotlib.pyplot",
    "peft",
    "medusa_cli.train.loop",
    "gguf",
)
WARM += ("medusa_cli.options", "medusa_cli.distill", "medusa_cli.bench", "rich.table")
HIDDEN = 32  # of the tiny model
PLACE = ("--run", "r", "--dtype", "fp32", "--device", "cpu", "--quiet")
DISTILL = ("distill", "--seed", "seeds.json", "--model", "model", *PLACE)
DISTILL += ("--max-new-tokens", "12", "distill.context=96", "distill.batch_size=1")
TRAIN = (
    "train",
    *PLACE,
    "drafter.num_heads=2",
    "drafter.vocabulary=draft",
    "drafter.draft_vocab_size=24",
)
TRAIN += (
    "train.epochs=2",
    "train.batch_tokens=96",
    "train.checkpoint_every=1",
    "train.validation_every=3",
)
# Adaptive trees follow the clock, so a static one.
BENCH = (
    "bench",
    *PLACE,
    "--questions",
    "questions.jsonl",
    "--tree",
    "static",
    "--methods",
    "ar,medusa",
)
BENCH += ("--max-new-tokens", "8")

Facts = list[tuple[str, str]]  # a name and a digest of each thing


def digest(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def conversations(run: Path) -> Facts:
    """Returns every conversation with its states."""
    facts, rows, states = [], 0, StateStore(run / "states.bin", HIDDEN)
    for line in lines_of(run / "distill.jsonl"):
        own = (
            read_rows(run / "states.bin", HIDDEN, *line["state_rows"])
            .contiguous()
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
        facts.append(
            (line["id"], digest([line["messages"], line["tokens"], line["spans"], digest(own)]))
        )
        rows += line["state_rows"][1]
    return [*facts, ("state rows", str(states.rows - rows))]


def training(run: Path) -> Facts:
    """Returns every step of the log, and the weights."""
    kept = ("loss", "accuracies", "positions", "total_positions", "lr")
    steps = [
        line for line in lines_of(run / "train.jsonl") if line["event"] in ("stepped", "validated")
    ]
    facts = [
        (f"{step['event']} {step['step']}", digest({key: step.get(key) for key in kept}))
        for step in steps
    ]
    return facts + files("drafter/*.safetensors", "adapter/*.safetensors")(run)


def files(*patterns: str) -> Callable[[Path], Facts]:
    """Returns what reads files: JSON without its time and place, that a picture is there, else all bytes."""

    def content(path: Path, scratch: Path) -> str:
        if path.suffix == ".png":
            return str(path.stat().st_size > 0)
        if path.suffix != ".json":
            return digest(path.read_bytes())
        # Commands name the model's folder, which is below that of the trial.
        document = json.loads(re.sub(rf'{scratch}/[^"/]+', "", path.read_text()))
        for record in (document, document.get("provenance", {})):
            record.pop("created", None)
        return digest(document)

    def facts(run: Path) -> Facts:
        scratch = Path(str(run).removesuffix(str(RUN))).parent
        paths = [
            path for pattern in patterns for path in sorted(run.glob(pattern)) if path.is_file()
        ]
        return [(str(path.relative_to(run)), content(path, scratch)) for path in paths]

    return facts


def benched(run: Path) -> Facts:
    """Returns each method's answers in the last bench, not its speed."""
    methods = json.loads(max(run.glob("bench/*.json")).read_text())["methods"]
    return [
        (
            name,
            digest(
                [method["tokens"], method.get("identical"), round(method["acceptance_length"], 6)]
            ),
        )
        for name, method in methods.items()
    ]


def tuned(run: Path) -> Facts:
    """Returns the conversations and weights of a tuning whose time is over at once, and the parts that ended."""
    state = json.loads((run / "tune.json").read_text())
    parts = ("measured", "promised", "distilled", "trained", "tree_nodes", "after", "chosen")
    done = [(part, str(state[part] is not None)) for part in parts]
    return [*done, *conversations(run), *files("drafter/*.safetensors")(run)]


def exported(run: Path) -> Facts:
    """Returns the exported files; fails if their checksums are wrong."""
    sums = dict(
        reversed(line.split("  ", 1)) for line in (run / "out" / CHECKSUMS).read_text().splitlines()
    )
    paths = [path for path in (run / "out").rglob("*") if path.is_file() and path.name != CHECKSUMS]
    assert sums == {
        str(p.relative_to(run / "out")): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths
    }
    return files("out/**/*")(run)


def half_written(run: Path) -> list[str]:
    """Returns the files that a reader may meet at any moment and that are no whole JSON."""
    broken = []
    for pattern in ("*.json", "drafter/*.json", "adapter/*.json", "bench/*.json"):
        for path in run.glob(pattern):
            try:
                if not path.name.startswith("."):
                    json.loads(path.read_text())
            except ValueError:
                broken.append(path.name)
    return broken


@dataclass(frozen=True)
class Job:
    """A command to kill: its words, what it leaves, its processes, and if it starts where the first one does.

    once: the file that shows that it was done; it is refused then.
    """

    name: str
    words: tuple[str, ...]
    facts: Callable[[Path], Facts]
    size: int = 1
    fresh: bool = False
    once: str = ""

    def start(self, place: Path, begun: float, die_at: int = 0, victim: int = 0) -> list[Child]:
        """Starts the command; a training that left a checkpoint is resumed."""
        left = place / RUN / "checkpoint.pt"
        resume = self.words[0] == "train" and left.is_file() and left.stat().st_mtime > begun
        words = [*self.words, *(["--resume"] if resume else [])]
        port = free_port() if self.size > 1 else 0
        return [
            start(
                words,
                place,
                die_at=die_at if rank == victim else 0,
                rank=rank,
                size=self.size,
                port=port,
            )
            for rank in range(self.size)
        ]

    def finish(self, place: Path, begun: float) -> tuple[Facts, float]:
        """Runs the command to its end; returns what it left, and the processor time of its slowest process."""
        if self.once and (place / RUN / self.once).exists():
            return self.facts(place / RUN), 0.0
        children = self.start(place, begun)
        end(children)
        assert all(child.code == 0 for child in children), children[0].output.read_text()
        return self.facts(place / RUN), max(child.seconds for child in children)


# In the order in which each needs the files of the one before it.
JOBS = (
    Job("distill", DISTILL, conversations),
    Job("train, stage 1", TRAIN, training),
    Job("calibrate", ("calibrate", *PLACE, "--top", "5"), files("calibration.*")),
    Job("tree", ("tree", "--run", "r", "--quiet", "--budget", "5"), files("tree.*")),
    Job("bench", BENCH, benched),
    Job(
        "report",
        ("report", "r", "--quiet", "--output", f"{RUN}/page.html"),
        files("page.html", "page.md"),
    ),
    Job(
        "export",
        ("export", "--run", "r", "--output", f"{RUN}/out", "--overwrite", "--quiet"),
        exported,
    ),
    Job(
        "train, stage 2",
        (*TRAIN, "--stage", "2", "train.lora_rank=2", "train.max_length=96"),
        training,
    ),
    Job(
        "import",
        ("import", "theirs", "--run", "r", "--model", "model", "--quiet"),
        files("drafter/config.json", "drafter/*.safetensors", "run.json"),
        fresh=True,
        once="drafter/config.json",
    ),
    # With so little time, it does the least of everything, which is the same in every run.
    Job(
        "tune",
        ("tune", "model", "--data", "seeds.json", "--time", "1s", *PLACE),
        tuned,
        fresh=True,
    ),
)
WRITERS = 2  # of these, the first, several at once are tried on one run
SHARED = (
    Job("distill, 2 processes", DISTILL, conversations, 2, fresh=True),
    Job("distill, 3 processes", DISTILL, conversations, 3, fresh=True),
)


@dataclass
class Known:
    """An uninterrupted run of a job: where it started, what it left, its seconds and file operations."""

    job: Job
    base: Path
    facts: Facts
    seconds: float
    operations: list[int]


def prepare(place: Path) -> None:
    """Saves a tiny model, seeds, questions and heads from elsewhere."""
    run = save_run(place / "made", save_model(place / "model"), calibrated=True)
    export_medusa(find_source(f"{run.path}/"), place / "theirs")
    shutil.rmtree(run.path)
    draw = random.Random(0)
    prompts = [" ".join(f"w{draw.randrange(57)}" for _ in range(4)) for _ in range(24)]
    seeds = [
        {"id": f"s{n}", "messages": [{"role": "user", "content": text}]}
        for n, text in enumerate(prompts)
    ]
    (place / "seeds.json").write_text(json.dumps(seeds))
    save_questions(place / "questions.jsonl", 2)


def needed(only: str, rounds: int) -> list[Job]:
    """Returns the jobs whose names begin so, and those that they need."""
    chain = [job for job in JOBS if not job.fresh]
    last = max((at for at, job in enumerate(chain, 1) if job.name.startswith(only)), default=1)
    fresh = [job for job in (*JOBS, *SHARED) if job.fresh and job.name.startswith(only)]
    return chain[: max(last, WRITERS if rounds else 1)] + fresh


def learn(scratch: Path, jobs: Sequence[Job]) -> list[Known]:
    """Runs commands in their order, and keeps where each started and what it left."""
    known: list[Known] = []
    for job in jobs:
        base, place = scratch / f"before {job.name}", scratch / "reference"
        if job.fresh:
            place = scratch / f"reference {job.name}"
            shutil.copytree(known[0].base, place)
        shutil.copytree(place, base)
        facts, seconds = job.finish(place, time.time())
        operations = [int((place / f"operations-{rank}").read_text()) for rank in range(job.size)]
        known.append(Known(job, base, facts, seconds, operations))
        print(
            f"{job.name}: {seconds:.1f} s, {sum(operations)} file operations, {len(facts)} facts",
            flush=True,
        )
        assert facts, f"{job.name} left nothing"
        if job.size > 1:
            assert sorted(facts) == sorted(known[0].facts), f"{job.name} differs from distill"
    return known


@dataclass
class Count:
    """The outcome of the kills."""

    kills: Counter[str] = field(default_factory=Counter)
    late: int = 0  # they met a command that had ended
    lost: int = 0
    doubled: int = 0
    changed: int = 0
    left: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)

    def compare(self, name: str, expected: Facts, actual: Facts) -> None:
        """Counts facts that are lost, doubled or changed."""
        want, have, values = (
            Counter(key for key, _ in expected),
            Counter(key for key, _ in actual),
            dict(expected),
        )
        lost, doubled = (want - have).total(), (have - want).total()
        changed = sum(values.get(key, value) != value for key, value in actual)
        self.lost, self.doubled, self.changed = (
            self.lost + lost,
            self.doubled + doubled,
            self.changed + changed,
        )
        if lost or doubled or changed:
            self.faults.append(f"{name}: {lost} lost, {doubled} doubled, {changed} changed")

    def leftovers(self, name: str, run: Path) -> None:
        """Counts temporary files that nobody will remove."""
        left = [path.name for path in run.rglob(".*") if path.name != ".lock"]
        self.left += len(left)
        if left:
            self.faults.append(f"{name}: left {', '.join(left)}")


def strike(known: Known, place: Path, count: Count, draw: random.Random, begun: float) -> None:
    """Starts the command and kills it: before a random file operation, or after a random time."""
    job = known.job
    if draw.random() < 0.5:
        victim = draw.randrange(job.size)
        children = job.start(
            place, begun, die_at=draw.randint(1, known.operations[victim]), victim=victim
        )
        hit = end(children)
    else:
        children = job.start(place, begun)
        hit = end(children, until=time.monotonic() + draw.uniform(0, 1.5 * known.seconds))
    count.kills[job.name] += hit
    count.late += not hit
    bad = [child for child in children if child.code not in (0, -SIGKILL)]
    if bad and not hit:
        count.faults.append(f"{job.name}: ended with {bad[0].code}: {bad[0].output.read_text()}")
    count.faults += [f"{job.name}: {name} is half written" for name in half_written(place / RUN)]


def crash(
    known: Sequence[Known], scratch: Path, kills: int, draw: random.Random, count: Count
) -> None:
    """Kills commands in turn, one to three times each, and compares their files after each."""
    turn = 0
    while count.kills.total() < kills and len(count.faults) < 10:
        chosen = known[turn % len(known)]
        turn += 1
        place = scratch / "trial"
        shutil.copytree(chosen.base, place)
        begun = time.time()
        for _ in range(draw.randint(1, 3)):
            strike(chosen, place, count, draw, begun)
        try:
            count.compare(chosen.job.name, chosen.facts, chosen.job.finish(place, begun)[0])
        except (AssertionError, OSError, ValueError, UserError) as reason:
            count.faults.append(f"{chosen.job.name}: could not go on: {reason}")
        count.leftovers(chosen.job.name, place / RUN)
        shutil.rmtree(place)


def contend(known: Sequence[Known], scratch: Path, rounds: int, count: Count) -> None:
    """Starts two or three writers of one run at once: one writes what it would alone, the others are refused."""
    for number in range(rounds):
        chosen, size = known[number % WRITERS], 2 + number // WRITERS % 2
        place, name = scratch / "trial", f"{size} x {known[number % WRITERS].job.name}"
        shutil.copytree(chosen.base, place)
        children = [start(chosen.job.words, place, rank=rank) for rank in range(size)]
        end(children)
        texts = [child.output.read_text() for child in children if child.code == 1]
        clear = all(text.count("\n") == 1 and "is being written by" in text for text in texts)
        count.refused += len(texts)
        if len(texts) != size - 1 or sum(child.code == 0 for child in children) != 1 or not clear:
            count.faults.append(f"{name}: {[child.code for child in children]}, {texts}")
        count.compare(name, chosen.facts, chosen.job.facts(place / RUN))
        shutil.rmtree(place)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.crash", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of several writers")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="kill the commands whose names begin so"
    )
    parser.add_argument("--random-seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg", HF_HUB_OFFLINE="1")
    for name in WARM:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    print(f"random seed {asked.random_seed}", flush=True)
    count, began = Count(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        os.environ["MEDUSA_HOME"] = str(scratch / "home")
        (scratch / "reference").mkdir()
        prepare(scratch / "reference")
        known = learn(scratch, needed(asked.only, asked.rounds))
        killed = [entry for entry in known if entry.job.name.startswith(asked.only)]
        crash(killed, scratch, asked.kills, random.Random(asked.random_seed), count)
        contend(known, scratch, asked.rounds, count)
    for name, number in count.kills.items():
        print(f"  {name}: {number} kills")
    print(
        f"{count.kills.total()} kills ({count.late} came too late), {count.lost} lost, {count.doubled} doubled, "
        f"{count.changed} changed, {count.left} files left; {asked.rounds} rounds of several writers, "
        f"{count.refused} refused; {time.monotonic() - began:.0f} s"
    )
    for fault in count.faults:
        print(f"FAULT {fault}")
    return 1 if count.faults else 0


if __name__ == "__main__":
    sys.exit(main())
