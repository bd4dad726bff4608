"""A corpus is looked up as by brute force, and answers over it stay the same."""

import random
from typing import Any

import pytest

from medusa_cli.decode import Sampling
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
from tests.helpers import (
    PROMPT,
    generate,
    generate_batch,
    generate_plain,
    tiny_backbone,
    tokens_of,
)
from tests.test_ngram import drafter_for, policies

TEXTS = [[5, 9, 20, 11, 7, 33], [9, 20, 11, 40, 12], [9, 20, 11, 40, 50]]


def brute_force(texts: list[list[int]], end: list[int]) -> tuple[int, set[int]]:
    """Returns the length of the longest match, and the tokens that follow it; GAP for the end of a text."""
    by_length: dict[int, list[int]] = {}
    for text in texts:
        for position in range(1, len(text) + 1):
            length = 0
            while (
                length < min(MAX_LENGTH, position, len(end))
                and text[position - 1 - length] == end[-1 - length]
            ):
                length += 1
            by_length.setdefault(length, []).append([*text, GAP][position])
    length = max(by_length)
    return length, set(by_length[length])


@pytest.mark.parametrize("seed", range(8))
def test_longest_match_is_that_of_brute_force(seed: int) -> None:
    chance = random.Random(seed)
    alphabet = 30 + seed
    texts = [
        [chance.randrange(alphabet) for _ in range(chance.randrange(1, 40))] for _ in range(30)
    ]
    corpus = Corpus(texts)
    assert len(corpus) == sum(map(len, texts))
    for _ in range(60):
        text = chance.choice(texts)
        end = [
            *(chance.randrange(alphabet) for _ in range(3)),
            *text[: chance.randrange(1, len(text) + 1)],
        ]
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
    assert (
        source.find([63], 9) == []
        and source.find([63, 5], 9)[0].chance == CORPUS_PRIOR_BY_LENGTH[2]
    )
    source.learn([20, 11, 7, 33, 60])
    assert source.find([63, 5], 9)[0].chance > CORPUS_PRIOR_BY_LENGTH[2]
    assert (
        shared[2].ratio > CORPUS_PRIOR_BY_LENGTH[2] and shared[4].ratio == CORPUS_PRIOR_BY_LENGTH[4]
    )
    assert CorpusMatches(Corpus(TEXTS), shared, 0.99).find([63, 5], 9) == []
    single, long, other = (
        NgramMatch((1,), 1, 0.9),
        NgramMatch((2,), 4, 0.3),
        NgramMatch((2, 3), 2, 0.2),
    )
    assert likeliest([single, other, long]) == [long, single]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling("exact", 0.9, seed=3)], ids=["greedy", "exact"]
)
@pytest.mark.parametrize("kind", ["static", "dynamic", "adaptive", "alone"])
def test_answers_stay_those_of_plain_decoding_and_take_fewer_steps(
    kind: str, sampling: Sampling
) -> None:
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
