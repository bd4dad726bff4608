"""Decoding methods that a bench compares: our loops, transformers' generate, llama.cpp."""

import importlib.util
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from medusa_cli.assets import DEFAULT_MODEL, MODELS
from medusa_cli.bench.stats import PathStats
from medusa_cli.decode import Decoder, DraftPolicy, Request, Sampling
from medusa_cli.drafters import DRAFTERS, Drafter
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.provenance import describe_drafter
from medusa_cli.runs.resolve import Choice, choose
from medusa_cli.runs.run import Run

TRANSFORMERS = ("hf", "hf-lookup", "hf-assisted")
DRAFTED = ("medusa", "medusa-alone", "medusa-dynamic", "lookup", *sorted(set(DRAFTERS) - {"medusa"}))
METHODS = (*TRANSFORMERS, "ar", *DRAFTED, "llama.cpp")
# Methods that decode one sequence at a time only.
UNBATCHED = ("hf-lookup", "hf-assisted", "llama.cpp")
LOOKUP_TOKENS = 10


@dataclass
class Answer:
    """One method's answer to a question: token ids of each turn, seconds, and sums over its steps (None: not ours)."""

    turns: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    stats: PathStats | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.turns))

    def extend(self, turn: "Answer") -> None:
        """Appends the answer to a further turn."""
        self.turns += turn.turns
        self.seconds += turn.seconds
        if turn.stats is not None:
            self.stats = self.stats or PathStats()
            self.stats += turn.stats


OnTokens = Callable[[list[int]], None]
# Continues prompts side by side, at most so many new tokens each, and passes new tokens on as they come.
Method = Callable[[Sequence[Sequence[int]], int, OnTokens], list[Answer]]


def parse_methods(
    text: str,
    also: Collection[str],
    model: str,
    sampling: Sampling,
    gguf: Path | None = None,
    draft_model: str | None = None,
    batch_size: int = 1,
) -> list[str]:
    """Returns the methods of a list such as hf,ar,medusa; raises UsageError for one that is unknown or cannot run.

    also: names of runs that hold drafters.
    """
    names = split_names(text)
    unknown = [name for name in names if name not in METHODS and name not in also]
    if unknown or not names:
        name = unknown[0] if unknown else ""
        raise UsageError(f"@methods {text!r}: {name!r} is unknown", f"use {','.join(METHODS)}")
    if batch_size > 1 and (alone := [name for name in names if name in UNBATCHED]):
        remedy = "leave it out, or use @batch_size 1"
        raise UsageError(f"@methods {alone[0]} decodes one sequence at a time", remedy)
    if "llama.cpp" in names:
        check_llama(model, gguf, sampling)
    elif gguf is not None:
        raise UsageError(f"@gguf {gguf} has no effect with @methods {text}", "leave it out, or add llama.cpp")
    if "hf-assisted" in names and draft_model is None:
        raise UsageError("@methods hf-assisted needs a model that drafts", "give @draft_model NAME")
    if draft_model is not None and "hf-assisted" not in names:
        remedy = "leave it out, or add hf-assisted"
        raise UsageError(f"@draft_model {draft_model} has no effect with @methods {text}", remedy)
    return names


def split_names(text: str) -> list[str]:
    """Returns the names of a comma-separated list, in order, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def check_llama(model: str, gguf: Path | None, sampling: Sampling) -> None:
    """Raises UsageError if llama.cpp is not installed, has no file to read, or would have to sample."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise UsageError(
            "@methods llama.cpp: the package llama-cpp-python is not installed",
            "install it (it is compiled for minutes), or leave the method out",
        )
    if gguf is None and model not in MODELS:
        raise UsageError(f"@methods llama.cpp: no GGUF file of {model!r} is known", "give @gguf FILE")
    if not sampling.greedy:
        raise UsageError("@methods llama.cpp is compared in greedy decoding only", "leave @temperature out")


def find_competitors(
    names: Sequence[str], model: str | None, run: str | None, tree: str | None, lookup: bool | None = None
) -> dict[str, Choice]:
    """Returns the files of each method that names a drafter: of a run inside the run, or of the run's own by its kind.

    "medusa" without other such names stands for the run's drafter of any kind and is not returned. Raises UserError for
    a drafter that is nowhere.
    """
    outer = Run.open(run) if run else Run.pretrained(model or DEFAULT_MODEL)
    inner = {name for name in names if run and outer is not None and _kind(outer.path / name)}
    named = [name for name in names if name in DRAFTERS or name in inner]
    if named in ([], ["medusa"]):
        return {}
    choices = {}
    for name in named:
        if outer is not None and name in inner:
            choices[name] = choose(model, str(outer.path / name), None, tree, lookup=lookup)
        elif outer is not None and _kind(outer.path) == name:
            choices[name] = choose(model, run, None, tree, lookup=lookup)
        else:
            raise UserError(
                f"@methods {name}: there is no {name} drafter in {outer.path if outer else 'any run'}",
                f"run `medusa train drafter={name} --run runs/{run or 'NAME'}/{name}` and give @run {run or 'NAME'}",
            )
    return choices


def _kind(folder: Path) -> str | None:
    """Returns the kind of the drafter in a run; None if there is none."""
    config = Run(folder).drafter_dir / "config.json"
    return describe_drafter(config.parent).drafter if config.is_file() else None


def our_method(
    backbone: Backbone, drafter: Drafter | None, policy: DraftPolicy | None, sampling: Sampling, batch_size: int
) -> Method:
    """Returns our decoding loop, plain without a policy. A batch's seconds are shared among its answers by tokens."""
    decoder = Decoder(backbone, drafter, policy, slots=batch_size)

    def answer(prompts: Sequence[Sequence[int]], max_new_tokens: int, on_tokens: OnTokens) -> list[Answer]:
        answers = [Answer([[]], stats=PathStats()) for _ in prompts]
        for first in range(0, len(prompts), batch_size):
            decoder.forget()  # the other methods run every prompt from its beginning, too
            start = time.perf_counter()
            batch = answers[first : first + batch_size]
            requests = [Request(prompt, max_new_tokens, sampling) for prompt in prompts[first : first + batch_size]]
            for sequence, step in decoder.run(requests):
                batch[sequence.number].turns[0] += step.tokens
                batch[sequence.number].stats.add(step)  # type: ignore[union-attr]
                on_tokens(step.tokens)
            _share(batch, time.perf_counter() - start)
        return answers

    return answer


def _share(answers: Sequence[Answer], seconds: float) -> None:
    """Shares a batch's seconds among its answers by their tokens."""
    total = max(sum(answer.tokens for answer in answers), 1)
    for answer in answers:
        answer.seconds = seconds * answer.tokens / total


def transformers_method(backbone: Backbone, sampling: Sampling, lookup: bool = False, assistant: Any = None) -> Method:
    """Returns transformers' generate on the unmodified model; several prompts are padded on the left.

    lookup: with its prompt lookup. assistant: a smaller model of the same vocabulary that drafts.
    """
    model, ends = backbone.model, sorted(backbone.eos_ids)
    options: dict[str, Any] = {"eos_token_id": ends, "pad_token_id": ends[0] if ends else 0}
    # Penalties and the like of the model's own generation config are left out: all methods decode by the same rule.
    model.generation_config = GenerationConfig(**options)
    if assistant is not None:
        options["assistant_model"] = assistant
    if lookup:
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    options["do_sample"] = not sampling.greedy
    for key in ("temperature", "top_p", "top_k"):
        options[key] = None if sampling.greedy else getattr(sampling, key)

    def answer(prompts: Sequence[Sequence[int]], max_new_tokens: int, on_tokens: OnTokens) -> list[Answer]:
        width = max(map(len, prompts))
        padded = [[options["pad_token_id"]] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids, mask_ids = torch.tensor(padded, device=model.device), torch.tensor(mask, device=model.device)
        streamer = _Streamer(on_tokens) if len(prompts) == 1 else None  # transformers streams one sequence only
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask_ids, max_new_tokens=max_new_tokens, streamer=streamer, **options
            )
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        answers = [Answer([_until_end(row, ends)]) for row in out[:, width:].tolist()]
        if streamer is None:
            for batched in answers:
                on_tokens(batched.turns[0])
        _share(answers, seconds)
        return answers

    return answer


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Returns an answer without the padding after its end token."""
    return next((tokens[: index + 1] for index, token in enumerate(tokens) if token in ends), tokens)


class _Streamer:
    """A transformers streamer that passes new token ids on; its first call carries the prompt."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens, self._prompt_seen = on_tokens, False

    def put(self, ids: torch.Tensor) -> None:
        if self._prompt_seen:
            self._on_tokens(ids.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to flush."""


def llama_method(gguf: Path, backbone: Backbone) -> Method:
    """Returns llama.cpp's greedy decoding of a GGUF file of the same model, with torch's number of threads."""
    from llama_cpp import Llama  # type: ignore[import-not-found, unused-ignore]

    threads, ends = torch.get_num_threads(), backbone.eos_ids
    context = backbone.max_positions
    model: Any = Llama(str(gguf), verbose=False, n_ctx=context, n_threads=threads, n_threads_batch=threads)

    def answer_one(prompt: Sequence[int], max_new_tokens: int, on_tokens: OnTokens) -> Answer:
        tokens: list[int] = []
        model.reset()  # no method may keep a prompt from the turn before
        start = time.perf_counter()
        for token in model.generate(list(prompt), temp=0.0, top_k=1):
            tokens.append(int(token))
            on_tokens(tokens[-1:])
            if len(tokens) == max_new_tokens or tokens[-1] in ends:
                break
        return Answer([tokens], time.perf_counter() - start)

    return lambda prompts, count, on_tokens: [answer_one(prompt, count, on_tokens) for prompt in prompts]
