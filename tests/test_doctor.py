"""`medusa doctor`: each check finds the fault that was planted and is quiet without it; nothing in the run changes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from medusa_cli.data.conversation import read_conversations
from medusa_cli.data.packing import held_out_ids
from medusa_cli.decode import Stats
from medusa_cli.doctor import CHECKS, Case, Finding, chosen, examine, worst
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import encode
from medusa_cli.runs.accuracies import STAMP, stamp_of
from medusa_cli.runs.io import write_json
from medusa_cli.runs.run import Run, provenance
from medusa_cli.train.events import Stepped, Validated
from medusa_cli.train.log import TrainLog
from medusa_cli.tree.io import save_tree
from medusa_cli.tree.search import Costs
from tests.helpers import TREE, generate_plain, medusa, save_model, save_questions, save_run, tiny_backbone

NAMES = [check.name for check in CHECKS]


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return tiny_backbone()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone) -> Run:
    """A sound run: conversations in the model's own words, a drafter, a calibration and a tree of that drafter."""
    folder = tmp_path_factory.mktemp("doctor")
    run = save_run(folder / "run", save_model(folder / "model"), calibrated=True)
    write_json(run.calibration_path, {"accuracies": [[0.3, 0.1, 0.05]] * 3, STAMP: stamp_of(run.drafter_dir)})
    save_tree(run.tree_path, TREE, provenance({}, **{STAMP: stamp_of(run.drafter_dir)}))
    write_data(run, [own(backbone, number) for number in range(12)])
    write_log(run)
    return run


@pytest.fixture
def case(made: Run, backbone: Backbone, tmp_path: Path) -> Case:
    """The sound run's copy, with a backbone that is loaded already."""
    found = Case(Run(Path(shutil.copytree(made.path, tmp_path / "run"))), "mine", "m")
    found.__dict__["backbone"] = backbone
    return found


def own(backbone: Backbone, number: int) -> dict[str, Any]:
    """A conversation that the model would have, as `distill` writes it."""
    messages = [{"role": "user", "content": f"w{number} w{number + 1}"}]
    prompt = backbone.encode_chat(messages)
    tokens = [one for step in generate_plain(backbone, prompt, max_new_tokens=24) for one in step.tokens]
    messages.append({"role": "assistant", "content": backbone.decode(tokens)})
    spans = [[len(prompt), len(prompt) + len(tokens)]]
    return {"id": f"c{number}", "messages": messages, "tokens": [*prompt, *tokens], "spans": spans}


def write_data(run: Run, records: list[dict[str, Any]]) -> None:
    run.distill_path.write_text("".join(json.dumps(one) + "\n" for one in records))


def change_data(run: Run, change: Callable[[dict[str, Any]], None], every: int = 1) -> None:
    records = [json.loads(line) for line in run.distill_path.read_text().splitlines()]
    for record in records[::every]:
        change(record)
    write_data(run, records)


def write_log(
    run: Run, *, error: Callable[[int], float] = lambda n: 0.4, gap: float = 0.02, rise: float = 0.0, count: int = 10
) -> None:
    """A training's log: held-out errors by positions, a gap to the trained ones, a rise of the last held-out loss."""
    log = TrainLog(run.path / "train.jsonl")
    for number in range(1, count + 1):
        positions = 1000 * number
        held = [1 - error(positions), 1 - 1.2 * error(positions)]
        losses = [2.0 * (1 + rise) if number == count else 2.0] * 2
        trained = [one + gap for one in held]
        log.write(Stepped(number, count, 1.0, [2.0, 2.0], trained, 1e-3, 1.0, 1000, positions, 1.0, {}))
        log.write(Validated(number, 1.0, losses, held, 100, positions, {}))
    log.close()


def edit(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    write_json(path, document)


def look(case: Case, name: str) -> Finding:
    found = examine(case, next(check for check in CHECKS if check.name == name))
    assert found.name == name and found.seen and (found.remedy or found.verdict == "ok")
    return found


def test_a_sound_run_passes_every_quick_check(case: Case) -> None:
    found = {check.name: examine(case, check) for check in chosen(quick=True)}
    assert {name: one.verdict for name, one in found.items() if one.verdict != "ok"} == {}
    assert [check.name for check in chosen(quick=False)] == NAMES and len(found) == len(NAMES) - 3
    assert not any(one.remedy for one in found.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_part_is_unknown_and_its_command_is_named(name: str, tmp_path: Path) -> None:
    run = Run.open(f"{tmp_path}/empty", create=True)
    found = look(Case(run, "empty", "m"), name)
    assert found.verdict == "unknown" and found.remedy.startswith("medusa ") and "--run empty" in found.remedy
    calibrated = dict.fromkeys(("calibration", "acceptance", "temperature", "tree size"), "calibrate")
    trained = dict.fromkeys(("backbone", "over-fitting", "training length"), "train")
    assert found.remedy.split()[1] == {**calibrated, **trained, "tree": "tree"}.get(name, "distill")


def test_damaged_parts_are_unknown_and_say_which_file_it_is(case: Case) -> None:
    for path, name, maker in (
        (case.run.calibration_path, "calibration", "calibrate"),
        (case.run.tree_path, "tree", "tree"),
        (case.run.drafter_dir / "config.json", "backbone", "train"),
        (case.run.distill_path, "own words", "distill"),
    ):
        path.write_text("{")
        found = look(case, name)
        assert found.verdict == "unknown" and str(path) in found.seen, found
        assert found.remedy.startswith(f"medusa {maker} --run mine")


@pytest.mark.parametrize(
    ("change", "verdict", "named"),
    [
        (lambda made: made.update(weights="another"), "bad", "weights"),
        (lambda made: made.update(adapter="5eed"), "bad", "5eed"),
        (lambda made: made.update(rounding="bnb.nf4"), "warn", "bnb.nf4"),
        (lambda made: made.clear(), "unknown", ""),
    ],
)
def test_another_model_than_the_drafter_was_trained_on_is_found(
    case: Case, change: Callable[[Any], None], verdict: str, named: str
) -> None:
    edit(case.run.drafter_dir / "config.json", lambda config: change(config["provenance"]["backbone"]))
    found = look(case, "backbone")
    assert found.verdict == verdict and named in found.seen


@pytest.mark.parametrize("name", ["calibration", "tree"])
def test_a_part_of_an_earlier_drafter_is_found(case: Case, name: str) -> None:
    edit(case.run.drafter_dir / "config.json", lambda config: config["provenance"].update(created="2001-01-01"))
    found = look(case, name)
    assert found.verdict == "bad"
    assert found.remedy.startswith("medusa calibrate" if name == "calibration" else "medusa tree")


def test_another_template_than_the_datas_is_found(case: Case) -> None:
    own_template = case.backbone.tokenizer.chat_template
    try:
        case.backbone.tokenizer.chat_template = own_template.replace("<start> ", "<start> <start> ")
        found = look(case, "chat template")
    finally:
        case.backbone.tokenizer.chat_template = own_template
    assert found.verdict == "bad" and found.figures["other"] == 12 and "medusa distill" in found.remedy


def test_data_that_only_has_messages_or_only_tokens_is_told_apart(case: Case) -> None:
    change_data(case.run, lambda record: [record.pop(key) for key in ("tokens", "spans")])
    assert look(case, "chat template").verdict == look(case, "answer mask").verdict == "ok"
    bare = Case(case.run, "mine", "m")
    bare.__dict__["backbone"] = case.backbone
    write_data(case.run, [{"id": "a", "tokens": list(range(8, 30)), "spans": [[4, 20]]}])
    assert look(bare, "chat template").verdict == look(bare, "answer mask").verdict == "unknown"


def test_an_answer_without_an_end_and_several_turns_are_no_fault(case: Case) -> None:
    messages = [{"role": role, "content": f"w{n} w{n + 2}"} for n, role in enumerate(["user", "assistant"] * 2)]
    tokens, spans = encode(case.backbone, messages)
    write_data(case.run, [{"id": "a", "messages": messages, "tokens": tokens, "spans": spans}])
    assert look(case, "chat template").verdict == look(case, "answer mask").verdict == "ok"
    # The second answer was cut off by the longest answer allowed: it has no end token of its own.
    cut = [*tokens[: spans[1][1] - 1]]
    write_data(
        case.run, [{"id": "a", "messages": messages, "tokens": cut, "spans": [spans[0], (spans[1][0], len(cut))]}]
    )
    again = Case(case.run, "mine", "m")
    again.__dict__["backbone"] = case.backbone
    assert look(again, "chat template").verdict == look(again, "answer mask").verdict == "ok"


@pytest.mark.parametrize("shift", [(-2, 0), (2, 0), (0, -3)])
def test_spans_that_are_not_the_answers_are_found(case: Case, shift: tuple[int, int]) -> None:
    def move(record: dict[str, Any]) -> None:
        record["tokens"].append(0)  # so that nothing ends with the tokens
        record["spans"] = [[start + shift[0], end + shift[1]] for start, end in record["spans"]]

    change_data(case.run, move)
    found = look(case, "answer mask")
    assert found.verdict == "bad" and found.figures["wrong"] == 12


def test_what_was_held_out_is_what_the_drafter_says_even_of_conversations_without_a_name(case: Case) -> None:
    recipe = {"train": {"validation_fraction": 0.5}}
    edit(case.run.drafter_dir / "config.json", lambda config: config["provenance"].update(recipe=recipe))
    change_data(case.run, lambda record: record.pop("id"))
    records, _ = read_conversations(case.run.distill_path, case.backbone)
    assert {one.record.id for one in case.held_out} == held_out_ids([record.id for record in records], 0.5)
    assert 2 <= len(case.held_out) < 12


def test_text_that_the_model_would_not_write_is_found_and_counted(case: Case) -> None:
    quiet = look(case, "own words")
    assert quiet.figures["share"] == 0 and quiet.figures["greedy_agreement"] > 0.99
    chance = torch.Generator().manual_seed(0)

    def replace(record: dict[str, Any]) -> None:
        [(start, end)] = record["spans"]
        record["tokens"][start:end] = torch.randint(8, 60, (end - start,), generator=chance).tolist()

    change_data(case.run, replace)
    foreign = Case(case.run, "mine", "m")
    foreign.__dict__["backbone"] = case.backbone
    found = look(foreign, "own words")
    assert found.verdict == "bad" and found.figures["share"] > 0.9
    assert found.figures["logprob"] < found.figures["expected_logprob"] - 1 and "distill" in found.remedy


def test_text_sampled_from_the_model_is_its_own(case: Case) -> None:
    from medusa_cli.decode.sampling import sampling_of

    records = []
    for number in range(8):
        record = own(case.backbone, number)
        prompt = record["tokens"][: record["spans"][0][0]]
        rule = sampling_of("exact", 1.0, 1.0, 0, number)
        steps = generate_plain(case.backbone, prompt, max_new_tokens=40, sampling=rule)
        tokens = [one for step in steps for one in step.tokens]
        records.append({**record, "tokens": [*prompt, *tokens], "spans": [[len(prompt), len(prompt) + len(tokens)]]})
    write_data(case.run, records)
    found = look(case, "own words")
    assert found.verdict == "ok" and found.figures["greedy_agreement"] < 0.95


@pytest.mark.parametrize(
    ("words", "verdict"),
    [({"gap": 0.06}, "warn"), ({"gap": 0.2}, "bad"), ({"rise": 0.04}, "warn"), ({"rise": 0.2}, "bad"), ({}, "ok")],
)
def test_heads_that_know_their_own_text_better_are_found(case: Case, words: dict[str, float], verdict: str) -> None:
    write_log(case.run, **words)  # type: ignore[arg-type]
    found = look(case, "over-fitting")
    assert found.verdict == verdict
    assert ("--max-samples 24" in found.remedy) == (verdict != "ok")


def test_a_curve_that_still_falls_asks_for_more_positions_and_says_how_sure_it_is(case: Case) -> None:
    write_log(case.run, error=lambda n: 3.0 * n**-0.25)
    found = look(case, "training length")
    assert found.verdict == "warn" and "train.max_tokens=20000" in found.remedy
    # A true power law: what it foretells is known.
    assert found.figures["expected_accuracies"][0] == pytest.approx(1 - 3.0 * 20_000**-0.25, abs=1e-6)
    assert found.figures["law_missed_by"] == pytest.approx(0, abs=1e-6)
    # One that levels off: tried on its own end, the law is found wanting, and says by how much.
    write_log(case.run, error=lambda n: 0.3 + 0.3 * (n / 1000) ** -2)
    case.__dict__.pop("log")
    assert look(case, "training length").figures["law_missed_by"] > 0.02


def test_a_curve_that_is_flat_or_too_short_asks_for_nothing_it_cannot_know(case: Case) -> None:
    assert look(case, "training length").verdict == "ok"
    write_log(case.run, count=3)
    case.__dict__.pop("log")
    found = look(case, "training length")
    assert found.verdict == "unknown"


def test_what_helps_by_distilling_is_not_refused_by_what_is_there(case: Case, tmp_path: Path) -> None:
    """By the settings of what is there in the same run; with others, or where it is unfit, in a run beside it."""
    assert case.distill(max_samples=9) == "medusa distill --run mine --max-samples 9"
    told = {"max_new_tokens": 64, "max_turns": 2, "temperature": 0.0, "random_seed": 3}
    write_json(case.run.path / "distill.json", {"seed": "my seeds.json", "settings": told})
    words = "--seed 'my seeds.json' --max-new-tokens 64 --random-seed 3"
    assert case.distill(max_samples=9) == f"medusa distill --run mine {words} --max-samples 9"
    other = words.replace("--random", "--temperature 0.7 --random")
    assert case.distill(anew=True, temperature="0.7") == f"medusa distill --run mine-anew --model m {other}"
    case.run.template_path.write_text("{{ messages }}")
    write_json(case.run.path / "distill.json", {"seed": "s", "settings": {"rounding": "int8", "chat_template": "5eed"}})
    assert case.distill() == "medusa distill --run mine --seed s --quantize int8"
    template = f"--chat-template {case.run.template_path}"
    assert case.distill(anew=True) == f"medusa distill --run mine-anew --model m {template} --seed s --quantize int8"
    write_json(case.run.path / "distill.json", {"settings": {"rounding": "bnb.nf4"}})
    assert case.distill() == "medusa distill --run mine --quantize bnb.nf4"
    (case.run.path / "distill.json").write_text("{")
    assert case.distill() == "medusa distill --run mine"
    case.called = None
    assert case.distill(anew=True) == "medusa distill --run mine"


def came(steps: int, accepted: int) -> list[Stats]:
    return [Stats(steps=steps, accepted=accepted + number % 2) for number in range(6)]


@pytest.mark.parametrize(("accepted", "verdict"), [(21, "ok"), (16, "warn"), (2, "bad")])
def test_acceptance_that_falls_short_of_what_was_promised_is_found(case: Case, accepted: int, verdict: str) -> None:
    case.answered[0.0] = came(40, accepted)
    found = look(case, "acceptance")
    assert found.verdict == verdict and found.figures["expected"] == pytest.approx(1.547)
    assert ("medusa calibrate" in found.remedy) == (verdict != "ok")
    case.run.calibration_path.unlink()
    assert look(case, "acceptance").verdict == "unknown"


@pytest.mark.parametrize(("sampled", "verdict"), [(39, "ok"), (28, "warn"), (5, "bad")])
def test_what_sampling_costs_is_found(case: Case, sampled: int, verdict: str) -> None:
    case.answered |= {0.0: came(40, 40), 0.7: came(40, sampled)}
    found = look(case, "temperature")
    assert found.verdict == verdict
    assert ("--temperature 0.7" in found.remedy) == (verdict != "ok")
    case.temperature = 0.0
    assert look(case, "temperature").verdict == "ok"


@pytest.mark.parametrize(
    ("a_node", "verdict", "best"), [(0.03, "ok", (3, 8)), (0.09, "warn", (2, 3)), (0.6, "bad", (1, 1))]
)
def test_a_tree_that_is_not_worth_its_steps_is_found(
    case: Case, a_node: float, verdict: str, best: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what a node costs here, in plain steps; the tree has six, expected to settle 1.547 tokens."""
    costs = Costs({n: 1 + a_node * (n - 1) for n in (1, 2, 4, 8, 16, 40)}, {depth: 0.001 for depth in (1, 2, 3)})
    monkeypatch.setattr("medusa_cli.doctor.checks.costs_for", lambda *words, **more: costs)
    case.answered[0.0] = came(40, 22)
    found = look(case, "tree size")
    assert found.verdict == verdict and best[0] <= found.figures["best_nodes"] <= best[1], found
    assert found.figures["overhead"] == pytest.approx(1 + 5 * a_node, abs=0.01)
    assert ("--budget auto" in found.remedy) == (verdict != "ok")
    case.run.tree_path.unlink()
    case.__dict__.pop("tree")  # without one of its own, decoding takes the best by itself
    assert look(case, "tree size").verdict == ("warn" if verdict == "bad" else "ok")


def doctor(*words: str) -> Result:
    return medusa("doctor", "--dtype", "fp32", *words)


def test_the_command_examines_a_run_and_leaves_it_as_it_is(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.decode.costs.home", lambda: tmp_path / "home")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in made.path.rglob("*") if path.is_file()}
    done = doctor("--run", str(made.path), "--json", "--temperature", "1")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [one["name"] for one in document["findings"]] == NAMES
    assert document["verdict"] == worst([Finding(**one) for one in document["findings"]])
    figures = {one["name"]: one["figures"] for one in document["findings"]}
    assert figures["acceptance"]["measured"] >= 1 and figures["acceptance"]["prompts"] == 1  # one was held out
    assert figures["temperature"]["temperature"] == 1 and figures["tree size"]["overhead"] > 0
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in made.path.rglob("*") if path.is_file()}
    assert after == before
    quick = doctor("--run", str(made.path), "--quick")
    assert quick.exit_code == 0 and "temperature" not in quick.stdout


def test_without_a_run_it_examines_what_ships(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone: Backbone
) -> None:
    shipped = Run(tmp_path / "ships")
    shutil.copytree(made.drafter_dir, shipped.drafter_dir)
    for path in (made.calibration_path, made.tree_path):
        shutil.copy(path, shipped.path)
    questions = Path(save_questions(tmp_path / "q.jsonl"))
    monkeypatch.setattr("medusa_cli.assets.mt_bench_path", lambda: questions)
    monkeypatch.setattr(Run, "pretrained", classmethod(lambda cls, name: shipped))
    case = Case(shipped, None, "m", tokens=6)
    case.__dict__["backbone"] = backbone
    found = {name: look(case, name) for name in ("backbone", "acceptance", "temperature", "own words", "tree")}
    assert found["acceptance"].figures["prompts"] == 4
    assert found["own words"].verdict == "unknown" and "--run mine" in found["own words"].remedy
    assert found["backbone"].verdict == found["tree"].verdict == "ok"
    done = doctor("--quick", "--model", made.model or "")
    assert done.exit_code == 0


def test_impossible_flags_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, code, named in (
        (["--run", "no/where"], 1, "no/where"),
        (["--temperature", "-1"], 2, "--temperature"),
        (["--model", str(tmp_path)], 1, str(tmp_path)),
    ):
        done = doctor(*words)
        assert done.exit_code == code and named in done.stderr.splitlines()[-1], done.output
