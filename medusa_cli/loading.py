"""Loading of the chosen backbone, its drafter and the draft policy."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.decode import AdaptivePolicy, DraftPolicy
from medusa_cli.decode.adaptive_policy import Growing
from medusa_cli.decode.graph_trial import captures
from medusa_cli.decode.policy import UNCALIBRATED, DynamicTreePolicy, StaticTreePolicy
from medusa_cli.decode.processors import check_generation_config
from medusa_cli.decode.step_times import step_times_for
from medusa_cli.drafters import Drafter, load_drafter
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone, lora
from medusa_cli.progress import ShowProgress, show_nothing
from medusa_cli.runs.load_options import DEFAULT_LOADING, LoadOptions, as_trained
from medusa_cli.runs.resolve import Calibration, Choice, read_calibration
from medusa_cli.runs.run import outdated, stamp_of
from medusa_cli.tree import DynamicTree, Tree
from medusa_cli.tree.io import load_tree, tree_provenance
from medusa_cli.tree.search import SizedTree, StepTimes, budgets, largest, search

# Maximum number of nodes of a tree that grows during a step.
MAX_GROWN_NODES = 32
# Number of draft tokens with `--tree auto` if the drafter has neither a calibration nor a tree.
CHAIN = 3
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """Holds a backbone and, unless decoding is plain, a drafter and the policy that decides what is drafted.

    template_file: the file whose chat template replaces the model's, if a run or a drafter brings one.
    """

    backbone: Backbone
    drafter: Drafter | None = None
    policy: DraftPolicy | None = None
    template_file: Path | None = None

    @property
    def description(self) -> str:
        """Returns one line: model, number type, device, engine, drafter, policy, and the file of the chat template."""
        backbone = self.backbone
        policy = self.policy.description if self.policy is not None else "plain decoding"
        drafter = f"{self.drafter.name} drafter, " if self.drafter is not None else ""
        template = f", chat template of {self.template_file}" if self.template_file else ""
        return f"{backbone.description}, {drafter}{policy}{template}"


def load_model(
    choice: Choice,
    options: LoadOptions = DEFAULT_LOADING,
    *,
    chat: bool = False,
    show: ShowProgress = show_nothing,
) -> LoadedModel:
    """Loads the chosen model, drafter and tree; raises UserError if they do not fit together.

    chat: True requires a chat template. show: shows how many steps were timed, if `--tree auto` is used with a drafter
    for the first time on this machine.
    """
    tree = static_tree(choice)  # unusable files are rejected before the model is loaded
    options = as_trained(options, choice.trained)
    backbone = load_backbone(
        choice.source,
        options,
        adapter=choice.adapter,
        chat_template=choice.template,
        chat=chat,
        drafter=choice.drafter,
    )
    check_generation_config(backbone)
    if choice.run is not None:
        choice.run.bind(backbone.identity)
    if choice.drafter is None and not choice.ngrams:
        return LoadedModel(backbone, template_file=choice.template_file)
    drafter, policy = load_drafting(choice, backbone, tree, show)
    return LoadedModel(backbone, drafter, policy, choice.template_file)


def with_drafting(loaded: LoadedModel, choice: Choice) -> LoadedModel:
    """Returns a loaded model with the drafter and the tree of another choice.

    Raises UserError if the choice has another model or adapter.
    """
    backbone = loaded.backbone
    adapter = None if choice.adapter is None else lora.digest(choice.adapter)
    if choice.model != backbone.id or adapter != backbone.adapter:
        fault = f"the model is {backbone.id} with the adapter {backbone.adapter}, not {choice.model} with {adapter}"
        raise UserError(fault, "start the server again")
    if choice.drafter is None and not choice.ngrams:
        return LoadedModel(backbone, template_file=loaded.template_file)
    drafter, policy = load_drafting(choice, backbone, static_tree(choice))
    return LoadedModel(backbone, drafter, policy, loaded.template_file)


def static_tree(choice: Choice) -> Tree | None:
    """Returns the chosen static tree, which is either read from a file or searched.

    Returns None for plain decoding, and for `auto` with a calibration. Warns if the tree was made for another drafter.
    Raises UsageError for a size that the heads do not allow.
    """
    tree = choice.tree
    if choice.drafter is None or (tree.kind == "auto" and choice.calibrated):
        return None
    if tree.searched and tree.nodes is not None:
        accuracies = _calibration(choice).accuracies
        if tree.nodes > largest(accuracies):
            limit = f"these heads allow 1 to {largest(accuracies):,} nodes, the root included"
            raise UsageError(f"@tree {tree} is not valid", limit)
        return search(accuracies, tree.nodes)
    if tree.file is None:
        return Tree.root_only()
    if outdated(tree_provenance(tree.file).drafter_stamp, choice.drafter):
        log.warning(
            f"the tree {tree.file} was made for another drafter than {choice.drafter}, perhaps an earlier one; "
            "`medusa calibrate` and `medusa tree` make one that fits"
        )
    return load_tree(tree.file)


def _calibration(choice: Choice) -> Calibration:
    """Returns the heads' measured accuracies, if any; warns if they were measured on another drafter."""
    if choice.calibration is None or choice.drafter is None or not choice.calibrated:
        return Calibration()
    calibration = read_calibration(choice.calibration, choice.drafter)
    if calibration.stale:
        log.warning(
            f"{choice.calibration} was measured on another drafter than {choice.drafter}, perhaps an earlier one; "
            "`medusa calibrate` measures this one"
        )
    return calibration


def load_drafting(
    choice: Choice, backbone: Backbone, tree: Tree | None, show: ShowProgress = show_nothing
) -> tuple[Drafter | None, DraftPolicy]:
    """Loads the chosen drafter and creates its policy; without a drafter, the policy drafts only n-gram matches.

    With FIRP, each node needs extra rows, so n-gram matches cost more than they gain. Warns if
    n-gram matches were requested nevertheless. Raises UserError if the drafter and the tree do not
    fit together.
    """
    drafter = None if choice.drafter is None else load_drafter(choice.drafter, backbone)
    if drafter is not None and tree == Tree.root_only() and choice.tree.kind == "auto":
        tree = Tree.chain(min(drafter.num_heads, CHAIN))
    if drafter is not None and tree is not None:
        check_fit(tree, drafter, str(choice.tree.file or choice.tree))
    ngrams = choice.ngrams and not (drafter is not None and drafter.uses_verify_pass)
    if drafter is not None and choice.lookup and not ngrams:
        log.warning("@lookup has no effect with a %s drafter", drafter.name)
    if drafter is None or choice.tree.kind == "auto":
        return drafter, _adaptive_policy(choice, backbone, drafter, tree, ngrams, show)
    assert tree is not None
    if choice.tree.kind == "dynamic":
        return drafter, DynamicTreePolicy(_dynamic_tree(choice, drafter, tree), ngrams)
    accuracies = _calibration(choice).accuracies if choice.ngrams else ()
    return drafter, StaticTreePolicy(tree, accuracies, ngrams)


def _adaptive_policy(
    choice: Choice,
    backbone: Backbone,
    drafter: Drafter | None,
    tree: Tree | None,
    ngrams: bool,
    show: ShowProgress,
) -> AdaptivePolicy:
    """Returns the policy for `--tree auto`, based on the step times of this machine.

    Trees grow if the drafter's confidences were calibrated. Two kinds of trees do not grow: trees
    in a CUDA graph, and FIRP's trees, whose depth is decided one step earlier.
    """
    stamp = None if choice.drafter is None else stamp_of(choice.drafter)
    step_times = step_times_for(backbone, drafter, stamp, show=show)
    if drafter is None:
        return AdaptivePolicy([], step_times, ngrams)
    calibration = _calibration(choice)
    trees = _sized_trees(calibration, drafter, tree, step_times)
    growing = None
    if calibration.temperatures and not drafter.uses_verify_pass and not captures(backbone.engine):
        temperatures = tuple(calibration.temperatures)
        limits = DynamicTree(MAX_GROWN_NODES, drafter.num_heads, temperatures)
        growing = Growing(limits, tuple(row[0] for row in calibration.accuracies))
    return AdaptivePolicy(trees, step_times, ngrams, growing)


def _dynamic_tree(choice: Choice, drafter: Drafter, tree: Tree) -> DynamicTree:
    """Returns the dynamic tree of the chosen size, by default the size of the static tree."""
    nodes = choice.tree.nodes or tree.size
    return DynamicTree(nodes, drafter.num_heads, tuple(_calibration(choice).temperatures))


def _sized_trees(
    calibration: Calibration, drafter: Drafter, tree: Tree | None, step_times: StepTimes
) -> list[SizedTree]:
    """Returns the best tree of each size according to the calibration; without a calibration, the given tree."""
    accuracies = calibration.accuracies[: drafter.num_heads]
    if tree is not None and not accuracies:
        return [SizedTree(tree, 1 + UNCALIBRATED * tree.max_depth)]
    known = len(getattr(drafter, "draft_ids", ())) or None
    return list(budgets([row[:known] for row in accuracies], step_times))


def check_fit(tree: Tree, drafter: Any, name: str) -> None:
    """Raises UserError if a tree (`name`: its file or option) needs more heads or guesses than the drafter has."""
    if tree.max_depth > drafter.num_heads:
        raise UserError(
            f"the tree {name} is {tree.max_depth} deep, the drafter has {drafter.num_heads} heads",
            f"make a tree with `medusa tree --heads {drafter.num_heads}`, or give another @tree",
        )
    vocabulary = len(getattr(drafter, "draft_ids", ())) or None
    if vocabulary is not None and max(tree.widths, default=0) > vocabulary:
        fault = f"the tree {name} uses guess {max(tree.widths)}, the heads know {vocabulary} tokens"
        raise UserError(fault, "use a narrower tree")
