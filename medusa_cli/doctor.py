"""The checks of `medusa doctor`, each of which examines one part of a run and returns a finding."""

import math
import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from medusa_cli.api import Medusa
from medusa_cli.bench.questions import read_questions, spread
from medusa_cli.bench.stats import bootstrap, rate
from medusa_cli.data.conversation import Conversation, read_conversations
from medusa_cli.data.packing import batch_of, held_out_ids, split_conversations
from medusa_cli.data.states import rounding
from medusa_cli.decode import Stats, policy_of
from medusa_cli.distill.distillation import BETWEEN, HEADER
from medusa_cli.drafters import Batch, load_drafter
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.mtp import Mtp, as_ported
from medusa_cli.engine import Plan, load_backbone
from medusa_cli.engine.packed import check_packed, packed_files
from medusa_cli.errors import UserError, in_flags, of_system, shown
from medusa_cli.files import fetch, mtp_layer
from medusa_cli.files.io import ReadReport, read_object
from medusa_cli.files.model_source import ModelSource
from medusa_cli.loading import LoadedModel, check_fit
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import DEFAULT_LOADING, LoadOptions
from medusa_cli.runs.recipe import DistillRecipe, TrainRecipe
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.resolve import Calibration, read_calibration
from medusa_cli.runs.run import (
    Provenance,
    Run,
    check_backbone,
    describe_drafter,
    few_positions,
    outdated,
)
from medusa_cli.train.log import NAME, acceptance_of, read_log
from medusa_cli.tree import Tree
from medusa_cli.tree.io import load_tree, tree_provenance
from medusa_cli.tree.search import expected_length, largest, search

# The statuses from best to worst. A part that cannot be examined is "unknown", which is not a
# fault.
STATUSES = ("pass", "unknown", "warn", "fail")
SAMPLE = 64  # number of conversations from which prompts are taken
NODES = 16  # maximum size of the tree that is made if the run has no tree
PROMPTS = 8  # number of prompts that are decoded
TOKENS = 48  # maximum answer length in tokens
LONGEST_PROMPT = 384  # in tokens; longer prompts would make the examination slow
SLIGHT = 0.05  # tokens per step; a shortfall up to this size causes no warning
READ = 8  # number of conversations that the model reads again
LONGEST = 640  # maximum number of tokens that the model reads per conversation
# Distillation settings that must be repeated when a distillation is resumed.
REPEATED = ("seed", "max_new_tokens", "max_turns", "temperature", "random_seed")
# Share of an MTP layer's first draft tokens that should be right; a lower share suggests that the
# checkpoint is read wrongly.
FIRST_LEVEL = 0.5
CLEARLY = 0.1  # margin by which another reading of the checkpoint must be better
LAST = 50  # number of last steps over which the accuracy on trained text is averaged


@dataclass(frozen=True)
class Finding:
    """Holds a check's outcome: its status, a sentence, a command that helps, and the figures behind the sentence."""

    status: str
    text: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


def graded(value: float, warn: float, fail: float = math.inf) -> str:
    """Returns the status of a value based on two thresholds; larger values are worse."""
    if value >= fail:
        return "fail"
    return "warn" if value >= warn else "pass"


@dataclass
class Case:
    """Reads the parts of the run under examination, and changes nothing in it.

    called: the run's name as typed, or None for the drafter that ships for the model. A missing or damaged part raises
    UserError with the command that creates it.
    """

    run: Run
    called: str | None
    model: ModelSource
    options: LoadOptions = DEFAULT_LOADING

    def command(self, name: str, *words: str, **settings: Any) -> str:
        """Returns a command line for this run; for the drafter that ships, the command uses the run "mine"."""
        settings = {"run": self.called or "mine", **settings}
        flags: list[str] = []
        for key, value in settings.items():
            if "." in key:
                flags.append(f"{key}={value}")
            else:
                flags += [in_flags(f"@{key}"), str(value)]
        return shlex.join(["medusa", name, *words, *flags])

    @property
    def distill(self) -> str:
        """Returns the command that distills other data into a new run, because a run's settings cannot change."""
        return self.command(
            "distill", run=f"{self.called}-new" if self.called else "mine", model=self.model.name
        )

    @property
    def distill_more(self) -> str:
        """Returns the command that doubles the number of the run's conversations, with the same settings."""
        data = self.run.data_path
        if self.called is None or not data.is_file() or not (data.parent / HEADER).is_file():
            return self.distill
        header = read_object(data.parent / HEADER, "the distillation's header")
        first_seed = str(header.get("seed")).split(BETWEEN)[0]
        known = {"seed": first_seed, **dict(header.get("settings") or {})}
        usual = vars(DistillRecipe())
        other = [key for key in REPEATED if known.get(key) not in (None, usual[key])]
        same = {f"distill.{key}": known[key] for key in other}
        with data.open("rb") as lines:
            count = sum(1 for _ in lines)
        run = self.called if data == self.run.distill_path else str(data.parent)
        return self.command("distill", run=run, **same, max_samples=2 * count)

    def need(self, path: Path, command: str) -> Path:
        """Returns a path in the run; if there is no such file, raises UserError with the command that creates it."""
        if not path.is_file():
            raise UserError(f"{path} is missing", self.command(command))
        return path

    @cached_property
    def provenance(self) -> Provenance:
        """Returns the provenance of the drafter."""
        return describe_drafter(
            self.need(self.run.drafter_dir / "config.json", "train").parent
        ).provenance

    @cached_property
    def backbone(self) -> Backbone:
        """Returns the model, with this run's adapter and chat template."""
        template = self.run.chat_template
        return load_backbone(
            self.model, self.options, adapter=self.run.adapter, chat_template=template
        )

    @cached_property
    def drafter(self) -> HeadDrafter:
        """Returns the run's drafter, loaded for the backbone."""
        folder = self.need(self.run.drafter_dir / "config.json", "train").parent
        return load_drafter(folder, self.backbone)

    @cached_property
    def heads(self) -> Calibration:
        """Returns the measured accuracies of the heads."""
        return read_calibration(self.need(self.run.calibration_path, "calibrate"))

    @cached_property
    def tree(self) -> Tree:
        """Returns the run's tree, or else the best tree of up to NODES nodes according to the calibration."""
        if self.run.tree_path.is_file():
            tree = load_tree(self.run.tree_path)
        else:
            tree = search(self.heads.accuracies, min(NODES, largest(self.heads.accuracies)))
        check_fit(tree, self.drafter, str(self.run.tree_path))
        return tree

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Returns the events of one kind from the training log."""
        lines = read_log(self.need(self.run.path / NAME, "train"))
        return [line for line in lines if line["event"] == kind]

    @cached_property
    def conversations(self) -> list[Conversation]:
        """Returns the data's conversations in random order, with those held out from training first."""
        fraction = TrainRecipe().validation_fraction
        with suppress(UserError):  # other checks report a missing drafter
            fraction = self.provenance.held_out(fraction)
        path = self.need(self.run.data_path, "distill")
        every, _ = read_conversations(path, self.backbone)
        ids = held_out_ids([conversation.id for conversation in every], fraction)
        random.Random(0).shuffle(every)
        return sorted(every, key=lambda conversation: conversation.id not in ids)

    @cached_property
    def decoded(self) -> list[Stats]:
        """Returns the stats of held-out prompts, each decoded greedily on its own with the run's tree."""
        # The tree is read before the model is loaded, because the tree's files may be missing.
        policy = policy_of(self.tree)
        medusa = Medusa(LoadedModel(self.backbone, self.drafter, policy))
        answers = medusa.batch(self._prompts(), batch_size=1, max_new_tokens=TOKENS)
        stats = [answer.stats for answer in answers if answer.stats.steps]
        if not stats:
            raise UserError("every answer ended with its first token", self.distill)
        return stats

    def _prompts(self) -> list[list[int]]:
        """Returns the token ids of held-out prompts, or of MT-Bench questions if the drafter came without data."""
        if self.run.data_path.is_file():
            questions = [conversation.questions for conversation in self.conversations[:SAMPLE]]
            asked = [own[0] for own in questions if own]
        else:
            chosen = spread(read_questions(fetch.mt_bench_path())[0], PROMPTS)
            asked = [[{"role": "user", "content": question.turns[0]}] for question in chosen]
        limit = min(LONGEST_PROMPT, self.backbone.max_positions - TOKENS - self.tree.max_depth - 1)
        prompts = [self.backbone.encode_chat(messages) for messages in asked]
        prompts = [tokens for tokens in prompts if len(tokens) <= limit]
        if not prompts:
            raise UserError("no prompt of the data is short enough to decode here", self.distill)
        return prompts[:PROMPTS]


def backbone(case: Case) -> Finding:
    """Compares the model's weights, adapter and quantization with those of the model that the drafter was trained on.

    Also compares the packed weights with the digests that were written with them.
    """
    before = case.provenance.identity
    if not before:
        text = "the drafter does not name the model it was trained on"
        return Finding("unknown", text, case.command("train"))
    try:
        check_backbone(before, case.backbone.identity, "the drafter")
    except UserError as reason:
        return Finding("fail", reason.message, case.command("train"))
    now = {**case.backbone.identity, "rounding": rounding(case.backbone)}
    quantize = case.command("chat", quantize=before.get("rounding") or "none")
    for key, status, remedy in (
        ("adapter", "fail", case.command("train")),
        ("rounding", "warn", quantize),
    ):
        if before.get(key) != now.get(key):
            text = f"the drafter was trained on a model with {key} {before.get(key)}, it runs with {now.get(key)}"
            return Finding(status, text, remedy)
    if (damage := _damage(case)) is not None:
        return Finding("fail", damage, case.command("chat"))
    text = f"the drafter was trained on {shown(before.get('id'))}, which decodes"
    positions = describe_drafter(case.run.drafter_dir).max_position_embeddings
    if positions is not None and positions < case.backbone.max_positions:
        text += f"; {few_positions(positions, case.backbone.max_positions)}"
        return Finding("warn", text, case.command("train"))
    return Finding("pass", text)


def _damage(case: Case) -> str | None:
    """Returns how packed weights of the model or the drafter are damaged, and removes them; None if they are intact."""
    own = case.backbone.engine.packed_path
    folder = str(case.run.drafter_dir.resolve())
    for path, source in packed_files():
        try:
            if path == own or source == folder:
                check_packed(path)
        except ValueError as reason:
            damage = f"the packed weights {path} were damaged ({reason}) and are removed"
            return f"{damage}; the next command packs them again"
    return None


def calibration(case: Case) -> Finding:
    """Checks that the calibration was measured on the current drafter."""
    return _stamped(case, "calibration", case.heads.drafter_stamp, case.command("calibrate"))


def tree(case: Case) -> Finding:
    """Checks that the tree was made for the current drafter."""
    remedy = case.command("tree", budget="auto")
    if not case.run.tree_path.is_file():
        return Finding("unknown", f"{case.run.path} has no tree of its own", remedy)
    return _stamped(case, "tree", tree_provenance(case.run.tree_path).drafter_stamp, remedy)


def _stamped(case: Case, part: str, stamp: str | None, remedy: str) -> Finding:
    if stamp is None and case.called is None:
        return Finding("pass", f"the {part} ships with the drafter")
    if stamp is None:  # a tree given as widths belongs to no drafter
        return Finding("unknown", f"the {part} does not name its drafter", remedy)
    if outdated(stamp, case.run.drafter_dir):
        return Finding("fail", f"the {part} was made for an earlier drafter", remedy)
    return Finding("pass", f"the {part} was made for this drafter")


@torch.inference_mode()
def check_distilled_by_model(case: Case) -> Finding:
    """Compares the likelihood of the answers in the data with that of the model's own text at temperature 1."""
    tokens = 0
    nats = 0.0
    entropy = 0.0
    first = 0
    conversations = case.conversations[:READ]
    backbone = case.backbone
    for conversation in conversations:
        end = min(len(conversation.tokens), LONGEST, backbone.max_positions)
        ids = torch.tensor(conversation.tokens[:end], device=backbone.device)
        logits = backbone.engine.forward(
            Plan.chain(ids, logits="all"), backbone.engine.new_cache()
        ).logits[0]
        log_p = logits[:-1].float().log_softmax(-1)  # row i predicts token i + 1
        emitted = log_p.gather(1, ids[1:, None])[:, 0]
        for start, stop in conversation.spans:
            rows = slice(start - 1, min(stop, end) - 1)
            tokens += len(emitted[rows])
            nats -= float(emitted[rows].sum())
            entropy -= float((log_p[rows].exp() * log_p[rows]).sum())
            first += int((log_p[rows].argmax(-1) == ids[1:][rows]).sum())

    if not tokens:
        text = "no answer of the data fits into the model's context"
        return Finding("unknown", text, case.distill)
    text = (
        f"the model gives {tokens:,} tokens of answers {-nats / tokens:.2f} nats a token, its own text "
        f"{-entropy / tokens:.2f}; {first / tokens:.0%} are its first choice"
    )
    figures = {
        "logprob": -nats / tokens,
        "expected_logprob": -entropy / tokens,
        "greedy_agreement": first / tokens,
    }
    return Finding(
        graded((nats - entropy) / tokens, 0.2, 1.0),
        text,
        case.distill,
        {**figures, "tokens": tokens},
    )


@torch.inference_mode()
def first_level(case: Case) -> Finding:
    """Compares an MTP layer's first draft tokens with the data.

    If few of them are right, also tries other readings of the checkpoint.
    """
    drafter = case.drafter
    if not isinstance(drafter, Mtp):
        return Finding("pass", f"the {drafter.name} drafter is no port of a model's MTP layer")
    batch = _batch_of(case, drafter)
    share = _first_share(case, drafter, batch, batch)
    count = len(batch.targets(1))
    text = f"{share:.0%} of {count:,} first draft tokens are the data's"
    figures: dict[str, Any] = {"share": share, "positions": count}
    if share >= FIRST_LEVEL:
        return Finding("pass", text, "", figures)
    shares = {
        name: _first_share(case, other, read, batch)
        for name, (other, read) in as_ported(drafter, batch).items()
    }
    best = max(shares, key=lambda name: shares[name])
    figures["others"] = shares
    text = f"first level below {FIRST_LEVEL:.0%}: {text}"
    if shares[best] < share + CLEARLY:
        text += "; no other reading of the checkpoint makes it better"
        remedy = shlex.join(["medusa", "train", "--from", mtp_layer.NAME, "--run", "tuned"])
        return Finding("warn", text, remedy, figures)
    text += f"; {shares[best]:.0%} with {best}"
    return Finding("fail", text, "tell us the model: its checkpoint is read otherwise", figures)


def _batch_of(case: Case, drafter: HeadDrafter) -> Batch:
    """Returns a batch of held-out conversations with the model's hidden states.

    Raises UserError if no answer has three tokens.
    """
    limit = min(LONGEST, case.backbone.max_positions)
    read = ReadReport()
    data = split_conversations(case.conversations[:READ], read, fraction=0, max_length=limit)
    batch = batch_of(case.backbone, drafter, data.train)
    if not len(batch.targets(1)):
        raise UserError("no answer of the data has three tokens", case.distill)
    return batch


def _first_share(case: Case, drafter: HeadDrafter, read: Batch, batch: Batch) -> float:
    """Returns the share of first draft tokens predicted from `read` that match the next tokens in `batch`."""
    scores = next(drafter.logits(case.backbone, read))
    rows = batch.targets(1)
    guesses = drafter.draft_ids[scores[batch.learned_index[rows]].argmax(-1)]
    return float((guesses == batch.next[rows + 1]).float().mean())


def over_fitting(case: Case) -> Finding:
    """Compares the heads' accuracy on trained and on held-out text, and checks whether the held-out loss rises."""
    steps = case.events("stepped")
    checks = case.events("validated")
    if not steps or not checks:
        text = "the training's log has no step or no validation"
        return Finding("unknown", text, case.command("train"))
    last = zip(*(step["accuracies"] for step in steps[-LAST:]), strict=True)
    trained = [_mean(shares) for shares in last]
    held_out = checks[-1]["accuracies"]
    pairs = [pair for pair in zip(trained, held_out, strict=True) if None not in pair]
    measured = [_mean(check["head_losses"]) for check in checks]
    losses = [loss for loss in measured if loss is not None]
    if not pairs or not losses:
        return Finding("unknown", "the answers are too short to measure a head", case.distill_more)

    gap = fmean(own - other for own, other in pairs)
    risen = losses[-1] / max(min(losses), 1e-9) - 1
    text = (
        f"first guesses right {_shares(trained)} % on trained text, {_shares(held_out)} % on held-out text, whose loss "
        f"rose by {risen:.0%} since its best"
    )
    status = "fail" if gap >= 0.12 or risen >= 0.1 else graded(max(gap / 0.05, risen / 0.03), 1.0)
    figures = {"trained": trained, "held_out": held_out, "gap": gap, "loss_risen": risen}
    return Finding(status, text, case.distill_more, figures)


def training_length(case: Case) -> Finding:
    """Measures the gain from the second half of training; doubling the positions should add about as much again."""
    checks = case.events("validated")
    end = checks[-1]["total_positions"] if checks else 0
    half = [check for check in checks if end / 4 <= check["total_positions"] <= end / 2]
    if not half:
        text = "the log has no validation in mid-training"
        return Finding("unknown", text, case.command("train"))
    before = acceptance_of(half[-1]["accuracies"])
    after = acceptance_of(checks[-1]["accuracies"])
    text = (
        f"the last {end - half[-1]['total_positions']:,} of {end:,} positions raised a chain of first guesses from "
        f"{before:.2f} to {after:.2f} tokens per step; twice as many should give about as much again"
    )
    figures = {"positions": end, "tokens_a_step": after, "tokens_a_step_before": before}
    status = graded(after / before - 1, 0.03)
    if over_fitting(case).status in ("warn", "fail"):
        text = f"{text}, of other conversations: the heads over-fit these"
        return Finding(status, text, case.distill_more, figures)
    recipe = case.run.recipe_path if case.run.recipe_path.is_file() else None
    settings = f"train.max_tokens={2 * end}", f"train.epochs={2 * load_recipe(recipe).train.epochs}"
    remedy = case.command("train", *([str(recipe)] if recipe else []), *settings)
    return Finding(status, text, remedy, figures)


def _mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the values that are known, or None if there is none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _shares(values: Sequence[float | None]) -> str:
    return "/".join("-" if value is None else f"{100 * value:.1f}" for value in values)


def acceptance(case: Case) -> Finding:
    """Compares the measured acceptance length with the length that the calibration and the tree predict."""
    stats = case.decoded
    length = 1 + sum(part.accepted for part in stats) / sum(part.steps for part in stats)
    sums = [[part.steps + part.accepted, part.steps] for part in stats]
    low, high = bootstrap(sums, rate) or (length, length)
    text = f"{length:.2f} ({low:.2f}-{high:.2f}) tokens per step on {len(stats)} prompts"
    figures = {"measured": length, "interval": [low, high]}
    figures |= {"nodes": case.tree.size, "prompts": len(stats)}
    if not case.run.calibration_path.is_file():
        text = f"{text}; without a calibration none is expected"
        return Finding("unknown", text, case.command("calibrate"), figures)
    expected = figures["expected"] = expected_length(case.tree, case.heads.accuracies)
    # The shortfall beyond the interval, relative to the tokens that drafts should add.
    short = (expected - high) / max(expected - 1, 1e-9)
    status = graded(short, 0.1, 0.4) if expected - high > SLIGHT else "pass"
    # The drafter that ships is already calibrated. For prompts unlike its training data, it needs
    # new data.
    remedy = case.command("calibrate") if case.called else case.distill
    text = f"{text}; calibration and the tree of {case.tree.size} nodes predict {expected:.2f}"
    return Finding(status, text, remedy, figures)


CHECKS: dict[str, Callable[[Case], Finding]] = {
    "backbone": backbone,
    "calibration": calibration,
    "tree": tree,
    "own words": check_distilled_by_model,
    "first level": first_level,
    "over-fitting": over_fitting,
    "training length": training_length,
    "acceptance": acceptance,
}


def examine(case: Case, name: str) -> Finding:
    """Runs a check; the finding's status is "unknown" if a part that it needs is missing or damaged."""
    try:
        finding = CHECKS[name](case)
    except (UserError, OSError) as reason:
        error = reason if isinstance(reason, UserError) else of_system(reason)
        finding = Finding("unknown", error.message, error.remedy)
    remedy = "" if finding.status == "pass" else finding.remedy
    return replace(finding, name=name, text=in_flags(finding.text), remedy=in_flags(remedy))
