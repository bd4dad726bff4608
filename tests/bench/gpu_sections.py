"""The sections of the GPU probe: generators of facts about times, bits and rates, each on one model."""

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset
from medusa_cli.decode import Decoder, DraftPolicy, Request, policy_of
from medusa_cli.decode.accept import longest_path
from medusa_cli.decode.graph_step import grown, sample_trees, tree_operations
from medusa_cli.decode.policy import DynamicTreePolicy
from medusa_cli.decode.step_times import NullDrafter, measure_step_times
from medusa_cli.device import best_time, upload
from medusa_cli.distill import local
from medusa_cli.drafters import Drafter, Eagle, MedusaHeads, NewTokens
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine import Plan
from medusa_cli.engine.exact import difference
from medusa_cli.engine.tiles import Tiles
from medusa_cli.files.io import ReadReport
from medusa_cli.model import Backbone
from medusa_cli.native import Format, PackedMatrix
from medusa_cli.runs.recipe import DistillRecipe
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.run import Run
from medusa_cli.train import Trainer
from medusa_cli.train.fused_linear import PlainLoss, Targets, kernel_of
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.tensors import GrowingTrees
from tests.bench.gpu_lab import HEADS, LEVELS, WORDS, Lab
from tests.helpers import tiny_tokenizer

COUNTS = (1, 2, 7, 8, 16, 33, 64, 256)
PLACES = (1, 6, 31, 63)
COLUMNS = (256, 4096, 16_384)
PROMPT = 1024
# Trees of 16 and 64 nodes, as wide at the top as a search makes them.
TREES = {16: Tree.dense([3, 2, 1]), 64: Tree.dense([9, 2, 1, 1])}
# Kernels of a chain of launches.
LAUNCHES = 1000
# A draft token is right by this chance.
CHANCE = 0.6
PATHS = ("today", "exact")
# Drafters, sources of states and positions of a training step.
TRAININGS = (
    (MedusaHeads, "kept", 6144),
    (Eagle, "kept", 6144),
    (Eagle, "kept", 24_576),
    (Eagle, "fresh", 6144),
)

Facts = Iterator[dict[str, Any]]


class Synthetic(NullDrafter):
    """Puts the right token on each node by a chance; the answer is known.

    Siblings are right independently, so more tokens are accepted than of any real drafter.
    """

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], chance: float) -> None:
        super().__init__()
        self.text, self.chance, self.random = [*prompt, *answer], chance, random.Random(0)

    def draft(
        self,
        backbone: Backbone,
        sequences: Sequence[Drafter],
        new: Sequence[NewTokens],
        tree: Tree | DynamicTree,
    ) -> list[Draft]:
        assert isinstance(tree, Tree)
        drafts = []
        for tokens in new:
            ahead = [*self.text[tokens.end + 1 :], *[0] * (tree.max_depth + 1)]
            ids = [tokens.root]
            for depth in tree.depths[1:]:
                true = self.random.random() < self.chance
                ids.append(ahead[depth - 1] if true else self.random.randrange(backbone.vocab_size))
            drafts.append(Draft(upload(ids, backbone.device), tree))
        return drafts


def unit(lab: Lab, name: str) -> Facts:
    """Times a reading's unit, and what a launch costs within a graph."""
    yield {"copy_bytes_per_s": lab.bandwidth}
    for size in (1, 4096):
        x = torch.zeros(size, device=lab.device)
        count = 10 if lab.smoke else LAUNCHES
        seconds = lab.seconds(partial(add_often, x, count))
        yield {"floats": size, "us_per_kernel": 1e6 * seconds / count}


def add_often(x: Tensor, count: int) -> None:
    for _ in range(count):
        x.add_(1)


def products(lab: Lab, name: str) -> Facts:
    """Times a model's matmuls by torch and by our kernel, and compares a row's bits by rows and by place."""
    layer = lab.choose(lab.model(name), "today").layers[0]
    for way in ("torch", "ours"):
        multiply = F.linear if way == "torch" else lab.kernels.matmul
        for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
            weight = matrix.weight
            # Copies of more than the L2 cache holds take turns.
            weights = [weight] if lab.smoke else [weight.clone() for _ in range(4)]
            x = torch.randn(COUNTS[-1], weight.shape[1], device=lab.device).to(weight.dtype)
            facts = {"shape": list(weight.shape), "way": way}
            facts |= same_bits(partial(multiply, weight=weight), x)
            for rows in lab.rows:
                seconds = lab.seconds(partial(multiply_each, multiply, x[:rows], weights))
                yield {**facts, "rows": rows, "us": 1e6 * seconds / len(weights)}


def multiply_each(
    multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]
) -> None:
    for weight in weights:
        multiply(x, weight)


def same_bits(multiply: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, bool]:
    """Returns if a row has the same bits among any number of rows, and at any place of 64."""
    whole = multiply(x)
    few = multiply(x[:64])
    by_rows = (torch.equal(multiply(x[:rows]), whole[..., :rows, :]) for rows in COUNTS)
    by_place = (torch.equal(multiply(x[:64].roll(n, 0)), few.roll(n, -2)) for n in PLACES)
    return {"same_by_rows": all(by_rows), "same_by_place": all(by_place)}


def tiles(lab: Lab, name: str) -> Facts:
    """Times matmuls of quantized weights, and compares their bits with those of the native engine."""
    from tests.test_native import random_matrix

    count, depth = (64, 256) if lab.smoke else (4096, 4096)
    x = torch.randn(COUNTS[-1], depth)
    for format in (Format.Q4_K, Format.Q6_K, Format.Q8_0):
        packed = PackedMatrix.pack(random_matrix(format, count, depth), None, int8_rows=True)
        # Copies of more than the L2 cache holds take turns.
        copies = [Tiles.of(packed, lab.device) for _ in range(1 if lab.smoke else 8)]
        rounded = x.to(lab.device)
        ours = lab.kernels.tile_matmul(rounded, copies[:1]).cpu()
        facts = {
            "format": format.name,
            "shape": [count, depth],
            "native_bits": torch.equal(ours, torch.from_numpy(packed.multiply(x.numpy()))),
        }
        for rows in lab.rows:
            work = partial(lab.kernels.tile_matmul, rounded[:rows], copies)
            yield {**facts, "rows": rows, "us": 1e6 * lab.seconds(work) / len(copies)}


def loss(lab: Lab, name: str) -> Facts:
    """Times the loss of a block of rows by its kernel and by plain torch."""
    shapes = [(8, 100)] if lab.smoke else [(4096, WORDS), (1024, 151_936)]
    ways = {"plain": PlainLoss(), "kernel": kernel_of(lab.device)}
    yield {"kernel_agrees": ways["kernel"] is not None}
    for rows, width in shapes:
        logits = torch.randn(rows, width, device=lab.device, dtype=torch.bfloat16)
        ids = torch.arange(rows, device=lab.device)
        right = torch.empty(rows, dtype=torch.uint8, device=lab.device)
        targets = Targets(ids, torch.ones(rows, device=lab.device), right)
        for way, compute in ways.items():
            if compute is not None:
                work = partial(compute, logits, targets)
                yield {"way": way, "shape": [rows, width], "us": 1e6 * lab.seconds(work)}


def trees(lab: Lab, name: str) -> Facts:
    """Times three levels of two dynamic trees and their longest paths, by kernels and by plain torch."""
    ways = {"plain": (GrowingTrees, longest_path), "kernels": tree_operations(lab.device)}
    yield {"kernels_agree": ways["plain"] != ways["kernels"]}
    for way, operations in ways.items():
        work = partial(grown, *sample_trees(lab.device), *operations)
        yield {"way": way, "us": 1e6 * lab.seconds(work)}


def profile(lab: Lab, name: str) -> Facts:
    """Counts the kernels of a replayed step and sums their times, by path and, last, with drafts of a dynamic tree."""
    if not lab.graphs:
        return
    backbone = lab.model(name)
    dynamic = DynamicTreePolicy(DynamicTree(64, LEVELS))
    for drafter, policy, sizes in (
        (None, policy_of(Tree.root_only()), (1, 64)),
        (lab.with_draft_vocabulary(Eagle, backbone), dynamic, (64,)),
    ):
        for path in PATHS:
            lab.choose(backbone, path)
            decoder = Decoder(backbone, drafter, policy, cuda_graphs=True)
            assert decoder.cuda_graphs is not None
            for rows in sizes:
                step = decoder.cuda_graphs._step(1, rows, False)
                step._run_again()
                facts = {"path": path, "rows": rows, "drafts": drafter is not None}
                yield {**facts, **lab.kernels_of(step._run_again)}


def steps(lab: Lab, name: str) -> Facts:
    """Times steps by path and rows: plain, and at most rows with a static tree of each drafter; and a prompt."""
    backbone = lab.model(name)
    weights = backbone.engine.weight_bytes
    wide = lab.rows[-1]
    prompt = torch.arange(min(PROMPT, backbone.max_positions - 1)) % backbone.vocab_size
    lab.choose(backbone, "today")
    seconds = best_time(lab.device, partial(read_prompt, backbone, prompt), 3)
    yield {"prompt_tokens": len(prompt), "prompt_ms": 1e3 * seconds}
    drafters: list[HeadDrafter] = []
    if not name.endswith("int4"):
        drafters = [lab.medusa(backbone), lab.with_draft_vocabulary(Eagle, backbone)]
    for path in PATHS:
        lab.choose(backbone, path)
        times = measure_step_times(backbone, NullDrafter(), rounds=lab.rounds, sizes=lab.rows)
        for rows, seconds in times.verify.items():
            readings = seconds * lab.bandwidth / weights
            yield {"path": path, "rows": rows, "ms": 1e3 * seconds, "readings": readings}
        for drafter in drafters:
            drafted = measure_step_times(backbone, drafter, rounds=lab.rounds, sizes=(wide,))
            seconds = drafted.verify[wide]
            # A graph drafts within the step.
            added = seconds - times.verify[wide]
            facts = {"drafter": drafter.name, "ms": 1e3 * seconds, "added_ms": 1e3 * added}
            yield {"path": path, **facts}


def read_prompt(backbone: Backbone, tokens: Tensor) -> None:
    backbone.engine.forward(Plan.chain(tokens), backbone.engine.new_cache())


def long_texts(lab: Lab, name: str) -> Facts:
    """Times plain steps after longer texts."""
    backbone = lab.model(name)
    for path in PATHS:
        lab.choose(backbone, path)
        for columns in COLUMNS[:1] if lab.smoke else COLUMNS:
            measure = partial(measure_step_times, context=columns, rounds=lab.rounds)
            times = measure(backbone, NullDrafter(), sizes=(1, lab.rows[-1]))
            ms = {rows: 1e3 * seconds for rows, seconds in times.verify.items()}
            yield {"path": path, "columns": times.context, "ms": ms}


def identity(lab: Lab, name: str) -> Facts:
    """Compares greedy answers over trees with plain ones; today's path is to part, or the test is blind.

    The logits of random weights are flat, so near-ties are frequent.
    """
    backbone = lab.model(name)
    prompts, count = (1, 6) if lab.smoke else (4, 256)
    requests = [
        Request(
            [(i * 37 + 11 * n) % backbone.vocab_size for i in range(64 + n)], count, stop_ids=()
        )
        for n in range(prompts)
    ]
    policies: dict[str, DraftPolicy] = {
        "chain of 4": policy_of(Tree.chain(4)),
        **{f"{nodes} nodes": policy_of(tree) for nodes, tree in TREES.items()},
    }
    dynamic = DynamicTreePolicy(DynamicTree(64, HEADS))
    heads = lab.medusa(backbone)
    for path in PATHS:
        engine = lab.choose(backbone, path)
        if path == "exact":
            yield {"probe": difference(engine) or "exact"}
        plain, rates = answers(lab, backbone, requests, None, None, 1)
        yield {"path": path, **rates}
        for tree, policy in policies.items():
            drafted = []
            for request, own in zip(requests, plain, strict=True):
                drafter = Synthetic(request.prompt, own, CHANCE)
                [answer], rates = answers(lab, backbone, [request], drafter, policy, 1)
                drafted.append(answer)
            yield {"path": path, "tree": tree, "equal": equal(drafted, plain), **rates}
        for slots in (1,) if lab.smoke else (1, 4, 8):
            drafted, rates = answers(lab, backbone, requests, heads, dynamic, slots)
            facts = {"tree": "dynamic", "slots": slots, "equal": equal(drafted, plain)}
            yield {"path": path, **facts, **rates}


def answers(
    lab: Lab,
    backbone: Backbone,
    requests: Sequence[Request],
    drafter: Any,
    policy: DraftPolicy | None,
    slots: int,
) -> tuple[list[list[int]], dict[str, float]]:
    """Returns the tokens of each answer, and tokens a second and milliseconds a step."""
    gc.collect()
    decoder = Decoder(
        backbone, drafter, policy, slots=slots, cuda_graphs=lab.graphs, context=PROMPT
    )
    tokens: list[list[int]] = [[] for _ in requests]
    taken = 0
    started = time.perf_counter()
    for sequence, step in decoder.run(requests):
        tokens[sequence.number] += step.tokens
        taken += 1
    seconds = time.perf_counter() - started
    rates = {
        "tokens_per_s": sum(map(len, tokens)) / seconds,
        "ms_per_step": 1e3 * seconds / taken,
    }
    return tokens, rates


def equal(drafted: list[list[int]], plain: list[list[int]]) -> float:
    """Returns the share of the tokens before which an answer and the plain one do not part."""
    same = sum(
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
        for pair in zip(drafted, plain, strict=True)
    )
    return same / sum(map(len, plain))


def training(lab: Lab, name: str) -> Facts:
    """Times training steps by drafter, source of states and positions, and counts their kernels."""
    backbone = lab.model(name)
    lab.choose(backbone, "today")
    length, answer, texts = (24, 16, 8) if lab.smoke else (320, 256, 512)
    tokens = torch.randint(0, min(WORDS, backbone.vocab_size), (texts, length)).tolist()
    conversations = [
        Conversation(str(n), [], text, [(length - answer, length)], (n * (length - 1), length - 1))
        for n, text in enumerate(tokens)
    ]
    for kind, states, size in TRAININGS:
        drafter = lab.with_draft_vocabulary(kind, backbone)
        rows = None
        if states == "kept":
            width = backbone.hidden_size * len(drafter.taps)
            rows = torch.randn(texts * (length - 1), width, dtype=torch.bfloat16)
        words = [
            f"drafter={kind.name}",
            f"train.states={states}",
            "train.epochs=9",
            "train.dtype=bf16",
        ]
        batch = 64 if lab.smoke else size
        recipe = load_recipe(None, [*words, f"train.batch_tokens={batch}"])
        dataset = Dataset(conversations, [], ReadReport(), "", rows)
        run = Run.open(f"{lab.folder}/run", create=True)
        trainer = Trainer(backbone, drafter, dataset, recipe, run)
        for _ in range(2):
            trainer.train_step()
        before = trainer.positions_done
        count = 1 if lab.smoke else 6
        started = time.perf_counter()
        for _ in range(count):
            trainer.train_step()
        seconds = time.perf_counter() - started
        yield {
            "drafter": kind.name,
            "states": states,
            "batch_tokens": batch,
            "ms": 1e3 * seconds / count,
            "positions_per_s": (trainer.positions_done - before) / seconds,
            **lab.kernels_of(trainer.train_step),
        }


def distillation(lab: Lab, name: str) -> Facts:
    """Times distillation in one process, with prompts one by one and in packs."""
    backbone = lab.model(name)
    lab.choose(backbone, "today")
    backbone.tokenizer = tiny_tokenizer()
    count, slots, longest = (4, 2, 20) if lab.smoke else (384, 256, 300)
    seeds = [
        Conversation.from_turns(str(n), ["w1 " * (longest // 2 + n % (longest // 2))], raw=True)
        for n in range(count)
    ]
    rules = DistillRecipe(max_new_tokens=8 if lab.smoke else 256, batch_size=slots, context=512)
    if lab.smoke:
        rules = replace(rules, context=64)
    for parts in (slots, local.PACKS):
        answered = 0

        def add(tokens: int) -> None:
            nonlocal answered
            answered += tokens

        started = time.perf_counter()
        # A pack is one of so many parts of the slots.
        with patch.object(local, "PACKS", parts):
            for _ in local.answer_locally(backbone, seeds, rules, add):
                pass
        yield {
            "pack": max(1, slots // parts),
            "tokens_per_s": answered / (time.perf_counter() - started),
        }
