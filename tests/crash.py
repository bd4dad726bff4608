"""kill -9 in every command that writes, over and over: afterwards nothing may be lost, doubled or changed.

Half of the kills come after a random time, half just before a random file operation inside the run (an export, a page
and the machine's times are written there as well, to be counted). Then the command
is run to its end, and what it leaves is held against an uninterrupted run by hash. At last two and three commands write
one run at the same time: one may, the others are told so. `make crash` runs it, `python -m tests.crash --help` tells
more.
"""

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import random
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

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.states import StateStore
from medusa_cli.distill import Records
from medusa_cli.errors import UserError
from medusa_cli.export.folder import CHECKSUMS, find_source
from medusa_cli.export.medusa_format import export_medusa
from medusa_cli.runs.run import Run, provenance
from tests.forked import RUN, Child, end, free_port, start
from tests.helpers import save_model, save_questions, save_run

# What forks would else import each for itself.
WARM = ("transformers.models.llama.modeling_llama", "matplotlib.pyplot", "peft", "medusa_cli.train.loop", "gguf")
WARM += ("medusa_cli.options", "medusa_cli.distill", "medusa_cli.bench", "rich.table", "tensorboard")

PLACE = ("--run", "r", "--dtype", "fp32", "--device", "cpu", "--quiet")
DISTILL = ("distill", "--seed", "seeds.json", "--model", "model", *PLACE)
DISTILL += ("--max-new-tokens", "12", "--context", "96", "--batch-size", "1")
TRAIN = ("train", *PLACE, "drafter.num_heads=2", "drafter.vocabulary=draft", "drafter.draft_vocab_size=24")
TRAIN += ("train.epochs=2", "train.batch_tokens=96", "train.checkpoint_every=1", "train.validation_every=3")


IMPORT = ("import", "theirs", "--run", "r", "--model", "model", "--quiet")
# Trees that adapt to the clock accept now this, now that.
STATIC = ("--tree", "static", "--methods", "ar,medusa", "--max-new-tokens", "8")

HIDDEN = 32  # of the tiny model

Facts = list[tuple[str, str]]  # a name for each thing, and a digest of it


def digest(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def conversations(run: Path) -> Facts:
    """Every conversation with its states."""
    found = []
    states = StateStore(run / "states.bin", HIDDEN)
    for line in (run / "distill.jsonl").read_text().splitlines():
        one = json.loads(line)
        rows = states.read(*one["state_rows"]).contiguous().view(torch.uint8).numpy().tobytes()
        found.append((one["id"], digest([one["messages"], one["tokens"], one["spans"], digest(rows)])))
    rows = sum(json.loads(line)["state_rows"][1] for line in (run / "distill.jsonl").read_text().splitlines())
    return [*found, ("state rows", str(states.rows - rows))]


def training(run: Path) -> Facts:
    """Every step of the log, the drafter, and the adapter where there is one."""
    kept = ("loss", "accuracies", "positions", "total_positions", "lr")
    lines = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    facts = [
        (f"{one['event']} {one['step']}", digest({key: one.get(key) for key in kept}))
        for one in lines
        if one["event"] in ("stepped", "validated")
    ]
    weights = [*run.glob("drafter/*.safetensors"), *run.glob("adapter/*.safetensors")]
    return facts + [(str(path.relative_to(run)), digest(path.read_bytes())) for path in sorted(weights)]


def document(name: str, picture: bool = True) -> Callable[[Path], Facts]:
    """A JSON file, but for when it was made, and that its picture is there."""

    def facts(run: Path) -> Facts:
        data = json.loads((run / name).read_text())
        for made in (data, data.get("provenance", {})):
            made.pop("created", None)
        drawn = [(f"{name}'s picture", str((run / name).with_suffix(".png").stat().st_size > 0))] if picture else []
        return [(name, digest(data)), *drawn]

    return facts


def report(run: Path) -> Facts:
    """The last report: what each method wrote, not how fast."""
    data = json.loads(max(run.glob("bench/*.json")).read_text())
    return [
        (name, digest([one["tokens"], one.get("identical"), round(one["acceptance_length"], 6)]))
        for name, one in data["methods"].items()
    ]


def folder(name: str) -> Callable[[Path], Facts]:
    """An exported folder: every file, which its list of checksums must name rightly."""

    def facts(run: Path) -> Facts:
        place = run / name
        sums = dict(reversed(line.split("  ", 1)) for line in (place / CHECKSUMS).read_text().splitlines())
        files = {str(one.relative_to(place)): one.read_bytes() for one in place.rglob("*") if one.is_file()}
        del files[CHECKSUMS]
        assert sums == {one: hashlib.sha256(data).hexdigest() for one, data in files.items()}, f"{place} is not whole"
        return [(one, digest(data)) for one, data in sorted(files.items())]

    return facts


def page(run: Path) -> Facts:
    """The report of the bench, as a page and as Markdown."""
    return [(name, digest((run / name).read_bytes())) for name in ("page.html", "page.md")]


def imported(run: Path) -> Facts:
    """Returns an imported drafter and the model that it is for."""
    config = document("drafter/config.json", picture=False)(run)
    weights = [(path.name, digest(path.read_bytes())) for path in run.glob("drafter/*.safetensors")]
    return [*config, *weights, *document("run.json", picture=False)(run)]


def machine(run: Path) -> Facts:
    """Which kernels were timed: the times are others in every run."""
    kept = json.loads((run / "home" / "timings.json").read_text())
    return [(f"{key} {kernel}", str(sorted(curve))) for key, one in kept.items() for kernel, curve in one.items()]


def half(run: Path) -> list[str]:
    """The files that are not whole, of those that a reader may meet at any moment."""
    broken = []
    for path in [
        *run.glob("*.json"),
        *run.glob("drafter/*.json"),
        *run.glob("adapter/*.json"),
        *run.glob("bench/*.json"),
        *run.glob("home/*.json"),
    ]:
        try:
            if not path.name.startswith("."):  # else it is not there yet
                json.loads(path.read_text())
        except ValueError:
            broken.append(path.name)
    return broken


@dataclass(frozen=True)
class Job:
    """A command to kill: what it leaves, how many processes share it, whether it starts where the first does.

    once: the file that says that it was done; it is refused then, and need not be typed again.
    """

    name: str
    words: tuple[str, ...]
    facts: Callable[[Path], Facts]
    size: int = 1
    fresh: bool = False
    once: str = ""

    def next(self, place: Path, begun: float) -> list[str]:
        """The words to type now: a training that left a checkpoint is gone on with."""
        left = place / RUN / "checkpoint.pt"
        resume = self.words[0] == "train" and left.is_file() and left.stat().st_mtime > begun
        return [*self.words, *(["--resume"] if resume else [])]

    def start(self, place: Path, begun: float, die_at: int = 0, victim: int = 0) -> list[Child]:
        port = free_port() if self.size > 1 else 0
        words = self.next(place, begun)
        home = {"MEDUSA_HOME": str(RUN / "home")} if self.words[0] == "machine" else {}
        return [
            start(words, place, die_at=die_at if rank == victim else 0, rank=rank, size=self.size, port=port, **home)
            for rank in range(self.size)
        ]

    def finish(self, place: Path, begun: float) -> tuple[Facts, float]:
        """Run the command to its end: what it left, and the processor's seconds of the process that took most."""
        if self.once and (place / RUN / self.once).exists():
            return self.facts(place / RUN), 0.0
        children = self.start(place, begun)
        end(children)
        assert all(child.code == 0 for child in children), children[0].said.read_text()
        return self.facts(place / RUN), max(child.seconds for child in children)


# In the order in which each needs what the one before it left.
JOBS = (
    Job("distill", DISTILL, conversations),
    Job("train, stage 1", TRAIN, training),
    Job("calibrate", ("calibrate", *PLACE, "--top", "5"), document("calibration.json")),
    Job("tree", ("tree", "--run", "r", "--quiet", "--budget", "5"), document("tree.json")),
    Job("bench", ("bench", *PLACE, "--questions", "questions.jsonl", *STATIC), report),
    Job("report", ("report", "r", "--quiet", "--output", f"{RUN}/page.html"), page),
    Job(
        "export",
        ("export", "--run", "r", "--output", f"{RUN}/out", "--overwrite", "--quiet"),
        folder("out"),
    ),
    Job("machine", ("machine", "--model", "model", "--quiet", "--measure"), machine),
    Job("train, stage 2", (*TRAIN, "--stage", "2", "train.lora_rank=2", "train.max_length=96"), training),
    Job("import", IMPORT, imported, fresh=True, once="drafter/config.json"),
    Job("merge", ("merge", "given/", "--run", "r", "--quiet"), conversations, fresh=True),
)
WRITERS = 2  # of these, the first, several at once are tried on one run
SHARED = (
    Job("distill, 2 processes", DISTILL, conversations, 2, fresh=True),
    Job("distill, 3 processes", DISTILL, conversations, 3, fresh=True),
)


@dataclass
class Known:
    """An uninterrupted run of a job: where it started, what it left, how long it took, its file operations."""

    job: Job
    base: Path
    facts: Facts
    seconds: float
    operations: list[int]


def prepare(place: Path) -> None:
    """A tiny model, seeds and questions to work on, heads from elsewhere, and conversations of another run."""
    made = save_run(place / "made", save_model(place / "model"), calibrated=True)
    export_medusa(find_source(f"{made.path}/"), place / "theirs")
    save_conversations(place / "given", made.owner or {})
    shutil.rmtree(made.path)
    draw = random.Random(0)
    seeds = [
        {"id": f"s{n}", "messages": [{"role": "user", "content": " ".join(f"w{draw.randrange(57)}" for _ in range(4))}]}
        for n in range(24)
    ]
    (place / "seeds.json").write_text(json.dumps(seeds))
    save_questions(place / "questions.jsonl", 2)


def save_conversations(folder: Path, owner: dict[str, Any]) -> None:
    """A run with conversations and states as `distill` leaves them, drawn at random."""
    run, draw = Run.open(f"{folder}/", create=True), torch.Generator().manual_seed(0)
    run.bind(owner)
    writer = Records(run, HIDDEN, provenance(owner, seed="seeds.json", settings={}))
    for number in range(24):
        tokens = torch.randint(4, 60, (12,), generator=draw).tolist()
        said = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
        writer.write(Conversation(f"s{number}", said, tokens, [(4, 12)]), torch.randn(11, HIDDEN, generator=draw))
    writer.close()


def needed(only: str, rounds: int) -> list[Job]:
    """The jobs whose names begin so, and those that others stand on, or that write one run at once."""
    chain = [job for job in JOBS if not job.fresh]
    last = max((at for at, job in enumerate(chain, 1) if job.name.startswith(only)), default=1)
    return chain[: max(last, WRITERS if rounds else 1)] + [
        job for job in (*JOBS, *SHARED) if job.fresh and job.name.startswith(only)
    ]


def learn(scratch: Path, jobs: Sequence[Job]) -> list[Known]:
    """Run commands in their order, keeping where each started and what it left."""
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
            f"{job.name}: {known[-1].seconds:.1f} s, {sum(operations)} file operations, {len(facts)} facts", flush=True
        )
        if job.size > 1:
            assert sorted(facts) == sorted(known[0].facts), f"{job.name} differs from distill"
    return known


@dataclass
class Count:
    """What came of the kills."""

    kills: Counter[str] = field(default_factory=Counter)
    late: int = 0  # they met a command that had ended
    lost: int = 0
    doubled: int = 0
    changed: int = 0
    left: int = 0
    refused: int = 0
    rounds: int = 0
    faults: list[str] = field(default_factory=list)

    def compare(self, what: str, expected: Facts, found: Facts) -> None:
        want, have = Counter(name for name, _ in expected), Counter(name for name, _ in found)
        values = dict(expected)
        lost, doubled = (want - have).total(), (have - want).total()
        changed = sum(values.get(name, value) != value for name, value in found)
        self.lost, self.doubled, self.changed = self.lost + lost, self.doubled + doubled, self.changed + changed
        if lost or doubled or changed:
            self.faults.append(f"{what}: {lost} lost, {doubled} doubled, {changed} changed")

    def leftovers(self, what: str, run: Path) -> None:
        """Temporary files that nobody will ever take away."""
        found = [path for path in run.rglob(".*") if path.name != ".lock"]
        self.left += len(found)
        if found:
            self.faults.append(f"{what}: left {', '.join(path.name for path in found)}")


def strike(known: Known, place: Path, count: Count, draw: random.Random, begun: float) -> None:
    """Start the command and kill it: after a random time, or before a random file operation."""
    job = known.job
    if draw.random() < 0.5:
        victim = draw.randrange(job.size)
        children = job.start(place, begun, die_at=draw.randint(1, known.operations[victim]), victim=victim)
        hit = end(children)
    else:
        children = job.start(place, begun)
        hit = end(children, until=time.monotonic() + draw.uniform(0, 1.5 * known.seconds))
    count.kills[job.name] += hit
    count.late += not hit
    bad = [child for child in children if child.code not in (0, -SIGKILL)]
    if bad and not hit:
        count.faults.append(f"{job.name}: ended with {bad[0].code}: {bad[0].said.read_text()}")
    count.faults += [f"{job.name}: {name} is half written" for name in half(place / RUN)]


def crash(known: Sequence[Known], scratch: Path, kills: int, draw: random.Random, count: Count) -> None:
    """Kill commands, one to three times each, until there were so many kills, comparing after each."""
    turn = 0
    while count.kills.total() < kills and len(count.faults) < 10:
        one = known[turn % len(known)]
        turn += 1
        place = scratch / "trial"
        shutil.copytree(one.base, place)
        begun = time.time()
        for _ in range(draw.randint(1, 3)):
            strike(one, place, count, draw, begun)
        try:
            count.compare(one.job.name, one.facts, one.job.finish(place, begun)[0])
        except (AssertionError, OSError, ValueError, UserError) as reason:
            count.faults.append(f"{one.job.name}: could not go on: {reason}")
        if LOCKED:
            count.leftovers(one.job.name, place / RUN)
        shutil.rmtree(place)


LOCKED = importlib.util.find_spec("medusa_cli.runs.run") is not None


def contend(known: Sequence[Known], scratch: Path, rounds: int, count: Count) -> None:
    """Start two or three writers of one run at once: one writes what it would alone, the others are refused."""
    writers = known[:WRITERS]
    for number in range(rounds):
        one, size = writers[number % len(writers)], 2 + number // len(writers) % 2
        place = scratch / "trial"
        shutil.copytree(one.base, place)
        begun = time.time()
        children = [start(one.job.next(place, begun), place, rank=rank) for rank in range(size)]
        end(children)
        refused = [child for child in children if child.code == 1]
        said = [child.said.read_text() for child in refused]
        clear = all(text.count("\n") == 1 and "is being written by" in text for text in said)
        count.refused += len(refused)
        if len(refused) != size - 1 or sum(child.code == 0 for child in children) != 1 or not clear:
            count.faults.append(f"{size} x {one.job.name}: {[child.code for child in children]}, {said}")
        count.compare(f"{size} x {one.job.name}", one.facts, one.job.facts(place / RUN))
        count.rounds += 1
        shutil.rmtree(place)


def main() -> int:
    words = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__.split("\n")[0])
    words.add_argument("--kills", type=int, default=100)
    words.add_argument("--rounds", type=int, default=20)
    words.add_argument("--only", default="", metavar="NAME", help="kill the commands whose names begin so")
    words.add_argument("--random-seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = words.parse_args()
    torch.set_num_threads(1)
    os.environ.update(TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg", HF_HUB_OFFLINE="1")
    for name in WARM:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    print(f"random seed {given.random_seed}", flush=True)
    count, began = Count(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        os.environ["MEDUSA_HOME"] = str(scratch / "home")  # what is measured of the machine is kept there, for all
        (scratch / "reference").mkdir()
        prepare(scratch / "reference")
        known = learn(scratch, needed(given.only, given.rounds))
        killed = [one for one in known if one.job.name.startswith(given.only)]
        crash(killed, scratch, given.kills, random.Random(given.random_seed), count)
        if LOCKED:
            contend(known, scratch, given.rounds, count)
        else:
            print("no lock of a run yet: two writers at once are left out")
    for name, number in count.kills.items():
        print(f"  {name}: {number} kills")
    print(
        f"{count.kills.total()} kills ({count.late} came too late), {count.lost} lost, {count.doubled} doubled, "
        f"{count.changed} changed, {count.left} files left; {count.rounds} rounds of several writers, "
        f"{count.refused} refused; {time.monotonic() - began:.0f} s"
    )
    for fault in count.faults:
        print(f"FAULT {fault}")
    return 1 if count.faults else 0


if __name__ == "__main__":
    sys.exit(main())
