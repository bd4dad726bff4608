"""The decoding methods a benchmark compares; each continues prompts of token ids and says what it took."""

import importlib.util
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from medusa_cli.assets import MODELS
from medusa_cli.backbone import Backbone
from medusa_cli.benchmarks.continuation import Continuation, Watch, share
from medusa_cli.benchmarks.others import LlamaCpp
from medusa_cli.benchmarks.tally import Tally
from medusa_cli.decoding import Decoder, Lookup, Pace, Sampling, answer, generate_batch
from medusa_cli.drafters import DRAFTERS, Drafter
from medusa_cli.errors import UsageError
from medusa_cli.tree import Growth, Tree

METHODS = (
    "hf",
    "hf-lookup",
    "hf-assisted",
    "ar",
    "medusa",
    "medusa-alone",
    "medusa-dynamic",
    "lookup",
    "llama.cpp",
    *sorted(set(DRAFTERS) - {"medusa"}),
)
# What decodes one sequence a time alone.
ALONE = ("hf-lookup", "hf-assisted", "llama.cpp")


class Method(Protocol):
    """Continues prompts side by side; tokens and time of each, in order."""

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, watch: Watch) -> list[Continuation]: ...


def parse_methods(text: str) -> list[str]:
    """The names in a list such as hf,ar,medusa, in order, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def check_methods(
    names: Sequence[str],
    also: Collection[str],
    model: str,
    sampling: Sampling,
    gguf: Path | None = None,
    draft_model: str | None = None,
    batch_size: int = 1,
) -> None:
    """UsageError for a method that there is not, nor among `also`, and for one that what is asked for does not suit."""
    unknown = [name for name in names if name not in METHODS and name not in also]
    text = ",".join(names)
    if unknown or not names:
        known = f"use {','.join(METHODS)}"
        raise UsageError(f"@methods {text!r}: {unknown[0] if unknown else 'nothing'!r} is unknown", known)
    if batch_size > 1:
        check_batch(names)
    if "llama.cpp" in names:
        check_llama(model, gguf, sampling)
    elif gguf is not None:
        raise UsageError(f"@gguf {gguf} says nothing to @methods {text}", "leave it out, or add llama.cpp")
    if "hf-assisted" in names and draft_model is None:
        raise UsageError("@methods hf-assisted needs a model that drafts", "give @draft_model NAME")
    if draft_model is not None and "hf-assisted" not in names:
        said = f"@draft_model {draft_model} says nothing to @methods {text}"
        raise UsageError(said, "leave it out, or add hf-assisted")


def check_llama(model: str, gguf: Path | None, sampling: Sampling) -> None:
    """UsageError where llama.cpp is not installed, has no file to read, or would not decode greedily."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise UsageError(
            "@methods llama.cpp: the package llama-cpp-python is not installed",
            "install it (it is compiled for minutes), or leave the method out",
        )
    if gguf is None and model not in MODELS:
        raise UsageError(f"@methods llama.cpp: no GGUF file of {model!r} is known", "give @gguf FILE")
    if not sampling.greedy:
        raise UsageError("@methods llama.cpp compares greedy decoding alone", "leave @temperature out")


def check_batch(names: Sequence[str]) -> None:
    """UsageError for a method that cannot decode side by side."""
    for name in names:
        if name in ALONE:
            raise UsageError(f"@methods {name} decodes one sequence at a time", "leave it out, or use @batch_size 1")


def build_methods(
    names: Sequence[str],
    backbone: Backbone,
    drafted: Mapping[str, tuple[Drafter | None, Tree | Growth | Pace | Lookup]],
    sampling: Sampling,
    gguf: Path | None = None,
    batch_size: int = 1,
) -> dict[str, Method]:
    """The named methods but those of the transformers model (see baseline).

    drafted: each drafting method's drafter and what it drafts over; gguf: the file that "llama.cpp" reads.
    """
    methods: dict[str, Method] = {}
    for name in names:
        if name == "llama.cpp":
            assert gguf is not None
            methods[name] = LlamaCpp(gguf, backbone)
        elif batch_size > 1:
            heads, shape = drafted.get(name, (None, None))
            methods[name] = _Batches(backbone, heads, shape, sampling, batch_size)
        elif name == "ar":
            methods[name] = _Steps(backbone, None, None, sampling)
        else:
            methods[name] = _Steps(backbone, *drafted[name], sampling)
    return methods


class _Steps:
    """One of our own loops, timed as its user sees it: everything between asking and the last token."""

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter | None,
        shape: "Tree | Growth | Pace | Lookup | None",
        sampling: Sampling,
    ) -> None:
        self._decoder, self._sampling = Decoder(backbone, drafter, shape), sampling

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, watch: Watch) -> list[Continuation]:
        return [self._answer(prompt, max_new_tokens, watch) for prompt in prompts]

    def _answer(self, prompt: Sequence[int], max_new_tokens: int, watch: Watch) -> Continuation:
        # Nothing is kept from one turn to the next: the other methods run every prompt from its beginning, too.
        self._decoder.forget()
        tokens: list[int] = []
        stats = Tally()
        start = time.perf_counter()
        for step in answer(self._decoder, prompt, max_new_tokens=max_new_tokens, sampling=self._sampling):
            tokens += step.tokens
            stats.add(step)
            watch(step.tokens)
        return Continuation(tokens, time.perf_counter() - start, stats)


class _Batches:
    """Our loop over many prompts, plain without a drafter; its seconds are shared among the answers by their tokens."""

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter | None,
        tree: Tree | Growth | Pace | Lookup | None,
        sampling: Sampling,
        batch_size: int,
    ) -> None:
        self._backbone, self._drafter, self._tree = backbone, drafter, tree
        self._rules: dict[str, Any] = {"batch_size": batch_size, "sampling": sampling}

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, watch: Watch) -> list[Continuation]:
        answers: list[list[int]] = [[] for _ in prompts]
        stats = [Tally() for _ in prompts]
        start = time.perf_counter()
        for number, step in generate_batch(
            self._backbone, self._drafter, self._tree, prompts, max_new_tokens=max_new_tokens, **self._rules
        ):
            answers[number] += step.tokens
            stats[number].add(step)
            watch(step.tokens)
        return share(answers, time.perf_counter() - start, stats)
