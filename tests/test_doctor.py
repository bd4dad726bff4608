"""`medusa doctor`: each check finds the fault that was planted and is quiet without it; nothing in the run changes."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.data.conversation import read_conversations
from medusa_cli.data.packing import held_out_ids
from medusa_cli.decode import Stats
from medusa_cli.decode.sampling_options import sampling_of
from medusa_cli.doctor import CHECKS, STATUSES, Case, Finding, examine
from medusa_cli.files.io import write_json
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone
from medusa_cli.runs.run import STAMP, Run, provenance, stamp_of
from medusa_cli.train.log import Stepped, TrainLog, Validated
from medusa_cli.tree.io import save_tree
from tests.helpers import TREE, change_json, generate_plain, medusa, save_questions, save_run


@pytest.fixture(scope="module")
def sound(model: str, backbone: Backbone) -> Run:
    """A sound run: conversations in the model's own words, a drafter, a calibration and a tree of that drafter."""
    run = save_run(Path(model).with_name("run"), model, calibrated=True)
    write_json(
        run.calibration_path,
        {"accuracies": [[0.3, 0.1, 0.05]] * 3, STAMP: stamp_of(run.drafter_dir)},
    )
    save_tree(run.tree_path, TREE, provenance({}, **{STAMP: stamp_of(run.drafter_dir)}))
    write_data(run, [own(backbone, number) for number in range(12)])
    write_log(run)
    return run


@pytest.fixture
def case(sound: Run, backbone: Backbone, tmp_path: Path) -> Case:
    """The sound run's copy, with a backbone that is loaded already."""
    return case_of(Run(Path(shutil.copytree(sound.path, tmp_path / "run"))), backbone)


def case_of(run: Run, backbone: Backbone, called: str | None = "mine") -> Case:
    case = Case(run, called, ModelSource.of("m"))
    case.__dict__["backbone"] = backbone
    return case


def own(backbone: Backbone, number: int, temperature: float = 0.0) -> dict[str, Any]:
    """A conversation that the model would have, as `distill` writes it."""
    messages = [{"role": "user", "content": f"w{number} w{number + 1}"}]
    prompt = backbone.encode_chat(messages)
    sampling = sampling_of(None, temperature or None, 1.0, 0, number)
    steps = generate_plain(
        backbone, prompt, max_new_tokens=40 if temperature else 24, sampling=sampling
    )
    tokens = [token for step in steps for token in step.tokens]
    messages.append({"role": "assistant", "content": backbone.decode(tokens)})
    spans = [[len(prompt), len(prompt) + len(tokens)]]
    return {"id": f"c{number}", "messages": messages, "tokens": [*prompt, *tokens], "spans": spans}


def write_data(run: Run, records: list[dict[str, Any]]) -> None:
    run.distill_path.write_text("".join(json.dumps(record) + "\n" for record in records))


def change_data(run: Run, change: Callable[[dict[str, Any]], None]) -> None:
    records = [json.loads(line) for line in run.distill_path.read_text().splitlines()]
    for record in records:
        change(record)
    write_data(run, records)


def write_log(
    run: Run,
    *,
    error: Callable[[int], float] = lambda n: 0.4,
    gap: float = 0.02,
    rise: float = 0.0,
    count: int = 10,
) -> None:
    """A training's log: held-out errors by positions, a gap to the trained ones, a rise of the last held-out loss."""
    log = TrainLog(run.path / "train.jsonl")
    for number in range(1, count + 1):
        positions = 1000 * number
        held_out = [1 - error(positions), 1 - 1.2 * error(positions)]
        losses = [2.0 * (1 + rise) if number == count else 2.0] * 2
        trained = [share + gap for share in held_out]
        log.write(
            Stepped(number, count, 1.0, [2.0, 2.0], trained, 1e-3, 1.0, 1000, positions, 1.0, {})
        )
        log.write(Validated(number, 1.0, losses, held_out, 100, positions, {}))
    log.close()


def look(case: Case, name: str) -> Finding:
    finding = examine(case, name)
    assert finding.name == name
    assert finding.text
    assert (finding.remedy == "") == (finding.status == "pass")
    return finding


@pytest.mark.slow
def test_a_sound_run_passes_every_quick_check(case: Case) -> None:
    statuses = {name: examine(case, name).status for name in CHECKS if name != "acceptance"}
    assert set(statuses.values()) == {"pass"}, statuses


@pytest.mark.parametrize("name", CHECKS)
def test_a_missing_part_is_unknown_and_its_command_is_named(name: str, tmp_path: Path) -> None:
    finding = look(
        Case(Run.open(f"{tmp_path}/empty", create=True), "empty", ModelSource.of("m")), name
    )
    calibrated = dict.fromkeys(("calibration", "acceptance"), "calibrate")
    trained = dict.fromkeys(("backbone", "first level", "over-fitting", "training length"), "train")
    command = {**calibrated, **trained, "tree": "tree"}.get(name, "distill")
    assert finding.status == "unknown"
    assert finding.remedy.startswith(f"medusa {command} --run empty")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("calibration.json", "calibration"),
        ("tree.json", "tree"),
        ("drafter/config.json", "backbone"),
    ]
    + [("distill.jsonl", "own words")],
)
def test_damaged_parts_are_unknown_and_name_their_file(case: Case, path: str, name: str) -> None:
    (case.run.path / path).write_text("{")
    finding = look(case, name)
    assert finding.status == "unknown"
    assert path in finding.text


@pytest.mark.parametrize(
    ("change", "status", "part"),
    [
        (lambda trained: trained.update(weights="another"), "fail", "earlier weights"),
        (lambda trained: trained.update(adapter="5eed"), "fail", "5eed"),
        (lambda trained: trained.update(rounding="bnb.nf4"), "warn", "bnb.nf4"),
        (lambda trained: trained.clear(), "unknown", ""),
    ],
)
def test_another_model_than_the_drafter_was_trained_on_is_found(
    case: Case, change: Callable[[Any], None], status: str, part: str
) -> None:
    change_json(
        case.run.drafter_dir / "config.json",
        lambda config: change(config["provenance"]["backbone"]),
    )
    finding = look(case, "backbone")
    assert finding.status == status
    assert part in finding.text


@pytest.mark.parametrize(("name", "command"), [("calibration", "calibrate"), ("tree", "tree")])
def test_a_part_of_an_earlier_drafter_is_found(case: Case, name: str, command: str) -> None:
    change_json(
        case.run.drafter_dir / "config.json",
        lambda config: config["provenance"].update(created="2001-01-01"),
    )
    finding = look(case, name)
    assert finding.status == "fail"
    assert finding.remedy.startswith(f"medusa {command}")


def test_conversations_held_out_in_training_come_first(case: Case) -> None:
    recipe = {"train": {"validation_fraction": 0.5}}
    change_json(
        case.run.drafter_dir / "config.json",
        lambda config: config["provenance"].update(recipe=recipe),
    )
    change_data(case.run, lambda record: record.pop("id"))
    records, _ = read_conversations(case.run.distill_path, case.backbone)
    held_out = held_out_ids([record.id for record in records], 0.5)
    first = case.conversations[: len(held_out)]
    assert {conversation.id for conversation in first} == held_out
    assert 2 <= len(held_out) < 12


@pytest.mark.slow
def test_text_that_the_model_would_not_write_is_found(case: Case) -> None:
    greedy = look(case, "own words")
    assert greedy.status == "pass"
    assert greedy.figures["greedy_agreement"] > 0.99
    write_data(case.run, [own(case.backbone, number, temperature=1.0) for number in range(8)])
    sampled = look(case_of(case.run, case.backbone), "own words")
    assert sampled.status == "pass"
    assert sampled.figures["greedy_agreement"] < 0.95
    chance = torch.Generator().manual_seed(0)

    def replace(record: dict[str, Any]) -> None:
        [(start, end)] = record["spans"]
        record["tokens"][start:end] = torch.randint(
            8, 60, (end - start,), generator=chance
        ).tolist()

    change_data(case.run, replace)
    finding = look(case_of(case.run, case.backbone), "own words")
    assert finding.status == "fail"
    assert "distill" in finding.remedy
    assert finding.figures["logprob"] < finding.figures["expected_logprob"] - 1


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ({"gap": 0.06}, "warn"),
        ({"gap": 0.2}, "fail"),
        ({"rise": 0.04}, "warn"),
        ({"rise": 0.2}, "fail"),
        ({}, "pass"),
    ],
)
def test_heads_that_know_their_own_text_better_are_found(
    case: Case, words: dict[str, float], status: str
) -> None:
    write_log(case.run, **words)  # type: ignore[arg-type]
    assert look(case, "over-fitting").status == status


@pytest.mark.parametrize(
    ("error", "count", "status"),
    [
        (lambda n: 3.0 * n**-0.25, 10, "warn"),
        (lambda n: 0.4, 10, "pass"),
        (lambda n: 0.3 + 0.3 * (n / 1000) ** -2, 10, "pass"),
        (lambda n: 3.0 * n**-0.25, 1, "unknown"),
    ],
    ids=["falls", "flat", "levels off", "too short"],
)
def test_a_curve_that_still_falls_asks_for_more_positions(
    case: Case, error: Callable[[int], float], count: int, status: str
) -> None:
    write_log(case.run, error=error, count=count)
    finding = look(case, "training length")
    assert finding.status == status
    assert ("train.max_tokens=20000" in finding.remedy) == (status == "warn")


def test_remedy_of_over_fitting_asks_other_seeds_beside_the_same(case: Case) -> None:
    settings = {
        "max_new_tokens": 256,
        "max_turns": 1,
        "temperature": 0.0,
        "random_seed": 3,
        "taps": [],
    }
    write_json(case.run.path / "distill.json", {"seed": "sharegpt", "settings": settings})
    count = len(case.run.distill_path.read_text().splitlines())
    write_log(case.run, error=lambda n: 3.0 * n**-0.25, gap=0.2)
    for name in ("over-fitting", "training length"):
        words = look(case, name).remedy.split()
        assert words[:4] == ["medusa", "distill", "--run", "mine"], name
        assert {"distill.max_turns=1", "distill.random_seed=3"} <= set(words)
        assert dict(itertools.pairwise(words))["--max-samples"] == str(2 * count)
        assert not any("temperature" in word or "distill.seed" in word for word in words)


def stats(steps: int, accepted: int) -> list[Stats]:
    return [Stats(steps=steps, accepted=accepted + number % 2) for number in range(6)]


@pytest.mark.parametrize(("accepted", "status"), [(21, "pass"), (16, "warn"), (2, "fail")])
def test_acceptance_below_the_expected_is_found(case: Case, accepted: int, status: str) -> None:
    case.__dict__["decoded"] = stats(40, accepted)
    finding = look(case, "acceptance")
    assert finding.status == status
    assert finding.figures["expected"] == pytest.approx(1.547)
    assert ("medusa calibrate" in finding.remedy) == (status != "pass")
    case.run.calibration_path.unlink()
    assert look(case, "acceptance").status == "unknown"


def test_the_command_examines_a_run_and_leaves_it_as_it_is(
    sound: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    before = {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in sound.path.rglob("*")
        if path.is_file()
    }
    document = json.loads(medusa("doctor", "--dtype", "fp32", "--run", sound.path, "--json").stdout)
    assert [finding["name"] for finding in document["findings"]] == list(CHECKS)
    assert document["status"] == max(
        (finding["status"] for finding in document["findings"]), key=STATUSES.index
    )
    figures = {finding["name"]: finding["figures"] for finding in document["findings"]}
    assert figures["acceptance"]["measured"] >= 1
    assert figures["acceptance"]["prompts"] == 8
    after = {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in sound.path.rglob("*")
        if path.is_file()
    }
    assert after == before
    assert (
        "acceptance"
        not in medusa("doctor", "--dtype", "fp32", "--run", sound.path, "--quick").stdout
    )


def test_without_a_run_it_examines_what_ships(
    sound: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone: Backbone
) -> None:
    shipped = Run(tmp_path / "ships")
    shutil.copytree(sound.drafter_dir, shipped.drafter_dir)
    for path in (sound.calibration_path, sound.tree_path):
        shutil.copy(path, shipped.path)
    questions = Path(save_questions(tmp_path / "q.jsonl"))
    monkeypatch.setattr("medusa_cli.files.fetch.mt_bench_path", lambda: questions)
    monkeypatch.setattr(Run, "pretrained", classmethod(lambda cls, name: shipped))
    case = case_of(shipped, backbone, None)
    findings = {name: look(case, name) for name in ("backbone", "acceptance", "own words", "tree")}
    assert findings["acceptance"].figures["prompts"] == 4
    assert findings["own words"].status == "unknown"
    assert "--run mine" in findings["own words"].remedy
    assert findings["backbone"].status == findings["tree"].status == "pass"
    medusa("doctor", "--dtype", "fp32", "--quick", "--model", sound.model)
