"""Calibration: how often each head's i-th guess is right, at the positions where decoding uses the head.

Source: Medusa, section 3.3.3.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.data.conversation import check_conversations
from medusa_cli.data.packing import Dataset, positions_of, read_dataset
from medusa_cli.data.states import with_hidden_states
from medusa_cli.drafters import drafter_kind, load_drafter
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.io import Document
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone
from medusa_cli.progress import ShowProgress, show_nothing
from medusa_cli.runs.load_options import DEFAULT_LOADING, LoadOptions
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.run import STAMP, Run, describe_drafter, provenance, stamp_of
from medusa_cli.train.setup import longest, options_for, runs_model
from medusa_cli.tree import Tree
from medusa_cli.tree.search import largest, search

# Number of positions P in a batch. Memory holds one head's scores at a time, [P, M].
POSITIONS = 512
# Temperatures tried for a head's confidences, and the number of positions on which they are
# compared. The loss is a smooth function of the temperature, so more positions are not needed.
TEMPERATURES = tuple(round(0.6 + 0.05 * step, 2) for step in range(29))
FIT_POSITIONS = 4096
# Size of the tree with which decoding is simulated. Accuracies measured with 14 nodes predict the
# acceptance length of trees of 4 to 64 nodes to within 2.5 %.
NODES = 14
ROUNDS = 3
# Weight of the accuracy over all positions, as a number of simulated steps.
PRIOR = 20
# Rank of a token that is not among the guesses, and rank of a position past the answer's end.
MISSED = 1 << 30
PAST_END = (1 << 30) + 1
# Default number of held-out conversations for drafters that draft from the verify pass: the model
# must run on every conversation. Running it on 100 of them (22,000 tokens) takes a few minutes.
WHOLE = 100
log = logging.getLogger(__name__)


def calibrate(
    run: Run,
    model: ModelSource,
    folder: Path,
    loading: LoadOptions = DEFAULT_LOADING,
    *,
    data: Path | None = None,
    top: int = 10,
    max_samples: int | None = None,
    show: ShowProgress = show_nothing,
) -> Document:
    """Measures the `top` best guesses of each head of the drafter in a folder; returns the calibration document.

    data: a file of conversations; all of them are measured. If `data` is None, the conversations that were held out in
    training are measured. show: called with a name, the number of tokens done and the total.
    """
    kind = drafter_kind(folder)
    origin = describe_drafter(folder).provenance
    recipe = load_recipe(run.recipe_path if run.recipe_path.is_file() else None)
    # A run has no conversations of its own if it was trained on a file outside the run.
    learned = origin.data.path if origin.data is not None and not run.data_path.is_file() else None
    source = data or Path(learned or run.data_path)
    if max_samples is None and data is None and kind.uses_verify_pass:
        max_samples = WHOLE
    part = "" if data else "the held-out part of "
    hint = "" if data else "; @data takes others, @max_samples N fewer"
    limit = f"; at most {max_samples:,} conversations" if max_samples else hint
    log.info(f"calibrating {folder} on {part}{source}, top {top} guesses a head{limit}")

    check_conversations(source)
    own = folder.resolve() == run.drafter_dir.resolve()
    backbone = load_backbone(
        model,
        options_for(kind, recipe.train, loading),
        adapter=run.adapter if own else None,
        chat_template=run.chat_template,
    )
    run.bind(backbone.identity)
    drafter = load_drafter(folder, backbone)

    fraction = 0.0 if data else origin.held_out(recipe.train.validation_fraction)
    online = runs_model(kind, recipe.train)
    whole = read_dataset(source, backbone, fraction, longest(recipe.train) if online else None)
    if data:
        log.info(str(whole.report))
    items = whole.train if data else whole.held_out
    if not items:
        raise UserError(
            "no conversation is held out for calibration", "distill more than one conversation"
        )
    dataset = replace(whole, train=[], held_out=items[:max_samples])
    if not online:
        dataset = with_hidden_states(
            dataset, run, backbone, source, drafter.taps, among=whole, show=show
        )
    return {
        **provenance(
            backbone.identity,
            data={"path": str(source), "digest": dataset.digest},
            drafter=str(folder),
        ),
        STAMP: stamp_of(folder),
        "heads": drafter.num_heads,
        "top": top,
        **measure(backbone, drafter, dataset, top, show),
    }


def measure(
    backbone: Backbone,
    drafter: HeadDrafter,
    dataset: Dataset,
    top: int = 10,
    show: ShowProgress = show_nothing,
) -> Document:
    """Measures the `top` best guesses of every head k on the held-out items of a data set.

    accuracies[k][i]: how often guess i of head k is right, as a share of the positions where decoding uses head k. A
    token outside the draft vocabulary counts as a miss. counted[k]: the number of positions that have a target for head
    k. temperatures[k]: the softmax temperature at which the confidences of head k fit best (lowest log loss). roots:
    the number of simulated steps. Raises UserError if the answers are too short to reach every head.
    """
    vocabulary = len(drafter.draft_ids)
    if not 1 <= top <= vocabulary:
        raise UsageError(
            f"@top {top} is not among the {vocabulary} tokens the heads know",
            f"use 1 to {vocabulary}",
        )
    drafter.eval()
    items = dataset.held_out
    heads = drafter.num_heads
    ranks: list[Tensor] = []
    counted = torch.zeros(heads, dtype=torch.long)
    log_loss = torch.zeros(heads, len(TEMPERATURES), dtype=torch.double)
    index = drafter.vocabulary_index(backbone.device)
    total = positions_of(items)
    positions = 0

    for conversations in dataset.micro_batches(items, POSITIONS):
        batch = dataset.batch(backbone, drafter, conversations)
        own = torch.full((len(batch.learned), heads), PAST_END)
        for head, scores in enumerate(drafter.logits(backbone, batch)):
            # Head k (from 1) predicts the token k places after the backbone's next token.
            ahead = head + 1
            rows = batch.targets(ahead)
            if not len(rows):
                continue
            learned = batch.learned_index[rows]
            scores = scores[learned]
            targets = batch.next[rows + ahead]
            # [rows, top]
            right = drafter.draft_ids[scores.topk(top, dim=-1).indices] == targets[:, None]
            own[learned.cpu(), head] = torch.where(
                right.any(-1), right.int().argmax(-1), MISSED
            ).cpu()
            counted[head] += len(rows)
            if positions < FIT_POSITIONS:
                log_loss[head] += _log_losses(scores, index[targets])
        ranks.append(own)
        positions += len(batch.learned)
        show("calibrating", positions, total)

    if not counted.all():
        raise UserError(
            f"the answers are too short to calibrate {heads} heads",
            "distill longer or more answers",
        )
    accuracies, roots = accuracies_at_roots(torch.cat(ranks), top)
    return {
        "accuracies": accuracies,
        # If none of a head's targets is in the draft vocabulary, its confidences cannot be judged.
        "temperatures": [TEMPERATURES[int(row.argmin())] if row.any() else 1.0 for row in log_loss],
        "counted": counted.tolist(),
        "roots": roots,
        "positions": positions,
        "answers": sum(len(item.spans) for item in items),
    }


def accuracies_at_roots(ranks: Tensor, top: int) -> tuple[list[list[float]], int]:
    """Returns each head's accuracies [K][top] at the positions where decoding uses the head, and the number of steps.

    ranks [n, K]: the rank of the right token among each head's guesses, given the right tokens before it, at the n
    positions of whole answers. A decoding step begins where the previous step's drafts failed, at a position that is
    hard to guess. In a step, a head counts only if the guesses of the heads before it were accepted. Decoding is
    simulated with the best tree of NODES nodes. That tree depends on the accuracies; three rounds are enough for the
    tree and the accuracies to stop changing. Few steps reach the last heads, so each head's accuracy over all positions
    is averaged in, with the weight of PRIOR steps.
    """
    known = (ranks != PAST_END).double()
    right = (ranks[..., None] == torch.arange(top)).double()  # [n, K, top]
    everywhere = right.sum(0) / known.sum(0)[:, None]
    asked = torch.ones_like(ranks, dtype=torch.bool)
    for _ in range(ROUNDS + 1):
        steps = asked.double() * known
        counted = (right * steps[..., None]).sum(0) + PRIOR * everywhere
        accuracies = (counted / (steps.sum(0) + PRIOR)[:, None]).tolist()
        lengths = accepted(ranks, search(accuracies, min(NODES, largest(accuracies))))
        roots = begins(lengths)
        asked = roots[:, None] & (torch.arange(ranks.shape[1]) <= lengths[:, None])
    return accuracies, int(roots.sum())


def accepted(ranks: Tensor, tree: Tree) -> Tensor:
    """Returns the number [n] of draft tokens that a step with the tree accepts at each position, given ranks [n, K]."""
    # The last column stands for every rank that the tree does not use.
    children = torch.full((tree.size, max(tree.widths) + 1), -1)
    for child in range(1, tree.size):
        children[tree.parents[child], tree.ranks[child]] = child
    node = torch.zeros(len(ranks), dtype=torch.long)
    depth = torch.zeros(len(ranks), dtype=torch.long)
    for column in ranks.T[: tree.max_depth]:
        following = children[node, column.clamp(max=children.shape[1] - 1)]
        node = torch.where(node < 0, node, following)
        depth += node >= 0
    return depth


def begins(accepted: Tensor) -> Tensor:
    """Returns a mask [n] of the positions where steps begin.

    accepted [n]: how many draft tokens a step that begins at each position accepts.
    A step ends one token after its accepted tokens. The positions belong to whole answers, and no
    step accepts tokens past the end of its answer.
    """
    roots = torch.zeros(len(accepted), dtype=torch.bool)
    at = 0
    lengths = accepted.tolist()
    while at < len(lengths):
        roots[at] = True
        at += lengths[at] + 1
    return roots


def _log_losses(scores: Tensor, targets: Tensor) -> Tensor:
    """Returns the summed log loss of targets under scores [n, M] at each temperature; targets of -1 are left out."""
    known = targets >= 0
    scores = scores[known]
    targets = targets[known]
    picked = scores.gather(1, targets[:, None]).sum()
    sums = [(scores / heat).logsumexp(-1).sum() - picked / heat for heat in TEMPERATURES]
    return torch.stack(sums).cpu().double()
