"""What is examined: a run, or what ships laid out like one; its parts are read when a check first asks for them."""

import hashlib
import heapq
import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from medusa_cli.assembly import check_fit
from medusa_cli.backbone import Backbone
from medusa_cli.backbone.dialogue import messages_of
from medusa_cli.decoding import Stats
from medusa_cli.drafters import load_drafter
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engines import load_backbone
from medusa_cli.engines.kernels import BITS
from medusa_cli.engines.load import BackboneOptions
from medusa_cli.errors import UserError, in_flags
from medusa_cli.runs.accuracies import Heads, read_calibration
from medusa_cli.runs.made import SEVERAL, Distillation, Made, describe_distillation, describe_drafter
from medusa_cli.runs.recipe import DistillRecipe, load_recipe
from medusa_cli.runs.run import Run
from medusa_cli.runs.usable import Malformed, ReadReport
from medusa_cli.training.data import held_out_ids
from medusa_cli.training.log import NAME, read_log
from medusa_cli.training.parsing import Record, name_of, parse, record_of
from medusa_cli.tree import Tree
from medusa_cli.tree.saved import load_tree
from medusa_cli.tree.search import largest, search

# Conversations that are looked at, of the data and of what was held out; nodes of a tree where the run has none.
SAMPLE, HELD_OUT, NODES = 64, 64, 16
T = TypeVar("T")


@dataclass(frozen=True)
class Dialogue:
    """A conversation of the data: its messages, None where it has none, and what training reads of it."""

    messages: list[dict[str, str]] | None
    record: Record
    tokenised: bool  # by whoever wrote the file, not by today's template


@dataclass
class Case:
    """A run under examination. called: its name as it was typed, None for what ships; place: how to load the model.

    temperature: the one that is held against greedy decoding; prompts and tokens: how much is decoded at each. Every
    part raises UserError, with the command that makes it, where it is missing or damaged. Nothing in the run changes.
    """

    run: Run
    called: str | None
    model: str
    place: BackboneOptions = field(default_factory=BackboneOptions)
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
            words |= {"engine": rounding} if rounding in BITS else {f"load_in_{rounding}": True}
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
        return load_backbone(self.model, **self.place, adapter=self.run.adapter, chat_template=template)

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
    def conversations(self) -> list[Dialogue]:
        """Some conversations of the data, those with the least digests of their names."""
        return self._data[0]

    @cached_property
    def held_out(self) -> list[Dialogue]:
        """Some of the conversations that training never saw."""
        return self._data[1]

    @cached_property
    def _data(self) -> tuple[list[Dialogue], list[Dialogue]]:
        path = self.run.data_path
        if not path.is_file():
            raise UserError(self._none("conversations", path), self.command("distill"))
        assert self.backbone is not None  # its errors are its own
        return self.read(self._sampled, self.distill(anew=True))

    def _sampled(self) -> tuple[list[Dialogue], list[Dialogue]]:
        path, share = self.run.data_path, self._fraction
        light: list[Record] = []
        some: list[tuple[int, int, Any]] = []
        for number, raw in enumerate(parse(path, ReadReport())):
            if not isinstance(raw, dict):
                continue
            light.append(Record(name_of(raw), [], [(0, 2)], None))
            heapq.heappush(some, (-_digest(light[-1].id), -number, raw))
            if len(some) > SAMPLE:
                heapq.heappop(some)
        held = held_out_ids(light, share) if light else set()
        others = []
        for raw in parse(path, ReadReport()) if held else ():
            if isinstance(raw, dict) and name_of(raw) in held:
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

    def _conversation(self, raw: dict[str, Any]) -> Dialogue | None:
        try:
            record = record_of(raw, self.backbone)
        except Malformed:
            return None
        try:
            messages = messages_of(raw)
        except Malformed:
            messages = None
        return Dialogue(messages, record, "tokens" in raw)


def typed(name: str, *words: str, **settings: Any) -> str:
    """A command as it is typed: its name, words, and settings as flags, one that is True without a value."""
    flags = [(in_flags(f"@{key}"), value) for key, value in settings.items()]
    given = [str(word) for flag, value in flags for word in ((flag,) if value is True else (flag, value))]
    return shlex.join(["medusa", name, *words, *given])


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"sample {name}".encode()).digest()[:8], "big")
