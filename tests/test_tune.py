"""Tuning in a given time: the plan, what is expected, bad input, and the same end after a kill."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pytest

from medusa_cli.data.conversation import Conversation
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.io import write_json
from medusa_cli.files.model_source import ModelSource, lasting_name
from medusa_cli.model.digest import weights_of
from medusa_cli.runs import resolve
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.run import Run
from medusa_cli.train.log import NAME, Validated
from medusa_cli.tune import expectation, measuring
from medusa_cli.tune.plan import (
    EPOCHS,
    MAX_EPOCHS,
    Measured,
    expected_speedup,
    parse_time,
    plan,
)
from medusa_cli.tune.prompts import held_out_questions, read_prompts
from medusa_cli.tune.tuning import STATE, State, Tuning, answer_tokens, has_converged
from tests.crash import JOBS, Count, crash, learn, prepare
from tests.helpers import medusa, medusa_json, save_model, save_run, write_lines
from tests.test_adapter import save_adapter

# Seconds by rows: with AVX-512, and where a row costs more.
VERIFY = ((1, 0.016), (2, 0.017), (4, 0.019), (8, 0.023), (16, 0.035), (32, 0.06), (64, 0.11))
DEAR = ((1, 0.016), (2, 0.02), (4, 0.03), (8, 0.048), (16, 0.09), (32, 0.17), (64, 0.33))
DRAFT = ((1, 0.001), (2, 0.002), (3, 0.003))
ACCURACIES = [[0.4, 0.1, 0.05], [0.4, 0.1, 0.05], [0.45, 0.1, 0.05]]
CPU = Measured(
    62.0, {"lookup": 1.1}, {"lookup": 1.3}, VERIFY, DRAFT, ACCURACIES, 1 / 200, 1 / 800, 128, 60.0
)
RELATED = replace(
    CPU,
    speedups={"lookup": 1.1, "start": 1.3},
    lengths={"lookup": 1.3, "start": 1.7},
    position_s=1 / 300,
    start="a folder",
    limit=4.0,
)
HOUR = 3600.0


def prompts(count: int = 30) -> list[dict[str, object]]:
    chance = Random(0)
    texts = [" ".join(f"w{chance.randrange(57)}" for _ in range(4)) for _ in range(count)]
    return [
        {"id": f"s{number}", "messages": [{"role": "user", "content": text}]}
        for number, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    save_model(folder / "model")
    write_lines(folder / "prompts.jsonl", prompts())
    return folder


# The plan.


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1h", 3600), ("1h30m", 5400), (" 2H ", 7200)]
)
def test_times(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "h", "30", "-1h", "1.5h", "1d", "99999h", "1m1h"])
def test_times_that_are_not_valid(text: str) -> None:
    with pytest.raises(UsageError, match="time"):
        parse_time(text)


@pytest.mark.parametrize(
    ("measured", "hours"), [(CPU, (0.5, 1, 3)), (replace(RELATED, limit=2.6), (0.1, 0.15, 0.2))]
)
def test_a_plan_fits_its_time_and_more_time_brings_more(
    measured: Measured, hours: tuple[float, ...]
) -> None:
    plans = [plan(hour * HOUR, 100.0, measured) for hour in hours]
    for planned in plans:
        work_s = planned.distill_s + planned.train_s
        assert work_s + measured.end_s + 100 == pytest.approx(planned.time_s, rel=0.01)
        assert planned.positions == pytest.approx(EPOCHS * planned.tokens, rel=0.01)
        assert planned.drafter == ("start" if measured.start else "hydra")
    assert [p.expected for p in plans] == sorted({p.expected for p in plans})
    assert [p.tokens for p in plans] == sorted(p.tokens for p in plans)


def test_answers_that_are_known_leave_more_time_for_training() -> None:
    without, known = plan(HOUR, 0.0, CPU), plan(HOUR, 0.0, CPU, 100_000)
    assert known.tokens < without.tokens
    assert known.positions > without.positions
    everything = plan(HOUR, 0.0, CPU, 10_000_000)
    assert everything.tokens == 0
    assert everything.positions <= MAX_EPOCHS * 10_000_000


def test_a_time_that_is_too_short_plans_nothing() -> None:
    planned = plan(60.0, 30.0, CPU)
    assert planned.tokens == planned.positions == 0


def test_time_that_brings_less_than_a_percent_is_not_planned() -> None:
    fast = replace(CPU, speedups={}, answer_s=1 / 20_000, position_s=1 / 40_000, compare_s=20.0)
    planned = plan(100 * HOUR, 0.0, fast)
    assert planned.drafter == "eagle"
    assert planned.time_s < 50 * HOUR
    assert planned.positions < EPOCHS * planned.tokens
    assert planned.expected >= plan(100 * HOUR, 0.0, fast).expected / 1.01


def test_expectations_are_those_of_the_table_in_the_docs() -> None:
    page = Path("docs/training.md")
    text = (Path(__file__).parent.parent / page).read_text(encoding="utf-8")
    for row in expectation.REACHED:
        tokens = f"{row.answer_tokens:,}"
        rows = [line for line in text.splitlines() if line.startswith("|") and tokens in line]
        assert any(f"{row.length:.2f}" in line for line in rows), row
        assert expectation.reached(row.drafter, row.positions) == pytest.approx(row.length)
    lengths = [expectation.reached("eagle", 10**power) for power in range(2, 9)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 1.0
    assert lengths[-1] == 3.47


def test_what_is_expected_depends_on_what_rows_cost_here() -> None:
    """The same drafts bring less where rows cost more, and never less than plain decoding."""
    hydra, related = (
        {
            name: expected_speedup(drafter, 200_000, replace(measured, verify=verify))
            for name, verify in (("quick", VERIFY), ("dear", DEAR))
        }
        for drafter, measured in (("hydra", CPU), ("start", RELATED))
    )
    assert 1.1 <= hydra["dear"] < hydra["quick"] < 2.3
    # What was measured grows by what the new drafts gain here.
    assert 1.3 < related["dear"] < related["quick"] < 4.0
    dearest = tuple((rows, 0.016 * rows) for rows in (1, 2, 4, 8))
    assert expected_speedup("start", 10**6, replace(RELATED, verify=dearest)) == pytest.approx(1.3)
    at_its_best = replace(RELATED, limit=1.0)
    assert expected_speedup("start", 10**6, at_its_best) == pytest.approx(1.3, rel=0.01)
    # Plain decoding spends half of its time on prompts, which drafts do not shorten.
    prompts = [replace(measured, plain_per_s=0.5 / 0.016) for measured in (CPU, RELATED)]
    for drafter, measured, slower in (("hydra", CPU, prompts[0]), ("start", RELATED, prompts[1])):
        assert expected_speedup(drafter, 10**5, slower) < expected_speedup(drafter, 10**5, measured)
        assert expected_speedup(drafter, 10**9, slower) < 2.0
    busy = replace(CPU, speedups={}, verify=((1, 0.02), (2, 0.01), (4, 0.012)))
    assert expected_speedup("hydra", 0, busy) == pytest.approx(1.0)


def test_accuracies_are_scaled_to_a_length() -> None:
    for length in (1.0, 1.5, 2.5):
        rows = expectation.scaled(ACCURACIES, 8, length)
        assert expectation.best_length(rows, 8) == pytest.approx(length, abs=0.01)
        assert all(sum(row) <= 1.001 for row in rows)
    grown = expectation.adapted(ACCURACIES, expectation.ADAPTED_POSITIONS, 3.0)
    before, after = (expectation.best_length(rows, 8) for rows in (ACCURACIES, grown))
    assert after == pytest.approx(before + expectation.ADAPTED_SHARE * (3.0 - before), abs=0.01)
    low, high = re.findall(r"\d\.\d+", expectation.interval(1.4))
    assert float(low) < 1.4 < float(high)


# Prompts.


@pytest.mark.parametrize(
    ("shares", "losses", "is_converged"),
    [
        # Of a new Hydra's training: the second last validation is no better than an earlier one by chance.
        ((0.36, 0.40, 0.44, 0.47, 0.44, 0.46), (53.7, 47.9, 44.6, 43.1, 42.8, 41.4), False),
        ((0.36, 0.40, 0.44, 0.47, 0.47, 0.47), (53.7, 47.9, 44.6, 43.1, 43.0, 43.0), True),
        ((0.36, 0.40, 0.44, 0.45, 0.48, 0.49), (53.7, 47.9, 44.6, 43.1, 43.1, 43.1), False),
        ((0.36, 0.40, 0.44, 0.44, 0.43, 0.43), (53.7, 47.9, 44.6, 44.6, 45.0, 46.0), True),
        ((0.47, 0.47, 0.47, 0.47, 0.47), (43.0, 43.0, 43.0, 43.0, 43.0), False),
    ],
)
def test_training_has_converged_when_neither_drafts_nor_loss_improve(
    shares: tuple[float, ...], losses: tuple[float, ...], is_converged: bool, tmp_path: Path
) -> None:
    events = [
        Validated(step, loss, [loss / 4] * 4, [share] * 4, 512, 512 * step, {})
        for step, (share, loss) in enumerate(zip(shares, losses, strict=True), 1)
    ]
    write_lines(tmp_path / NAME, [{"event": "validated", **asdict(event)} for event in events])
    assert has_converged(Run(tmp_path)) is is_converged


def test_answers_of_the_model_are_kept_and_those_of_others_are_not(place: Path) -> None:
    model = ModelSource.of(str(place / "model"))
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    answered = {"messages": turns, "tokens": [3, 8, 9, 10, 2], "spans": [[3, 5]]}
    records = [
        *prompts(3),
        {"id": "own", "weights": weights_of(model), **answered},
        {"id": "other", "weights": "another model", **answered},
        {"id": "plain", "prompt": "w4 w5"},
        {"id": "nothing"},
        "no record",
    ]
    write_lines(place / "mixed.jsonl", records)
    with (place / "mixed.jsonl").open("a") as out:
        out.write('{"id": "cut o')
    seeds, source = read_prompts(model, place / "mixed.jsonl")
    known = {seed.id: seed for seed in seeds}
    assert source.endswith("mixed.jsonl")
    assert set(known) == {"s0", "s1", "s2", "own", "other", "plain"}
    assert known["own"].spans == [(3, 5)]
    assert not known["other"].spans
    assert known["other"].turns == ["w1 w2"]
    assert known["plain"].turns == ["w4 w5"]


def test_a_text_file_has_a_prompt_a_line(place: Path) -> None:
    (place / "prompts.txt").write_text("w1 w2\n\nw3 w4\n")
    seeds, _ = read_prompts(ModelSource.of(str(place / "model")), place / "prompts.txt")
    assert [seed.turns for seed in seeds] == [["w1 w2"], ["w3 w4"]]


def test_questions_are_held_out_prompts() -> None:
    seeds = [Conversation.from_turns(f"s{n}", [f"w{n}", "w1"], "w2") for n in range(200)]
    asked = held_out_questions(seeds)
    assert 1 <= len(asked) <= 8
    assert all(len(question.turns) == 1 for question in asked)
    assert asked == held_out_questions([*seeds, Conversation.from_turns("x", ["w" * 9_000])])
    with pytest.raises(UserError, match="data"):
        held_out_questions(seeds[:1])


# The command.


@pytest.mark.parametrize(
    ("words", "names", "code"),
    [
        (["model", "--time", "soon"], "--time", 2),
        (["random:llama-7b"], "random:llama-7b", 1),
        (["nowhere/at/all"], "nowhere/at/all", 1),
        (["model", "--data", "missing.jsonl"], "missing.jsonl", 1),
        (["model", "--data", "empty.jsonl"], "empty.jsonl", 1),
        (["model", "--data", "garbage.jsonl"], "garbage.jsonl", 1),
        (["model", "--data", "one.txt"], "--data", 1),
        (["run/drafter"], "is a drafter", 1),
    ],
)
def test_bad_input_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], names: str, code: int
) -> None:
    monkeypatch.chdir(place)
    (place / "empty.jsonl").touch()
    (place / "garbage.jsonl").write_text("{]\nnull\n")
    (place / "one.txt").write_text("w1\n")
    if not (place / "run").is_dir():
        save_run(place / "run", str(place / "model"))
    done = medusa("tune", *words, "--quiet", exit_code=code)
    assert names in done.output
    assert done.output.strip().count("\n") == 0
    assert not (place / "runs").exists()


def test_torchrun_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun" in medusa("tune", "model", exit_code=2).output


def test_a_dry_run_tells_and_writes_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    words = ("tune", "model", "--time", "2m", "--data", "prompts.jsonl", "--device", "cpu")
    facts = medusa_json(*words, "--dry-run", "--dtype", "fp32")
    assert facts["measured"]["plain_per_s"] > 0
    assert facts["measured"]["position_s"] > 0
    assert facts["promised"] >= 1.0
    assert facts["distilled"] is None
    assert sorted(place.rglob("*")) == before


def test_a_related_models_drafter_is_trained_further_if_it_is_accepted(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_model(tmp_path / "model")
    save_run(tmp_path / "shipped" / "related", model, calibrated=True)
    monkeypatch.setattr(resolve, "SHIPPED", tmp_path / "shipped")
    words = ("tune", model, "--time", "1s", "--data", place / "prompts.jsonl", "--device", "cpu")
    words += ("--dtype", "fp32", "--dry-run")
    # Random heads are seldom right.
    assert medusa_json(*words)["measured"]["start"] is None
    monkeypatch.setattr(measuring, "RIGHT", 0.0)
    facts = medusa_json(*words)
    assert facts["measured"]["start"] == str(tmp_path / "shipped" / "related")
    assert set(facts["measured"]["speedups"]) == {"lookup", "start"}
    assert facts["promised"] > 0
    # A LoRA adapter of the model has its shape.
    save_adapter(tmp_path / "lora", model)
    facts = medusa_json("tune", tmp_path / "lora", *words[2:])
    assert facts["model"] == str(tmp_path / "lora")
    assert facts["measured"]["start"] == str(tmp_path / "shipped" / "related")


def test_a_longer_tuning_is_measured_again_if_its_answers_are_longer(tmp_path: Path) -> None:
    earlier = State(lasting_name("m"), None, HOUR, used_s=99.0, measured=CPU, promised=1.2)
    write_json(tmp_path / STATE, asdict(earlier))

    def state(time_s: float) -> State:
        return Tuning(Run(tmp_path), ModelSource.of("m"), LoadOptions(), time_s).state

    assert state(HOUR) == state(60.0) == earlier
    assert answer_tokens(HOUR, 0.016) == answer_tokens(2 * HOUR, 0.016) == 128
    assert state(2 * HOUR) == replace(earlier, time_s=2 * HOUR, promised=None)
    assert answer_tokens(600, 0.016) == 78
    earlier = replace(earlier, time_s=600.0, measured=replace(CPU, answer_tokens=78))
    write_json(tmp_path / STATE, asdict(earlier))
    assert state(HOUR) == replace(earlier, time_s=HOUR, measured=None, promised=None)
    assert state(630.0) == replace(earlier, time_s=630.0, promised=None)
    # The answers of a slow model are shorter.
    assert answer_tokens(600, 0.2) == 16


@pytest.mark.quick("0")
@pytest.mark.parametrize("kills", [0, 5])
def test_a_killed_tuning_ends_as_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    (tmp_path / "reference").mkdir()
    prepare(tmp_path / "reference")
    job = next(job for job in JOBS if job.name == "tune")
    count = Count()
    _, known = learn(tmp_path, [JOBS[0], job])
    crash([known], tmp_path, kills, Random(3), count)
    assert not count.faults

    # The same command shows the end again, and other data is refused.
    monkeypatch.chdir(tmp_path / "reference tune")
    state = json.loads(Path("runs/r/tune.json").read_text())
    facts = medusa_json(*job.words[:-1])
    assert facts["after"] == state["after"]
    assert facts["used_s"] == state["used_s"]
    refused = medusa("tune", "model", "--run", "r", "--time", "1s", exit_code=1)
    assert "runs/r" in refused.output
