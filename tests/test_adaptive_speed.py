"""The adaptive policy on simulated machines: never slower than plain decoding, and nearly as fast as the best tree."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from medusa_cli.decode import AdaptivePolicy, Sampling, Step
from medusa_cli.decode.policy import ROOT
from medusa_cli.tree import Tree
from medusa_cli.tree.search import StepTimes, budgets

ACCURACIES = [[0.6, 0.15, 0.08], [0.5, 0.12, 0.06], [0.45, 0.1, 0.05], [0.4, 0.1, 0.05]]
LONG = 8192
LEVEL = 0.0005  # seconds of drafting a level


@dataclass
class Machine:
    """Simulates the durations of steps: 10 ms, 0.4 ms a node, and attention that grows with the text.

    attention: its seconds in a plain step after LONG tokens; share: the part of it that each node
    adds. noise: the relative spread of times; outliers: the share of steps that take 2 to 10 times
    as long.
    """

    attention: float = 0.0
    share: float = 0.0
    noise: float = 0.0
    outliers: float = 0.0
    row: float = 0.0004
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def seconds(self, nodes: int, depth: int, length: int, batch: int = 1) -> float:
        """Returns the time that a step takes without noise."""
        attention = batch * self.attention * length / LONG * (1 + self.share * (nodes - 1))
        return 0.010 + self.row * (nodes * batch - 1) + LEVEL * depth + attention

    def noisy(self, seconds: float) -> float:
        seconds *= self.chance.lognormvariate(0, self.noise)
        slow = self.chance.random() < self.outliers
        return seconds * self.chance.uniform(2, 10) if slow else seconds

    def step_times(self, *, contexts: bool) -> StepTimes:
        """Returns what timing steps on this machine gives, after 256 tokens, or also after LONG."""

        def times(length: int, longer: StepTimes | None = None) -> StepTimes:
            base = self.seconds(1, 0, length)
            verify = {nodes: self.seconds(nodes, 0, length) for nodes in (1, 2, 4, 8, 16, 32, 64)}
            draft = {depth: self.seconds(1, depth, length) - base for depth in (1, 4)}
            return StepTimes(verify, draft, length, longer)

        return times(256, times(LONG) if contexts else None)


@dataclass
class Mixture(Machine):
    """Simulates a mixture of experts: 10 ms, of which 8 ms read 8 of 128 experts; other nodes choose others.

    alike: the share of experts of a node in decoding that are not read for others anyway, over that of the random
    tokens with which steps are timed.
    """

    alike: float = 1.0
    in_decoding: bool = False

    def seconds(self, nodes: int, depth: int, length: int, batch: int = 1) -> float:
        others = (128 - 8) * (1 - (1 - 8 / 128) ** (nodes * batch - 1))
        others *= self.alike if self.in_decoding else 1.0
        return 0.002 + 0.008 * (8 + others) / 8 + LEVEL * depth


def accepted(tree: Tree, ratio: float, chance: random.Random) -> int:
    """Returns the number of draft tokens accepted from a tree; ratio: scales the accuracies."""
    node = depth = 0
    while tree.children[node]:
        pick = chance.random()
        for child in tree.children[node]:
            pick -= min(ratio, 1.6) * ACCURACIES[depth][tree.ranks[child]]
            if pick < 0:
                break
        else:
            break
        node = child
        depth += 1
    return depth


def speed(
    machine: Machine,
    policy: AdaptivePolicy | Tree,
    ratio: Callable[[int], float],
    length: Callable[[int], int],
    tokens: int,
    answers: int = 1,
) -> float:
    """Returns the tokens per second of answers of so many tokens, decoded with a policy or with one tree.

    ratio: scales the accuracies, by the number of tokens of the answer; length: that of the text.
    """
    chance = random.Random(2)
    seconds = 0.0
    for _ in range(answers):
        done = 0
        text = None
        if isinstance(policy, AdaptivePolicy):
            text = SimpleNamespace(
                draft=policy.begin(Sampling()),
                tokens=[],
                root=0,
                sampler=SimpleNamespace(processors=None),
            )
        while done < tokens:
            if text is None:
                tree = policy
            else:
                text.tokens = range(length(done))
                [(tree, _)] = policy.next([text])
            count = accepted(tree, ratio(done), chance)
            took = machine.seconds(tree.size, tree.max_depth, length(done))
            if text is not None:
                path = tuple(range(count + 1))
                seen = machine.noisy(took)
                policy.record([text], [Step([1] * len(path), tree.size, path, verify_s=seen)])
            seconds += took
            done += count + 1
    return answers * tokens / seconds


def long(done: int) -> int:
    return LONG


def growing(done: int) -> int:
    return 256 + 2 * done


def compare(
    machine: Machine,
    ratio: float,
    length: Callable[[int], int],
    *,
    contexts: bool,
    tokens: int = 1200,
) -> tuple[float, float]:
    """Returns the policy's tokens per second against those of plain decoding, and of the best tree."""
    trees = budgets(ACCURACIES, machine.step_times(contexts=False))
    policy = AdaptivePolicy(trees, machine.step_times(contexts=contexts))
    ours = speed(machine, policy, lambda done: ratio, length, tokens, answers=2)
    plain = speed(machine, ROOT, lambda done: ratio, length, tokens)
    fixed = [
        speed(machine, sized.tree, lambda done: ratio, length, tokens)
        for sized in trees
        if sized.tree.size in (2, 3, 4, 6, 8)
    ]
    return ours / plain, ours / max(plain, *fixed)


ATTENTION = [(0.03, 0.15), (0.03, 0.25), (0.06, 0.15), (0.06, 0.25), (0.1, 0.15), (0.1, 0.25)]


@pytest.mark.slow
@pytest.mark.parametrize("contexts", [False, True], ids=["short", "long"])
@pytest.mark.parametrize(("attention", "share"), ATTENTION)
def test_long_texts_are_never_slower_than_plain(
    attention: float, share: float, contexts: bool
) -> None:
    """Steps were timed after short texts, or also after long ones."""
    for ratio in (0.0, 0.15, 0.4, 1.0):
        machine = Machine(attention, share)
        against_plain, against_best = compare(machine, ratio, long, contexts=contexts)
        assert against_plain >= 0.99, ratio
        assert against_best >= 0.95, ratio


@pytest.mark.quick("0.06-0.25")
@pytest.mark.parametrize(("attention", "share"), [(0.0, 0.0), *ATTENTION])
def test_noisy_and_growing_texts_are_never_slower_than_plain(
    attention: float, share: float
) -> None:
    for ratio in (0.0, 0.15, 1.0):
        machine = Machine(attention, share, noise=0.1, outliers=0.02)
        length = growing if attention else (lambda done: 256)
        against_plain, against_best = compare(machine, ratio, length, contexts=True)
        assert against_plain >= 0.99, ratio
        assert against_best >= 0.95, ratio


def test_a_text_that_drafts_fit_after_one_that_they_do_not() -> None:
    machine = Machine(0.06, 0.15)
    policy = AdaptivePolicy(
        budgets(ACCURACIES, machine.step_times(contexts=False)), machine.step_times(contexts=True)
    )

    def ratio(done: int) -> float:
        return 0.0 if done % 1600 < 800 else 1.2

    ours = speed(machine, policy, ratio, long, 3200)
    assert ours >= 1.1 * speed(machine, ROOT, ratio, long, 3200)


def mixture(alike: float, noise: float) -> tuple[Mixture, StepTimes]:
    """Returns a mixture of experts as it decodes, and what timing its steps gives."""
    machine = Mixture(alike=alike, noise=noise, outliers=noise / 5)
    times = machine.step_times(contexts=False)
    machine.in_decoding = True
    return machine, times


def copying(share: float, chance: random.Random, tokens: int) -> list[int]:
    """Returns a text that copies stretches of itself; share: that of its tokens that are copied."""
    text = [chance.randrange(2000) for _ in range(64)]
    while len(text) < tokens:
        count = 1 + int(chance.expovariate(1 / 16))
        if chance.random() < share:
            start = chance.randrange(len(text) - count) if count < len(text) else 0
            text += text[start : start + count]
        else:
            text += [chance.randrange(40) ** 2 for _ in range(count)]
    return text


def speed_with_ngrams(machine: Machine, times: StepTimes, share: float) -> float:
    """Returns the tokens per second of texts with n-gram matches against those of plain decoding."""
    policy = AdaptivePolicy([], times, ngrams=True)
    plain = drafted = 0.0
    for number in range(4):
        tokens = copying(share, random.Random(number), 1200)
        draft = policy.begin(Sampling())
        text = SimpleNamespace(draft=draft, sampler=SimpleNamespace(processors=None))
        done = 64  # the root is the last token of which the text is known
        while done < len(tokens) - 32:
            text.tokens, text.root = tokens[:done], tokens[done]
            [(_, paths)] = policy.next([text])
            path = paths[0] if paths else ()
            after = tokens[done + 1 :]
            count = next((i for i, token in enumerate(path) if token != after[i]), len(path))
            took = machine.seconds(1 + len(path), 0, 256)
            step = Step(
                after[: count + 1],
                1 + len(path),
                tuple(range(count + 1)),
                looked_up=len(path),
                verify_s=machine.noisy(took),
            )
            policy.record([text], [step])
            drafted += took
            plain += machine.seconds(1, 0, 256) * (count + 1)
            done += count + 1
    return plain / drafted


@pytest.mark.slow
@pytest.mark.parametrize(("alike", "noise"), [(0.5, 0), (0.5, 0.1), (1, 0), (1, 0.1), (1.3, 0)])
def test_a_mixture_of_experts_is_never_slower_than_plain(alike: float, noise: float) -> None:
    for share in (0.0, 0.2, 0.5, 0.8):
        machine, times = mixture(alike, noise)
        assert speed_with_ngrams(machine, times, share) >= 0.99, share
    for ratio in (0.0, 0.4, 1.0):
        machine, times = mixture(alike, noise)
        policy = AdaptivePolicy(budgets(ACCURACIES, times), times)
        ours = speed(machine, policy, lambda done, own=ratio: own, lambda done: 256, 1200, 2)
        plain = speed(machine, ROOT, lambda done: 0.0, lambda done: 256, 1200)
        assert ours >= 0.99 * plain, ratio
