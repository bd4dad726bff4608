"""Questions: the forms of published sets, by file and hub id; choice by category and number."""

import json
from pathlib import Path

import pytest

from medusa_cli.bench.questions import WITHHELD, Question, of_categories, read_questions, spread
from medusa_cli.errors import UsageError, UserError


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
    with pytest.raises(UserError, match="no.parquet"):
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
    with pytest.raises(UserError, match="'dev'"):
        read_questions("openai/gsm8k:main:dev")
    monkeypatch.setattr("datasets.load_dataset", lambda *words, **more: 1 / 0)
    with pytest.raises(UserError, match="a/b"):
        read_questions("a/b")


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "a/b/c", "words"])
def test_what_is_neither_file_nor_dataset_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="questions"):
        read_questions(name)


def test_categories_are_chosen_by_name() -> None:
    questions = [Question(str(i), "abc"[i % 3], ("x",)) for i in range(9)]
    assert of_categories(questions, None) == questions
    assert {question.category for question in of_categories(questions, "a, c")} == {"a", "c"}
    with pytest.raises(UsageError, match="category 'math'"):
        of_categories(questions, "math")


def test_limits_are_spread_over_the_categories() -> None:
    questions = [Question(str(i), "abc"[i // 4], ("x",)) for i in range(12)]
    assert [question.category for question in spread(questions, 3)] == ["a", "b", "c"]
    assert len(spread(questions, 5)) == 5 and spread(questions, None) == questions
    with pytest.raises(UsageError, match="limit 0"):
        spread(questions, 0)
    same = [Question("1", "c", (f"w{i}",)) for i in range(4)]
    assert spread(same, 2) == same[:2]  # whatever the ids


def test_only_a_newline_ends_a_question(tmp_path: Path) -> None:
    odd = "first\u2028second\x85third"
    (tmp_path / "q.jsonl").write_text(json.dumps({"turns": [odd]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [question.turns for question in read_questions(tmp_path / "q.jsonl")[0]] == [(odd,)]


@pytest.mark.parametrize("text", ["", "not json\n", '{"turns": []}\n', '{"turns": [3]}\n', "[1]\n"])
def test_files_without_questions_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(UserError, match="questions"):
        read_questions(tmp_path / "q.jsonl")
