"""The checks of `medusa doctor`: each examines one part of a run and returns a finding."""

import hashlib
import heapq
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any, TypeVar

import torch

from medusa_cli import assets
from medusa_cli.api import check_fit
from medusa_cli.bench.questions import read_questions, spread
from medusa_cli.bench.stats import bootstrap, rate
from medusa_cli.data.conversation import Conversation, conversation_of, id_of
from medusa_cli.data.packing import held_out_ids
from medusa_cli.decode import Decoder, Request, Stats
from medusa_cli.decode.costs import costs_for
from medusa_cli.decode.sampling import sampling_of
from medusa_cli.decode.stats import likelihoods
from medusa_cli.drafters import load_drafter
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine import Plan, load_backbone
from medusa_cli.errors import UserError, in_flags, shown
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import encode
from medusa_cli.runs.accuracies import Heads, outdated, read_calibration, stamp_of
from medusa_cli.runs.io import Malformed, read_jsonl
from medusa_cli.runs.provenance import SEVERAL, Distillation, Identity, Made, describe_distillation, describe_drafter
from medusa_cli.runs.recipe import DistillRecipe, load_recipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import DIGESTS, Run
from medusa_cli.train.log import NAME, read_log
from medusa_cli.train.prefill import rounding
from medusa_cli.tree import Tree
from medusa_cli.tree.io import load_tree, tree_provenance
from medusa_cli.tree.search import budgets, expected_length, largest, search

# From good to bad; what could not be looked at is worse than nothing amiss, and no fault.
VERDICTS = ("ok", "unknown", "warn", "bad")


@dataclass(frozen=True)
class Finding:
    """One check's outcome: its verdict, what was seen in words, the figures behind them, and a command that helps."""

    name: str
    verdict: str
    seen: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A check's name, what looks, and whether it decodes or times steps, which takes most of an examination."""

    name: str
    look: "Callable[[Case], Finding]"
    decodes: bool = False


def worst(findings: Sequence[Finding]) -> str:
    """Returns the worst verdict of several findings."""
    return max((one.verdict for one in findings), key=VERDICTS.index, default="unknown")


def graded(value: float, warn: float, bad: float) -> str:
    """Returns the verdict on a value by two thresholds; larger is worse."""
    return "bad" if value >= bad else "warn" if value >= warn else "ok"


# Conversations that are looked at, of the data and of what was held out; nodes of a tree where the run has none.
SAMPLE, HELD_OUT, NODES = 64, 64, 16
T = TypeVar("T")


@dataclass(frozen=True)
class CheckedConversation:
    """A conversation of the data: its messages, None where it has none, and what training reads of it."""

    messages: list[dict[str, str]] | None
    record: Conversation
    tokenised: bool  # by whoever wrote the file, not by today's template


@dataclass
class Case:
    """A run under examination. called: its name as it was typed, None for what ships; options: how to load the model.

    temperature: the one that is held against greedy decoding; prompts and tokens: how much is decoded at each. Every
    part raises UserError, with the command that makes it, where it is missing or damaged. Nothing in the run changes.
    """

    run: Run
    called: str | None
    model: str
    options: LoadOptions = field(default_factory=LoadOptions)
    temperature: float = 0.7
    prompts: int = 8
    tokens: int = 48
    answered: dict[float, list[Stats]] = field(default_factory=dict)  # what was decoded so far, by temperature

    def command(self, name: str, *words: str, **settings: Any) -> str:
        """A command on this run, or, for what ships, on a run of the user's own to come."""
        return typed(name, *words, run=self.called or "mine", **settings)

    def distill(self, anew: bool = False, **settings: Any) -> str:
        """The command that goes on with the run's distillation; anew: that makes another one, in a run beside it.

        Both by the run's own settings where no others are given: those of one file agree.
        """
        try:
            made = describe_distillation(self.run.data_path.parent)
        except UserError:  # it is damaged: what it said is lost
            made = Distillation()
        if made.seed == SEVERAL:  # it cannot be gone on with: more is distilled beside it, and merged
            made, anew = replace(made, seed=None), True
        usual = {key: getattr(DistillRecipe(), key, None) for key in ("seed", *made.settings)}
        words: dict[str, Any] = {"seed": made.seed, **made.settings} | settings
        words = {key: one for key, one in words.items() if one and one != usual.get(key)}
        words.pop("chat_template", None)  # a digest; the run keeps the text
        rounding = words.pop("rounding", None)
        if rounding is not None:
            words["quantize"] = rounding
        if not anew or self.called is None:
            return self.command("distill", **words)
        template = {"chat_template": self.run.template_path} if self.run.template_path.is_file() else {}
        run = f"{self.called.rstrip(os.sep)}-anew"
        return typed("distill", run=run, model=self.model, **template, **words)

    @property
    def tree_command(self) -> str:
        """The command that makes the run's tree."""
        return self.command("tree", budget="auto")

    def read(self, part: Callable[[], T], maker: str) -> T:
        """A part of the run, as it is read; UserError, with the command that makes it, where it cannot be."""
        try:
            return part()
        except UserError as reason:
            raise UserError(reason.message, maker) from reason

    @cached_property
    def made(self) -> Made:
        """What the drafter says of its making."""
        if not (self.run.drafter_dir / "config.json").is_file():
            raise UserError(f"{self.run.drafter_dir} holds no drafter", self.command("train"))
        return self.read(lambda: describe_drafter(self.run.drafter_dir), self.command("train")).provenance

    @cached_property
    def backbone(self) -> Backbone:
        """The model as it would decode with this run."""
        template = self.run.chat_template
        return load_backbone(self.model, self.options, adapter=self.run.adapter, chat_template=template)

    @cached_property
    def drafter(self) -> HeadDrafter:
        """The run's drafter on that model."""
        assert self.made is not None  # says what to do where there is none
        backbone = self.backbone
        return self.read(lambda: load_drafter(self.run.drafter_dir, backbone), self.command("train"))

    @cached_property
    def heads(self) -> Heads:
        """What was measured of the heads."""
        if not self.run.calibration_path.is_file():
            raise UserError(f"{self.run.path} is not calibrated", self.command("calibrate"))
        return self.read(lambda: read_calibration(self.run.calibration_path), self.command("calibrate"))

    @cached_property
    def tree(self) -> Tree:
        """The run's tree, or else the best one of some nodes by the calibration."""
        if self.run.tree_path.is_file():
            tree, name = self.read(lambda: load_tree(self.run.tree_path), self.tree_command), str(self.run.tree_path)
        else:
            nodes = min(NODES, largest(self.heads.accuracies))
            tree, name = search(self.heads.accuracies, nodes), f"static:{nodes}"
        drafter = self.drafter
        self.read(lambda: check_fit(tree, drafter, name), self.tree_command)
        return tree

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """What happened in training."""
        path = self.run.path / NAME
        if not path.is_file():
            raise UserError(self._none("log of the training", path), self.command("train"))
        return read_log(path)

    @cached_property
    def conversations(self) -> list[CheckedConversation]:
        """Some conversations of the data, those with the least digests of their names."""
        return self._data[0]

    @cached_property
    def held_out(self) -> list[CheckedConversation]:
        """Some of the conversations that training never saw."""
        return self._data[1]

    @cached_property
    def _data(self) -> tuple[list[CheckedConversation], list[CheckedConversation]]:
        path = self.run.data_path
        if not path.is_file():
            raise UserError(self._none("conversations", path), self.command("distill"))
        assert self.backbone is not None  # its errors are its own
        return self.read(self._sampled, self.distill(anew=True))

    def _sampled(self) -> tuple[list[CheckedConversation], list[CheckedConversation]]:
        path, share = self.run.data_path, self._fraction
        ids: list[str] = []
        some: list[tuple[int, int, Any]] = []
        for number, (id, raw) in enumerate(read_jsonl(path, make=_named, array=True)):
            ids.append(id)
            heapq.heappush(some, (-_digest(id), -number, raw))
            if len(some) > SAMPLE:
                heapq.heappop(some)
        held = held_out_ids(ids, share) if ids else set()
        others = []
        for id, raw in read_jsonl(path, make=_named, array=True) if held else ():
            if id in held:
                others.append(raw)
                if len(others) == HELD_OUT:
                    break
        found = [self._conversation(raw) for _, _, raw in sorted(some, key=lambda one: one[:2], reverse=True)]
        kept = [one for one in found if one is not None]
        if not kept:
            raise UserError(f"{path} holds no usable conversation", self.distill(anew=True))
        return kept, [one for one in map(self._conversation, others) if one is not None]

    def _none(self, what: str, path: Path) -> str:
        """That a part is not there; nothing was lost where it never shipped."""
        return (
            f"no {what} shipped with the drafter" if self.called is None else f"there is no {what}: {path} is missing"
        )

    @property
    def _fraction(self) -> float:
        with suppress(UserError):  # that there is no drafter is for other checks to say
            held = self.made.recipe.train.validation_fraction
            if held is not None:
                return held
        path = self.run.recipe_path
        recipe = self.read(lambda: load_recipe(path if path.is_file() else None), self.command("train"))
        return recipe.train.validation_fraction

    def _conversation(self, raw: dict[str, Any]) -> CheckedConversation | None:
        try:
            record = conversation_of(raw, self.backbone)
        except Malformed:
            return None
        return CheckedConversation(record.messages or None, record, "tokens" in raw)


def typed(name: str, *words: str, **settings: Any) -> str:
    """A command as it is typed: its name, words, and settings as flags, one that is True without a value."""
    flags = [(in_flags(f"@{key}"), value) for key, value in settings.items()]
    given = [str(word) for flag, value in flags for word in ((flag,) if value is True else (flag, value))]
    return shlex.join(["medusa", name, *words, *given])


def _named(record: Any) -> tuple[str, dict[str, Any]]:
    """Returns a record with its id; raises Malformed for anything else."""
    if not isinstance(record, dict):
        raise Malformed("not an object")
    return id_of(record), record


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"sample {name}".encode()).digest()[:8], "big")


def backbone(case: Case) -> Finding:
    """Compares the model that decodes with the one that the drafter was trained on: weights, adapter, quantisation."""
    name, before = "backbone", case.made.identity
    if not before:
        said = "the drafter does not say which model it was trained on"
        return Finding(name, "unknown", said, case.command("train"))
    now: Identity = {**case.backbone.identity}
    keys = ("architecture", "hidden_size", "vocab_size", "layers", *DIGESTS)
    other = [key for key in keys if None not in (before.get(key), now.get(key)) and before[key] != now[key]]
    if other:
        said = f"the drafter was trained on {shown(before.get('id'))}, which {shown(now.get('id'))} is not"
        return Finding(name, "bad", f"{said}: {', '.join(other)} differ", case.command("train"))
    if before.get("adapter") != now.get("adapter"):
        had, has = (f"adapter {one}" if one else "no adapter" for one in (before.get("adapter"), now.get("adapter")))
        said = f"the drafter was trained on the model with {had}; it runs with {has}"
        again = case.command("train", stage=2) if now.get("adapter") else case.command("train")
        return Finding(name, "bad", said, again)
    rounded = rounding(case.backbone)
    if before.get("rounding") != rounded:
        ways = (before.get("rounding") or "whole weights", rounded or "whole weights")
        said = f"the drafter was trained on {ways[0]}, the model runs on {ways[1]}: it answers otherwise"
        before_it: dict[str, Any] = {"quantize": before.get("rounding", "none")}
        return Finding(name, "warn", said, case.command("chat", **before_it))
    with_it = f" with adapter {now['adapter']}" if now.get("adapter") else ""
    whole = rounded or "whole weights"
    return Finding(name, "ok", f"{now.get('id')}{with_it}, {whole}, is what the drafter was trained on")


def calibration(case: Case) -> Finding:
    """Checks that the calibration was measured on the current drafter."""
    return _stamped(case, "calibration", case.heads.drafter, case.command("calibrate"))


def tree(case: Case) -> Finding:
    """Checks that the tree was searched for the current drafter."""
    again = case.tree_command
    if not case.run.tree_path.is_file():
        return Finding("tree", "unknown", f"{case.run.path} has no tree of its own", again)
    made = case.read(lambda: tree_provenance(case.run.tree_path), again)
    return _stamped(case, "tree", made.drafter_stamp, again)


def _stamped(case: Case, name: str, stamp: str | None, remedy: str) -> Finding:
    if stamp is None:
        # What ships was packed together; files of earlier versions, and trees given as widths, have no stamp.
        whose = "ships with the drafter" if case.called is None else "does not say for which drafter it was made"
        return Finding(name, "ok" if case.called is None else "unknown", f"the {name} {whose}", remedy)
    assert case.made is not None
    if outdated(stamp, case.run.drafter_dir):
        return Finding(name, "bad", f"the {name} was made for an earlier drafter, not for the one there now", remedy)
    return Finding(name, "ok", f"the {name} was made for this drafter")


# Conversations that the model reads again, and tokens of each: a second or two for a small model.
READ, LONGEST = 8, 640
# Standard deviations above what the model's own text comes to from which on an answer is not its own: one in a hundred
# of its own is taken for another's.
FOREIGN = 2.33


def template(case: Case) -> Finding:
    """Compares the data's tokens around the answers with those of the current chat template."""
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


def _laid_out_alike(backbone: Backbone, one: CheckedConversation) -> bool:
    """Returns True if the tokens before each answer, or their texts, are those of the current template."""
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
    """Checks that the spans that training learns cover the answers and nothing else."""
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


def _covers(backbone: Backbone, one: CheckedConversation) -> bool:
    assert one.messages is not None
    answers = [message["content"] for message in one.messages[1:] if message["role"] == "assistant"]
    tokens, spans = one.record.tokens, one.record.spans
    if len(spans) > len(answers):
        return False
    for (start, end), reply in zip(spans, answers, strict=False):
        inside = tokens[start:end]
        body = inside[:-1] if inside[-1] in backbone.eos_ids else inside
        text, whole = backbone.decode(body).strip(), reply.strip()
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
    """Measures the share of the data's tokens in answers that the model would hardly give."""
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
def read(backbone: Backbone, record: Conversation) -> list[Read]:
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


# Steps at the end of training whose mean is the trained accuracy, and validations that a curve needs.
LAST, LEAST = 50, 5
# The curve is fitted from this share of the training on: before it the warm-up bends it.
SETTLED = 0.1
# What twice the positions should add to the tokens of a step before more training is advised.
WORTH = 0.02


def over_fitting(case: Case) -> Finding:
    """Compares the heads' accuracy on trained and on held-out text, and looks for a rising held-out loss."""
    name = "over-fitting"
    steps, checks = _events(case, "stepped"), _events(case, "validated")
    if not steps or not checks:
        return Finding(name, "unknown", "the training's log has no step or no validation", case.command("train"))
    trained = [fmean(one["accuracies"][head] for one in steps[-LAST:]) for head in range(len(steps[0]["accuracies"]))]
    held = checks[-1]["accuracies"]
    gap = fmean(trained) - fmean(held)
    losses = [fmean(one["head_losses"]) for one in checks]
    risen = losses[-1] / max(min(losses), 1e-9) - 1
    said = (
        f"first guesses right {_shares(trained)} % on the last {min(LAST, len(steps))} steps' own text, "
        f"{_shares(held)} % on held-out text"
    )
    if risen > 0.01:
        said += f"; the held-out loss rose by {risen:.0%} since its best"
    verdict = "bad" if gap >= 0.12 or risen >= 0.1 else graded(max(gap / 0.05, risen / 0.03), 1.0, math.inf)
    figures = {"trained": trained, "held_out": held, "gap": gap, "loss_risen": risen}
    return Finding(name, verdict, said, _more(case), figures)


def converged(case: Case) -> Finding:
    """Predicts what twice the positions would give, by a power law through each head's held-out errors.

    The law is tested on the training itself: from its first half it predicts the end.
    """
    name = "training length"
    checks = [one for one in _events(case, "validated") if one["total_positions"] > 0]
    end = checks[-1]["total_positions"] if checks else 0
    points = [one for one in checks if one["total_positions"] >= SETTLED * end]
    if len({one["total_positions"] for one in points}) < LEAST or any(
        not 0 < share < 1 for one in points for share in one["accuracies"]
    ):
        said = f"{len(points)} validations give no curve, {LEAST} are needed"
        return Finding(name, "unknown", said, _again(case, "train.validation_every=20"))
    now, then = _foretold(points, end), _foretold(points, 2 * end)
    # Off the law at its end, what is known there counts, and the law for the way from there.
    reached = points[-1]["accuracies"]
    later = [1 - (1 - a) * (1 - b) / (1 - c) for a, b, c in zip(reached, then, now, strict=True)]
    before, after = _chain(reached), _chain(later)
    gain = after / before - 1
    half = [one for one in points if one["total_positions"] <= end / 2]
    enough = len({one["total_positions"] for one in half}) >= 3
    miss = _chain(_foretold(half, end)) - before if enough else None
    tried = "half the curve is too short to try the law on"
    if miss is not None:
        tried = f"from its first half the law foretells {before + miss:.2f} for the {before:.2f} that came"
    said = (
        f"{end:,} positions give {before:.2f} tokens a step over a chain of first guesses; twice as many should give "
        f"{after:.2f}, first guesses right {_shares(later)} % for {_shares(reached)} % ({len(points)} validations; "
        f"{tried}; a rate that falls to the end makes the last of them look better than a longer training would there)"
    )
    verdict = graded(gain, WORTH, math.inf)
    figures = {"positions": end, "accuracies": reached, "expected_accuracies": later, "tokens_a_step": before,
               "expected_tokens_a_step": after, "validations": len(points)}  # fmt: skip
    if miss is not None:
        figures["law_missed_by"] = miss
    return Finding(name, verdict, said, _longer(case, 2 * end), figures)


def _foretold(points: Sequence[dict[str, Any]], positions: float) -> list[float]:
    """Returns each head's accuracy after so many positions, by a power law through its errors at some validations."""
    known = [math.log(point["total_positions"]) for point in points]
    accuracies = []
    for head in range(len(points[0]["accuracies"])):
        law = linear_regression(known, [math.log(1 - point["accuracies"][head]) for point in points])
        power = law.intercept + law.slope * math.log(positions)
        accuracies.append(1 - math.exp(max(-50.0, min(0.0, power))))
    return accuracies


def _chain(accuracies: Sequence[float]) -> float:
    """Tokens a step over a chain of first guesses."""
    return expected_length(Tree.chain(len(accuracies)), [[one] for one in accuracies])


def _events(case: Case, event: str) -> list[dict[str, Any]]:
    return [line for line in case.log if line["event"] == event]


def _longer(case: Case, positions: int) -> str:
    """The command that trains for so many positions."""
    path = case.run.recipe_path
    recipe = case.read(lambda: load_recipe(path if path.is_file() else None), case.command("train"))
    return _again(case, f"train.max_tokens={positions}", f"train.epochs={2 * recipe.train.epochs}")


def _again(case: Case, *settings: str) -> str:
    """The command that trains by the same recipe with other settings."""
    path = case.run.recipe_path
    return case.command("train", *([str(path)] if path.is_file() else []), *settings)


def _more(case: Case) -> str:
    """The command that makes twice the conversations."""
    count = sum(1 for _ in case.run.data_path.open("rb")) if case.run.data_path.is_file() else 0
    return case.distill(max_samples=2 * count) if count else case.distill()


def _shares(values: Sequence[float]) -> str:
    return "/".join(f"{100 * one:.1f}" for one in values)


# Tokens of a prompt that is taken: long ones would take the examination's time.
PROMPT = 384
# Tokens a step that are not worth a word.
SLIGHT = 0.05
# The most by which what came is taken to exceed what was promised.
LUCKIEST = 2.0


def acceptance(case: Case) -> Finding:
    """Compares the measured acceptance length with the one that calibration and tree predict."""
    name = "acceptance"
    stats = decoded(case, 0.0)
    found = _rate(stats)
    low, high = bootstrap([[one.steps + one.accepted, one.steps] for one in stats], rate) or (found, found)
    shown = f"{found:.2f} ({low:.2f}-{high:.2f}) tokens a step on {len(stats)} prompts"
    figures = {"measured": found, "interval": [low, high], "nodes": case.tree.size, "prompts": len(stats)}
    if not case.run.calibration_path.is_file():
        return Finding(name, "unknown", f"{shown}; nothing foretells it", case.command("calibrate"), figures)
    expected = expected_length(case.tree, case.heads.accuracies)
    figures["expected"] = expected
    said = f"{shown}, where calibration and the tree of {case.tree.size} nodes promise {expected:.2f}"
    short = (expected - high) / max(expected - 1, 1e-9)  # of what drafts should add, beyond the interval
    verdict = graded(short, 0.1, 0.4) if expected - high > SLIGHT else "ok"
    own = case.distill(anew=True, seed="PROMPTS.json")  # prompts as they will be asked
    remedy = own if case.called is None else case.command("calibrate")
    return Finding(name, verdict, said, remedy, figures)


def temperature(case: Case) -> Finding:
    """Compares the acceptance length at the temperature asked for with that of greedy decoding."""
    name, heat = "temperature", case.temperature
    if heat == 0:
        return Finding(name, "ok", "greedy decoding was asked for: nothing is lost by sampling")
    greedy, sampled = _rate(decoded(case, 0.0)), _rate(decoded(case, heat))
    lost = (greedy - sampled) / max(greedy - 1, 1e-9)
    said = f"{sampled:.2f} tokens a step at temperature {heat:g}, {greedy:.2f} greedily"
    verdict = graded(lost, 0.2, 0.5) if greedy - sampled > SLIGHT else "ok"
    figures = {"temperature": heat, "sampled": sampled, "greedy": greedy, "share_lost": lost}
    remedy = case.distill(anew=True, temperature=f"{heat:g}")
    return Finding(name, verdict, said, remedy, figures)


def tree_size(case: Case) -> Finding:
    """Compares the speed of the run's tree on this machine with trees of other sizes."""
    name, tree = "tree size", case.tree
    costs = costs_for(case.backbone, case.drafter, stamp_of(case.run.drafter_dir))
    accuracies = case.heads.accuracies[: case.drafter.num_heads]
    promised = expected_length(tree, accuracies)
    # What came of what was promised holds for other sizes too.
    luck = min((_rate(decoded(case, 0.0)) - 1) / max(promised - 1, 1e-9), LUCKIEST)

    def worth(expected: float, seconds: float) -> float:
        return (1 + luck * (expected - 1)) / seconds

    plain, seconds = costs.step(1, 0), costs.step(tree.size, tree.max_depth)
    now = worth(promised, seconds)
    best = max(budgets(accuracies, costs), key=lambda one: worth(one.expected, one.seconds))
    gained = worth(best.expected, best.seconds)
    settled = 1 + luck * (promised - 1)
    said = (
        f"a step of {tree.size} nodes takes {seconds / plain:.2f} plain steps and settles {settled:.2f} tokens: "
        f"{now * plain:.2f} x plain; best are {best.tree.size} nodes at {gained * plain:.2f} x"
        if best.tree.size > 1
        else f"a step of {tree.size} nodes takes {seconds / plain:.2f} plain steps and settles {settled:.2f} "
        "tokens; no size of tree pays here"
    )
    figures = {"nodes": tree.size, "overhead": seconds / plain, "tokens_a_step": settled, "speedup": now * plain,
               "best_nodes": best.tree.size, "best_speedup": gained * plain}  # fmt: skip
    verdict = "bad" if now * plain < 0.98 else "warn" if gained > 1.05 * now else "ok"
    if not case.run.tree_path.is_file():  # then nothing decodes over this one: --tree auto takes the best
        verdict = "ok" if best.tree.size > 1 else "warn"
    remedy = typed("chat", tree="auto") if case.called is None else case.tree_command
    return Finding(name, verdict, said, remedy, figures)


def decoded(case: Case, heat: float) -> list[Stats]:
    """What decoding held-out prompts over the run's tree came to at a temperature, each prompt by itself; done once."""
    if heat not in case.answered:
        tree = case.tree
        decoder = Decoder(case.backbone, case.drafter, tree)
        rule = sampling_of(None, heat or None, 1.0, 0, 0)
        requests = [Request(prompt, case.tokens, rule) for prompt in prompts(case)]
        found = [Stats() for _ in requests]
        for sequence, step in decoder.run(requests):
            found[sequence.number].add(step)
        case.answered[heat] = [one for one in found if one.steps]
        if not case.answered[heat]:
            raise UserError("every answer ended with its first token", case.distill())
    return case.answered[heat]


def prompts(case: Case) -> list[list[int]]:
    """Held-out prompts as token ids, or MT-Bench's first questions for a drafter that came without its data."""
    said: list[list[dict[str, str]]] = []
    if case.run.data_path.is_file():
        for one in case.held_out or case.conversations:
            roles = [message["role"] for message in one.messages or []]
            if "assistant" in roles[1:]:
                said.append((one.messages or [])[: roles.index("assistant", 1)])
    else:
        questions = spread(read_questions(assets.mt_bench_path())[0], case.prompts)
        said = [[{"role": "user", "content": one.turns[0]}] for one in questions]
    most = min(PROMPT, case.backbone.max_positions - case.tokens - case.tree.max_depth - 1)
    fitting = (tokens for tokens in map(case.backbone.encode_chat, said) if len(tokens) <= most)
    found = [tokens for tokens, _ in zip(fitting, range(case.prompts), strict=False)]
    if not found:
        raise UserError("no prompt of the data is short enough to decode here", case.distill())
    return found


def _rate(stats: list[Stats]) -> float:
    return 1 + sum(one.accepted for one in stats) / sum(one.steps for one in stats)
