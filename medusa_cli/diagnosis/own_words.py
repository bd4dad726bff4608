"""Whether the data is what the model would say in chat: its template, its answers' places, its own words."""

import math
from dataclasses import dataclass

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.backbone.dialogue import encode
from medusa_cli.decoding.likelihood import likelihoods
from medusa_cli.diagnosis.case import Case, Dialogue
from medusa_cli.diagnosis.findings import Finding, graded
from medusa_cli.engines import Plan
from medusa_cli.runs.recipe import load_recipe
from medusa_cli.runs.usable import Malformed
from medusa_cli.training.parsing import Record

# Conversations that the model reads again, and tokens of each: a second or two for a small model.
READ, LONGEST = 8, 640
# Standard deviations above what the model's own text comes to from which on an answer is not its own: one in a hundred
# of its own is taken for another's.
FOREIGN = 2.33


def template(case: Case) -> Finding:
    """Does today's chat template lay out the data's messages as they were laid out when the data was made?"""
    name = "chat template"
    stored = [one for one in case.conversations if one.tokenised and one.messages is not None]
    if not stored:
        if any(one.messages is not None for one in case.conversations):
            return Finding(name, "ok", "the data has messages alone: today's template lays them out")
        said = "the data has token ids and no messages: they cannot be laid out again"
        return Finding(name, "unknown", said, case.distill(anew=True))
    other = [one for one in stored if not _laid_out_alike(case.backbone, one)]
    said = f"{len(other)} of {len(stored)} conversations have other tokens around their answers than the template gives"
    figures = {"conversations": len(stored), "other": len(other)}
    if not other:
        said = f"the template gives the tokens around the answers of all {len(stored)} conversations looked at"
    path = case.run.recipe_path
    known = (load_recipe(path).chat_template if path.is_file() else None) or case.run.chat_template
    if known != case.run.chat_template:
        said = f"the recipe's chat template is not the run's {case.run.template_path.name}; {said}"
        return Finding(name, "bad", said, case.distill(anew=True), figures)
    return Finding(name, graded(len(other) / len(stored), 0.02, 0.2), said, case.distill(anew=True), figures)


def _laid_out_alike(backbone: Backbone, one: Dialogue) -> bool:
    """Whether the tokens before each answer are those of today's template; where pieces met, their texts."""
    assert one.messages is not None
    try:
        tokens, spans = encode(backbone, one.messages)
    except Malformed:
        return False
    now = _around(backbone, tokens, spans)
    return all(
        mine == theirs or backbone.tokenizer.decode(mine) == backbone.tokenizer.decode(theirs)
        for mine, theirs in zip(_around(backbone, one.record.tokens, one.record.spans), now, strict=False)
    )


def _around(backbone: Backbone, tokens: list[int], spans: list[tuple[int, int]]) -> list[list[int]]:
    """What stands before each answer, without end tokens at its beginning: an answer that was cut off had none."""
    found, last = [], 0
    for start, end in spans:
        piece, last = tokens[last:start], end
        while piece and piece[0] in backbone.eos_ids:
            piece = piece[1:]
        found.append(piece)
    return found


def mask(case: Case) -> Finding:
    """Do the spans that are learnt cover the answers, and nothing else?"""
    name = "answer mask"
    known = [one for one in case.conversations if one.messages is not None]
    if not known:
        return Finding(name, "unknown", "the data has no messages to hold the spans against", case.distill(anew=True))
    wrong = [one.record.id for one in known if not _covers(case.backbone, one)]
    figures = {"conversations": len(known), "wrong": len(wrong)}
    if not wrong:
        return Finding(name, "ok", f"spans are the answers in all {len(known)} conversations looked at", "", figures)
    said = f"in {len(wrong)} of {len(known)} conversations, such as {wrong[0]!r}, what is learnt is not the answers"
    return Finding(name, graded(len(wrong) / len(known), 0.0, 0.05), said, case.distill(anew=True), figures)


def _covers(backbone: Backbone, one: Dialogue) -> bool:
    assert one.messages is not None
    answers = [message["content"] for message in one.messages[1:] if message["role"] == "assistant"]
    tokens, spans = one.record.tokens, one.record.spans
    if len(spans) > len(answers):
        return False
    for (start, end), answer in zip(spans, answers, strict=False):
        inside = tokens[start:end]
        body = inside[:-1] if inside[-1] in backbone.eos_ids else inside
        text, whole = backbone.decode(body).strip(), answer.strip()
        cut = end == len(tokens) and whole.startswith(text)  # by the model's context
        if any(token in backbone.eos_ids for token in body) or not (text == whole or cut):
            return False
    return True


@dataclass(frozen=True)
class Read:
    """An answer read by the model: tokens, nats of its tokens and of the model's own there, what was first choice."""

    tokens: int
    nats: float
    entropy: float
    variance: float
    first: int

    @property
    def excess(self) -> float:
        """How many standard deviations it is less likely than what the model says itself at temperature 1."""
        return (self.nats - self.entropy) / math.sqrt(max(self.variance, 1e-6))


def own_words(case: Case) -> Finding:
    """Which share of the data would the model not have said itself?"""
    name = "own words"
    found = [one for talk in case.conversations[:READ] for one in read(case.backbone, talk.record)]
    tokens = sum(one.tokens for one in found)
    if not tokens:
        return Finding(name, "unknown", "no answer of the data fits into the model's context", case.distill(anew=True))
    share = sum(one.tokens for one in found if one.excess > FOREIGN) / tokens
    logprob, own = -sum(one.nats for one in found) / tokens, -sum(one.entropy for one in found) / tokens
    first = sum(one.first for one in found) / tokens
    said = (
        f"{share:.0%} of {tokens:,} tokens stand in answers that the model would hardly give: {logprob:.2f} nats a "
        f"token, {own:.2f} were they its own; {first:.0%} are its first choice"
    )
    figures = {"share": share, "logprob": logprob, "expected_logprob": own, "greedy_agreement": first,
               "answers": len(found), "tokens": tokens}  # fmt: skip
    remedy = case.distill(anew=True)
    return Finding(name, graded(share, 0.1, 0.5), said, remedy, figures)


@torch.inference_mode()
def read(backbone: Backbone, record: Record) -> list[Read]:
    """The model's opinion of each answer of a conversation, of its first tokens where it is long."""
    end = min(len(record.tokens), LONGEST, backbone.max_positions)
    ids = torch.tensor(record.tokens[:end], device=backbone.device)
    logits = backbone.engine.forward(Plan.chain(ids, logits="all"), backbone.engine.new_cache()).logits[0]
    found = []
    for start, stop in record.spans:
        rows = logits[start - 1 : min(stop, end) - 1].float()
        if not len(rows):
            continue
        said = likelihoods(rows, record.tokens[start : start + len(rows)], 1)
        log_p = rows.log_softmax(-1)
        weighed = log_p.exp() * log_p
        entropy = -weighed.sum(-1)
        variance = (weighed * log_p).sum(-1) - entropy.square()
        first = sum(one.token == one.top[0][0] for one in said)
        nats = -sum(one.logprob for one in said)
        found.append(Read(len(said), nats, float(entropy.sum()), float(variance.sum()), first))
    return found
