"""An answer's text ends before a stop string, however the tokens fall; log probabilities are the backbone's own."""

import pytest
import torch

from medusa_cli.decode import Decoder, Reply, Request, Step
from medusa_cli.drafters import MedusaHeads
from medusa_cli.engine import Plan
from medusa_cli.tree import Tree
from tests.helpers import tiny_backbone


class Letters:
    """A backbone whose tokens are characters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def told(text: str, sizes: list[int], stops: list[str], reason: str | None = "length") -> tuple[Reply, list[str]]:
    """A reply that was given a text in steps of so many characters, and what it showed after each."""
    reply, shown, ids = Reply(Letters(), stops), [], [ord(letter) for letter in text]  # type: ignore[arg-type]
    for size in sizes:
        part, ids = ids[:size], ids[size:]
        pieces = reply.add(Step(part, size, size - 1, 0.0, 0.0), None if ids else reason)
        shown.append("".join(piece.text for piece in pieces))
        if reply.reason:
            break
    return reply, shown


@pytest.mark.parametrize("sizes", [[1] * 12, [12], [5, 7], [7, 5], [8, 4]])
def test_text_ends_before_the_first_stop_string_and_nothing_of_it_is_shown(sizes: list[int]) -> None:
    reply, shown = told("one <end> x<", sizes, ["nothing", "<end>"])
    assert reply.text == "".join(shown) == "one "
    assert reply.reason == "stop"


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end() -> None:
    reply, shown = told("a<en b<e", [3, 2, 3], ["<end>"])
    assert shown == ["a", "<en ", "b<e"]
    assert (reply.text, reply.reason) == ("a<en b<e", "length")


def test_an_answer_that_is_left_shows_what_was_held_back() -> None:
    reply, shown = told("ab<e", [4], ["<end>"], reason=None)
    assert (shown, reply.reason) == (["ab"], None)
    assert [piece.text for piece in reply.cancel()] == ["<", "e"]
    assert (reply.text, reply.reason, reply.cancel()) == ("ab<e", "cancelled", [])


def test_pieces_say_which_tokens_were_drafted() -> None:
    reply = Reply(Letters())  # type: ignore[arg-type]
    pieces = reply.add(Step([97, 98, 99], 5, 2, 0.0, 0.0), None)
    assert [(piece.text, piece.accepted) for piece in pieces] == [("a", True), ("b", True), ("c", False)]


def test_likelihoods_are_the_backbones_for_every_token_however_many_a_step_settles() -> None:
    backbone = tiny_backbone()
    torch.manual_seed(0)
    drafter = MedusaHeads.create(backbone, 3, 1, "own")
    decoder = Decoder(backbone, drafter, Tree.from_choices([[0], [1], [0, 0], [0, 0, 0]]), slots=2)
    prompts = [[5, 9, 20, 11], [8, 30]]
    rows = []
    for number, prompt in enumerate(prompts):
        rows.append((*decoder.admit(Request(prompt, max_new_tokens=12, stop_ids=(), top=3 - number)), []))
    for _, first, found in rows:
        found.append(first)
    while decoder.sequences:
        for sequence, step in decoder.step():
            next(found for one, _, found in rows if one is sequence).append(step)
    assert any(len(step.tokens) > 1 for _, _, found in rows for step in found)
    for prompt, top, (_, _, found) in zip(prompts, (3, 2), rows, strict=True):
        answer = [token for step in found for token in step.tokens]
        likely = [one for step in found for one in step.likelihoods]
        whole = Plan.chain([*prompt, *answer], logits="all")
        log_p = backbone.engine.forward(whole, backbone.engine.new_cache()).logits[0].log_softmax(-1)
        assert [one.token for one in likely] == answer
        for place, one in enumerate(likely, len(prompt) - 1):
            values, ids = log_p[place].topk(top)
            assert one.logprob == pytest.approx(float(log_p[place, one.token]), abs=1e-4)
            assert [token for token, _ in one.top] == ids.tolist()
            assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_nobody_pays_for_likelihoods_that_nobody_asked_for() -> None:
    decoder = Decoder(tiny_backbone(), slots=1)
    _, first = decoder.admit(Request([5, 9], max_new_tokens=3, stop_ids=()))
    assert first.likelihoods == () and decoder.step()[0][1].likelihoods == ()


@pytest.mark.parametrize(("count", "stops", "reason"), [(4, (), "length"), (40, None, "stop")])
def test_an_ending_says_why(count: int, stops: tuple[int, ...] | None, reason: str) -> None:
    decoder = Decoder(tiny_backbone(), slots=1)
    sequence, first = decoder.admit(Request([5, 9], max_new_tokens=count, stop_ids=stops))
    tokens = list(first.tokens)
    if stops is None:  # any token can be the one to stop at
        decoder.cancel(sequence)
        sequence, first = decoder.admit(Request([5, 9], max_new_tokens=count, stop_ids=first.tokens))
    while decoder.sequences:
        tokens += decoder.step()[0][1].tokens
    assert sequence.finish_reason == reason
