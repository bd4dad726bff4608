"""A corpus is looked up as by brute force, its index is kept and made anew if need be, and answers stay the same."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medusa_cli.api import Medusa
from medusa_cli.decode import Sampling
from medusa_cli.decode import corpus as corpora
from medusa_cli.decode.corpus import load_corpus
from medusa_cli.decode.ngram import (
    CORPUS_PRIOR_BY_LENGTH,
    GAP,
    MAX_LENGTH,
    MAX_TOKENS,
    Corpus,
    CorpusMatches,
    NgramMatch,
    likeliest,
    ngram_trust,
)
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from tests.helpers import (
    PROMPT,
    generate,
    generate_batch,
    generate_plain,
    medusa,
    save_model,
    save_run,
    tiny_backbone,
    tokens_of,
)
from tests.test_ngram import drafter_for, policies

TEXTS = [[5, 9, 20, 11, 7, 33], [9, 20, 11, 40, 12], [9, 20, 11, 40, 50]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "corpora"


def brute_force(texts: list[list[int]], end: list[int]) -> tuple[int, set[int]]:
    """Returns the length of the longest match, and the tokens that follow it; GAP for the end of a text."""
    by_length: dict[int, list[int]] = {}
    for text in texts:
        for position in range(1, len(text) + 1):
            length = 0
            while length < min(MAX_LENGTH, position, len(end)) and text[position - 1 - length] == end[-1 - length]:
                length += 1
            by_length.setdefault(length, []).append([*text, GAP][position])
    length = max(by_length)
    return length, set(by_length[length])


@pytest.mark.parametrize("seed", range(8))
def test_longest_match_is_that_of_brute_force(seed: int) -> None:
    chance = random.Random(seed)
    alphabet = 30 + seed
    texts = [[chance.randrange(alphabet) for _ in range(chance.randrange(1, 40))] for _ in range(30)]
    corpus = Corpus(texts)
    assert len(corpus) == sum(map(len, texts))
    for _ in range(60):
        text = chance.choice(texts)
        end = [*(chance.randrange(alphabet) for _ in range(3)), *text[: chance.randrange(1, len(text) + 1)]]
        length, tokens = corpus.find(end)
        expected, followers = brute_force(texts, end)
        assert length == expected and (tokens[0] if tokens else GAP) in followers
        assert len(tokens) <= MAX_TOKENS and GAP not in tokens


def test_most_frequent_continuation_is_followed_to_the_end_of_its_text() -> None:
    corpus = Corpus(TEXTS)
    assert corpus.find([1, 9, 20, 11]) in ((3, (40, 12)), (3, (40, 50)))
    assert corpus.find([5, 9, 20]) == (3, (11, 7, 33)) and corpus.find([63]) == (0, ())
    assert Corpus().find([1, 2]) == (0, ()) and len(Corpus()) == 0
    corpus.index([[1, 2, 3]])
    assert corpus.find([5, 9]) == (0, ()) and corpus.find([1, 2]) == (2, (3,))


def test_matches_are_trusted_by_source_and_length() -> None:
    shared = ngram_trust(priors=CORPUS_PRIOR_BY_LENGTH)
    source = CorpusMatches(Corpus(TEXTS), shared)
    assert source.find([63], 9) == [] and source.find([63, 5], 9)[0].chance == CORPUS_PRIOR_BY_LENGTH[2]
    source.learn([20, 11, 7, 33, 60])
    assert source.find([63, 5], 9)[0].chance > CORPUS_PRIOR_BY_LENGTH[2]
    assert shared[2].ratio > CORPUS_PRIOR_BY_LENGTH[2] and shared[4].ratio == CORPUS_PRIOR_BY_LENGTH[4]
    assert CorpusMatches(Corpus(TEXTS), shared, 0.99).find([63, 5], 9) == []
    single, long, other = NgramMatch((1,), 1, 0.9), NgramMatch((2,), 4, 0.3), NgramMatch((2, 3), 2, 0.2)
    assert likeliest([single, other, long]) == [long, single]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling("exact", 0.9, seed=3)], ids=["greedy", "exact"])
@pytest.mark.parametrize("kind", ["static", "dynamic", "adaptive", "alone"])
def test_answers_stay_those_of_plain_decoding_and_take_fewer_steps(kind: str, sampling: Sampling) -> None:
    backbone, policy, text = tiny_backbone(), policies()[kind], policies()[kind]
    drafter = drafter_for(backbone, kind)
    rules: dict[str, Any] = {"max_new_tokens": 60, "stop_ids": (), "sampling": sampling}
    expected = tokens_of(generate_plain(backbone, PROMPT, **rules))
    policy.corpora = [Corpus([[1, 2, 3]]), Corpus([[*PROMPT, *expected]])]
    steps = list(generate(backbone, drafter, policy, PROMPT, **rules))
    assert tokens_of(steps) == expected
    assert len(steps) < 0.7 * len(list(generate(backbone, drafter, text, PROMPT, **rules)))
    batch = generate_batch(backbone, drafter, policy, [PROMPT, PROMPT[1:]], batch_size=2, **rules)
    assert tokens_of(batch[0]) == expected


def backbone_of(folder: Path) -> Backbone:
    return Medusa.from_pretrained(save_model(folder / "model"), drafter=None, dtype="fp32").backbone


def test_files_folders_and_runs_are_read(tmp_path: Path) -> None:
    backbone = backbone_of(tmp_path)
    run = save_run(tmp_path / "run", str(tmp_path / "model"))
    distilled = {"id": "a", "messages": [], "tokens": [8, 9, 10, 11], "spans": [[2, 4]]}
    run.distill_path.write_text(json.dumps(distilled) + "\nno JSON\n" + json.dumps({"id": "b"}))
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    files = tmp_path / "files"
    (files / ".git").mkdir(parents=True)
    (files / "saved.json").write_text(json.dumps({"messages": messages}, indent=1))
    (files / "code.py").write_text("w30 w31 w32")
    (files / "data.json").write_text('["w40 ", "w41"]')
    (files / "binary").write_bytes(b"w50 w51\0")
    (files / ".git" / "hidden").write_text("w50 w51")

    def tokens(source: Path) -> list[int]:
        corpus = load_corpus(str(source), backbone)
        return [token for token in corpus.tokens.tolist() if token != GAP]

    def ids(text: str) -> list[int]:
        return backbone.tokenizer.encode(text, add_special_tokens=False)

    assert tokens(run.path) == tokens(run.distill_path) == [8, 9, 10, 11]
    read = tokens(files)
    assert read == [*ids("w30 w31 w32"), *ids('["w40 ", "w41"]'), *backbone.encode_chat(messages)]
    for name in ("nowhere", "files/.git/none"):
        with pytest.raises(UserError, match="corpus"):
            load_corpus(str(tmp_path / name), backbone)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("")
    for name in ("empty", "blank.txt", "files/binary"):
        with pytest.raises(UserError, match="corpus"):
            load_corpus(str(tmp_path / name), backbone)


def test_index_is_kept_and_a_damaged_or_old_one_is_made_anew(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, text = backbone_of(tmp_path), tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 w5")
    first = load_corpus(str(text), backbone)
    [kept] = cache.iterdir()
    whole = kept.read_bytes()
    written: list[int] = []
    write = corpora._write_index
    monkeypatch.setattr(corpora, "_write_index", lambda *index: (written.append(1), write(*index)))

    def load() -> bool:
        written.clear()
        corpus = load_corpus(str(text), backbone)
        end = [int(token) for token in corpus.tokens if token != GAP][:2]
        assert corpus.find(end)[0] == 2
        return bool(written)

    again = load_corpus(str(text), backbone)
    assert (
        not load() and np.array_equal(again.tokens, first.tokens) and np.array_equal(again.positions, first.positions)
    )
    for damage in (b"", whole[: len(whole) // 2], b"\x7f" * len(whole), whole[:-4] + b"\x7f\x7f\x7f\x7f"):
        kept.write_bytes(damage)
        assert load() and kept.read_bytes() == whole
    text.write_text("w1 w2 w3 w4 w5 w6")
    assert load() and [path.name != kept.name for path in cache.iterdir()] == [True]


def test_corpus_beyond_the_limit_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of(tmp_path)
    lines = [json.dumps({"id": str(n), "tokens": [8, 9, 10], "spans": [[1, 3]]}) for n in range(4)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(corpora, "MAX_CORPUS", 7)
    assert len(load_corpus(str(tmp_path / "many.jsonl"), backbone)) == 6


def test_commands_take_a_corpus(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"))
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4")
    words = ["chat", "--run", f"{run.path}/", "--dtype", "fp32", "--prompt", "w5 w9", "--max-new-tokens", "8"]
    plain = medusa(*words, "--baseline").stdout
    drafted = medusa(*words, "--tree", "static", "--corpus", tmp_path / "text.txt")
    assert drafted.stdout == plain and "corpus of 4 tokens" in drafted.stderr
    for other in ("--no-lookup", "--baseline"):
        assert "--corpus" in medusa(*words, "--corpus", tmp_path / "text.txt", other, exit_code=2).stderr
    assert "--corpus" in medusa(*words, "--corpus", tmp_path / "nowhere", exit_code=1).stderr
