"""The forms of question sets that peers publish, by file and by hub id, and transformers' assisted generation."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_cli.benchmarks.sets import WITHHELD, read_questions
from medusa_cli.cli import app
from medusa_cli.errors import UserError
from tests.runs import save_model, save_questions, save_run


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def test_spec_benchs_480_questions_are_six_tasks(tmp_path: Path) -> None:
    tasks = ("writing", "stem", "translation", "summarization", "qa", "math_reasoning", "rag")
    file = lines(
        tmp_path / "q.jsonl", *({"question_id": i, "category": c, "turns": ["x"]} for i, c in enumerate(tasks))
    )
    found, skipped = read_questions(file)
    assert skipped == 0 and {one.category for one in found} == {"mt_bench", *tasks[2:]}
    assert [one.category for one in found][:2] == ["mt_bench", "mt_bench"]
    # Without the other five tasks MT-Bench's categories stay what they are.
    lines(tmp_path / "mt.jsonl", *({"category": c, "turns": ["x"]} for c in ("writing", "qa")))
    assert {one.category for one in read_questions(tmp_path / "mt.jsonl")[0]} == {"writing", "qa"}


def test_speed_benchs_rows_are_read_and_withheld_ones_skipped(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"question_id": "a1", "category": "coding", "turns": ["first", "second"], "multiturn": True},
        {"question_id": "a2", "category": "math", "turns": [f"{WITHHELD} FROM THE SOURCE"], "multiturn": False},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    found, skipped = read_questions(tmp_path / "test.parquet")
    assert [(one.id, one.category, one.turns) for one in found] == [("a1", "coding", ("first", "second"))]
    assert skipped == 1
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(UserError, match="is no Parquet file"):
        read_questions(tmp_path / "no.parquet")


@pytest.mark.parametrize(
    ("record", "turns", "reference"),
    [
        ({"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "  1"}, ("def f():",), ("  1",)),
        ({"question": "2 + 2?", "answer": "#### 4"}, ("2 + 2?",), ("#### 4",)),
        ({"instruction": "Translate.", "input": "Hallo"}, ("Translate.\n\nHallo",), ()),
        ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, ("u",), ()),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ("a",), ()),
        ({"turns": ["a", "b"], "reference": ["c", "d"]}, ("a", "b"), ("c", "d")),
    ],
)  # fmt: skip
def test_records_of_other_sets_are_questions(tmp_path: Path, record: dict, turns: tuple, reference: tuple) -> None:
    (found,), _ = read_questions(lines(tmp_path / "q.jsonl", record))
    assert (found.turns, found.reference) == (turns, reference)
    (tmp_path / "q.json").write_text(json.dumps([record, 3]))
    assert read_questions(tmp_path / "q.json") == ([found], 1)


def test_a_text_file_is_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("one\n\ntwo \n")
    assert [one.turns for one in read_questions(tmp_path / "q.txt")[0]] == [("one",), ("two",)]


def test_a_hub_datasets_split_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    splits = {"train": [{"question": "t"}], "test": [{"question": "e"}]}
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *words, trust_remote_code: asked.append((*words, trust_remote_code)) or splits
    )
    monkeypatch.setattr("medusa_cli.assets.check_hub", lambda *words, **more: None)
    assert read_questions("openai/gsm8k:main")[0][0].turns == ("e",)
    assert read_questions("openai/gsm8k:main:train")[0][0].turns == ("t",)
    assert asked == [("openai/gsm8k", "main", False)] * 2
    with pytest.raises(UserError, match="there is no split 'dev'; use one of train, test"):
        read_questions("openai/gsm8k:main:dev")
    monkeypatch.setattr("datasets.load_dataset", lambda *words, **more: 1 / 0)
    with pytest.raises(UserError, match="could not be loaded from the hub"):
        read_questions("a/b")


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "a/b/c", "words"])
def test_what_is_neither_file_nor_dataset_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="does not exist; give a file"):
        read_questions(name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assisted")
    save_run(folder / "mine", save_model(folder / "model"))
    save_model(folder / "small", layers=1)
    save_questions(folder / "q.jsonl")
    return folder


def bench(place: Path, *words: str):
    common = ["bench", "--questions", str(place / "q.jsonl"), "--run", str(place / "mine"), "--dtype", "fp32"]
    return CliRunner().invoke(app, [*common, "--limit", "2", "--max-new-tokens", "12", "--json", *words])


def test_assisted_generation_answers_as_plain_decoding_does(place: Path) -> None:
    done = bench(place, "--methods", "hf,hf-assisted,ar", "--draft-model", str(place / "small"))
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["methods"]["hf-assisted"]["identical"] == 2
    assert any(str(place / "small") in fact for fact in document["facts"])


def test_a_draft_model_fits_the_method_and_the_vocabulary(place: Path, tmp_path: Path) -> None:
    done = bench(place, "--methods", "hf,hf-assisted")
    assert done.exit_code == 2 and "--methods hf-assisted needs a model that drafts" in done.stderr
    done = bench(place, "--methods", "hf,ar", "--draft-model", str(place / "small"))
    assert done.exit_code == 2 and "says nothing to --methods hf,ar" in done.stderr
    other = save_model(tmp_path / "other", vocab=80)
    done = bench(place, "--methods", "hf,hf-assisted", "--draft-model", other)
    assert done.exit_code == 1 and "does not write in the model's tokens" in done.stderr
