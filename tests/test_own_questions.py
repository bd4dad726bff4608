"""The model's own questions as seeds: what it writes after the template's header, kept, gone on with, refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from medusa_cli.backbone import Backbone
from medusa_cli.cli import app
from medusa_cli.distilling import Seed
from medusa_cli.distilling.filters import plain
from medusa_cli.distilling.own_questions import ask, questions
from medusa_cli.distilling.seeds import read_seeds
from medusa_cli.distilling.selftalk import check_opening, user_turn
from medusa_cli.errors import UserError
from medusa_cli.runs.run import Run
from tests import forked
from tests.tiny import END_ID, tiny_backbone


def talkative() -> Backbone:
    """A tiny model whose turns end soon: a random one hardly ever says its end token."""
    backbone = tiny_backbone("llama")
    with torch.no_grad():
        backbone.model.get_output_embeddings().weight[END_ID] *= 2.0
    return backbone


def test_questions_are_what_the_model_draws_after_a_users_header() -> None:
    backbone = talkative()
    found = list(ask(backbone, 12, slots=5))
    assert len(found) == 12 and len({plain(one.turns[0]) for one in found}) == 12
    header = user_turn(backbone, [])
    assert header is not None
    whole = backbone.encode_chat([{"role": "user", "content": found[0].turns[0]}])
    assert whole[: len(header)] == header
    alone = {one.id: one.turns for one in ask(backbone, 12, slots=1)}
    shared = [one for one in found if one.id in alone]
    assert shared and all(alone[one.id] == one.turns for one in shared), "a draw is its own, whatever runs beside it"
    other = {one.turns for one in ask(backbone, 12, slots=5, random_seed=1)}
    assert other != {one.turns for one in found}


def test_what_is_known_is_not_asked_again_and_draws_go_on() -> None:
    backbone = talkative()
    found = list(ask(backbone, 6, slots=3))
    more = list(ask(backbone, 6, found, slots=3))
    assert not {one.id for one in found} & {one.id for one in more}
    assert not {plain(one.turns[0]) for one in found} & {plain(one.turns[0]) for one in more}
    last = max(int(one.id.partition("-")[2]) for one in found)
    assert all(int(one.id.partition("-")[2]) > last for one in more)


def test_the_file_is_taken_up_where_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, run, told = talkative(), Run(tmp_path), list[int]()
    monkeypatch.setattr("medusa_cli.distilling.own_questions.KEPT_EVERY", 2)

    def stop(count: int) -> None:
        told.append(count)
        if sum(told) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        questions(backbone, run, 8, slots=3, on_question=stop)
    kept = run.questions_path.read_text().splitlines()
    assert len(kept) == 5
    counts: list[int] = []
    whole = questions(backbone, run, 8, slots=3, on_question=counts.append)
    assert counts == [5, 1, 1, 1] and len(whole) == 8
    assert run.questions_path.read_text().splitlines()[:5] == kept
    assert questions(backbone, run, 3, slots=3) == whole[:3]
    # Lines of one's own stay, and are asked too.
    run.questions_path.write_text(json.dumps({"id": "mine", "messages": [{"role": "user", "content": "w1"}]}) + "\n")
    assert questions(backbone, run, 2, slots=3)[0] == Seed("mine", ("w1",))


def test_a_model_that_ends_no_question_is_told_of(tmp_path: Path) -> None:
    backbone = tiny_backbone("llama")
    with torch.no_grad():
        backbone.model.get_output_embeddings().weight[END_ID] = 0.0
        backbone.model.get_output_embeddings().weight[END_ID, 0] = -100.0
    backbone.eos_ids = frozenset()
    with pytest.raises(UserError, match="ended none of 68 questions"):
        questions(backbone, Run(tmp_path), 1, slots=64)
    assert not Run(tmp_path).questions_path.exists()


def test_a_template_without_a_place_for_the_user_is_refused() -> None:
    backbone = tiny_backbone("llama")
    check_opening(backbone)
    backbone.tokenizer.chat_template = "hello"
    with pytest.raises(UserError, match="seed self: the chat template of 'tiny-llama' cannot be cut"):
        check_opening(backbone)


def medusa(*words: Any) -> Result:
    return CliRunner().invoke(app, [str(one) for one in words])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("questions") / "model"
    backbone = talkative()
    backbone.model.set_attn_implementation("eager")
    backbone.model.save_pretrained(place)
    backbone.tokenizer.save_pretrained(place)
    return place


def words(model: Path, run: Path, *more: str) -> list[str]:
    short = ("--quiet", "--dtype", "fp32", "--max-new-tokens", "8", "--context", "200", "--batch-size", "4")
    return ["distill", "--seed", "self", "--model", str(model), "--run", str(run), *short, *more]


def test_distill_asks_answers_and_goes_on(model: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    done = medusa(*words(model, run.path, "--max-samples", "6", "--json"))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["conversations"] == 6
    records = [json.loads(line) for line in run.distill_path.read_text().splitlines()]
    asked = {one["id"]: one["messages"][0]["content"] for one in map(json.loads, run.questions_path.open())}
    assert {one["id"]: one["messages"][0]["content"] for one in records} == asked
    assert json.loads((run.path / "distill.json").read_text())["seed"] == "self"
    more = medusa(*words(model, run.path, "--max-samples", "9", "--json"))
    assert more.exit_code == 0 and json.loads(more.stdout)["conversations"] == 9, more.output
    assert run.distill_path.read_text().splitlines()[:6] == [json.dumps(one, ensure_ascii=False) for one in records]
    other = medusa(*words(model, run.path, "--random-seed", "1", "--max-samples", "9"))
    assert other.exit_code == 1 and "was distilled with settings" in other.stderr
    again = medusa("distill", "--seed", run.questions_path, *words(model, tmp_path / "file")[3:])
    assert again.exit_code == 0, again.output


def test_fewer_questions_than_asked_for_are_answered_and_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.distilling.own_questions._draws", lambda count: 6)
    done = medusa(*[one for one in words(model, tmp_path / "run", "--max-samples", "9", "--json") if one != "--quiet"])
    assert done.exit_code == 0, done.output
    made = len(Run(tmp_path / "run").questions_path.read_text().splitlines())
    assert 0 < made <= 6 and json.loads(done.stdout)["conversations"] == made
    assert f"--seed self: the model ended {made} questions, 9 were asked for" in " ".join(done.stderr.split())


def test_the_models_own_questions_are_no_file_of_seeds() -> None:
    with pytest.raises(UserError, match="seed self names no file"):
        read_seeds("self")


def test_processes_answer_what_the_first_asked(model: Path, tmp_path: Path) -> None:
    done = forked.run(words(model, tmp_path / "two", "--max-samples", "6", "--json"), tmp_path / "said", size=2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["conversations"] == 6
    one = medusa(*words(model, tmp_path / "one", "--max-samples", "6"))
    assert one.exit_code == 0
    answers = [
        {found["id"]: found["messages"] for found in map(json.loads, (tmp_path / name / "distill.jsonl").open())}
        for name in ("one", "two")
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--endpoint", "http://127.0.0.1:9"), 2, "--seed self needs the model here"),
        (("--max-samples", "0"), 2, "--max-samples"),
    ],
)
def test_what_cannot_be_is_refused(model: Path, tmp_path: Path, more: tuple[str, ...], code: int, said: str) -> None:
    done = medusa(*words(model, tmp_path / "run", *more))
    assert done.exit_code == code and said in done.stderr
    assert not (tmp_path / "run" / "distill.jsonl").exists()
