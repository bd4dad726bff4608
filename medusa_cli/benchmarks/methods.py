"""The decoding methods a benchmark compares; each continues a prompt of token ids and says what it took."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.decoding import Sampling, Stats, Step, generate, generate_plain
from medusa_cli.drafters import DRAFTERS, Drafter
from medusa_cli.errors import UsageError
from medusa_cli.tree import Growth, Tree

METHODS = ("hf", "hf-lookup", "ar", "medusa", "medusa-dynamic", "llama.cpp", *sorted(set(DRAFTERS) - {"medusa"}))
LOOKUP_TOKENS = 10
Watch = Callable[[list[int]], None]


class Method(Protocol):
    """Continues a prompt; returns the new token ids, the seconds it took, and its steps where it has them."""

    def __call__(
        self, prompt: Sequence[int], max_new_tokens: int, watch: Watch
    ) -> tuple[list[int], float, Stats | None]: ...


def parse_methods(text: str) -> list[str]:
    """The names of --methods hf,ar,medusa in order, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def check_methods(text: str, names: Sequence[str], also: Collection[str] = ()) -> None:
    """UsageError for no name at all and for one that is neither a method nor among `also`."""
    unknown = [name for name in names if name not in METHODS and name not in also]
    if unknown or not names:
        raise UsageError(
            f"--methods {text!r}: {unknown[0] if unknown else 'nothing'!r} is unknown", f"use {','.join(METHODS)}"
        )


def build_methods(
    names: Sequence[str],
    backbone: Backbone,
    plain: Any,
    drafted: Mapping[str, tuple[Drafter, Tree | Growth]],
    sampling: Sampling,
    gguf: Path | None = None,
) -> dict[str, Method]:
    """The named methods; `plain` is the unmodified transformers model that "hf" and "hf-lookup" run.

    drafted: each drafting method's drafter and what it drafts over; gguf: the file that "llama.cpp" reads. UsageError
    where a method lacks what it needs.
    """
    methods: dict[str, Method] = {}
    for name in names:
        if name.startswith("hf"):
            methods[name] = _Transformers(plain, backbone, sampling, lookup=name == "hf-lookup")
        elif name == "ar":
            methods[name] = _Steps(lambda p, n: generate_plain(backbone, p, max_new_tokens=n, sampling=sampling))
        elif name == "llama.cpp":
            methods[name] = _LlamaCpp(gguf, backbone, sampling)
        else:
            methods[name] = _drafted(backbone, *drafted[name], sampling)
    return methods


def _drafted(backbone: Backbone, drafter: Drafter, tree: Tree | Growth, sampling: Sampling) -> Method:
    return _Steps(lambda p, n: generate(backbone, drafter, tree, p, max_new_tokens=n, sampling=sampling))


class _Steps:
    """One of our own loops, timed as its user sees it: everything between asking and the last token."""

    def __init__(self, steps: Callable[[Sequence[int], int], Any]) -> None:
        self._steps = steps

    def __call__(
        self, prompt: Sequence[int], max_new_tokens: int, watch: Watch
    ) -> tuple[list[int], float, Stats | None]:
        tokens: list[int] = []
        stats = Stats()
        start = time.perf_counter()
        step: Step
        for step in self._steps(prompt, max_new_tokens):
            tokens += step.tokens
            stats.add(step)
            watch(step.tokens)
        return tokens, time.perf_counter() - start, stats


class _Transformers:
    """transformers' generate on the unmodified model, with its prompt lookup on request."""

    def __init__(self, model: Any, backbone: Backbone, sampling: Sampling, lookup: bool = False) -> None:
        self._model = model
        ends = sorted(backbone.eos_ids)
        self._options: dict[str, Any] = {"eos_token_id": ends, "pad_token_id": ends[0] if ends else 0}
        if lookup:
            self._options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        if sampling.greedy:
            self._options |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        else:
            cuts = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
            self._options |= {"do_sample": True, **cuts}

    def __call__(
        self, prompt: Sequence[int], max_new_tokens: int, watch: Watch
    ) -> tuple[list[int], float, Stats | None]:
        ids = torch.tensor([list(prompt)], device=self._model.device)
        streamer = _Watcher(watch)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                streamer=streamer,
                **self._options,
            )
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
        return out[0, ids.shape[1] :].tolist(), time.perf_counter() - start, None


class _LlamaCpp:
    """llama.cpp on a GGUF file of the same model, with as many threads as torch has; greedy alone."""

    def __init__(self, gguf: Path | None, backbone: Backbone, sampling: Sampling) -> None:
        try:
            from llama_cpp import Llama  # type: ignore[import-not-found, unused-ignore]
        except ImportError as reason:
            raise UsageError(
                "--methods llama.cpp: the package llama-cpp-python is not installed",
                "install it (it is compiled for minutes), or leave the method out",
            ) from reason
        if gguf is None:
            raise UsageError(f"--methods llama.cpp: no GGUF file of {backbone.id!r} is known", "give --gguf FILE")
        if not sampling.greedy:
            raise UsageError("--methods llama.cpp compares greedy decoding alone", "leave --temperature out")
        threads = torch.get_num_threads()
        self._model: Any = Llama(
            str(gguf), n_ctx=backbone.max_positions, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._ends = backbone.eos_ids

    def __call__(
        self, prompt: Sequence[int], max_new_tokens: int, watch: Watch
    ) -> tuple[list[int], float, Stats | None]:
        tokens: list[int] = []
        self._model.reset()  # no method may keep a prompt from the turn before
        start = time.perf_counter()
        for token in self._model.generate(list(prompt), temp=0.0, top_k=1):
            tokens.append(int(token))
            watch(tokens[-1:])
            if len(tokens) == max_new_tokens or tokens[-1] in self._ends:
                break
        return tokens, time.perf_counter() - start, None


class _Watcher:
    """A transformers streamer that passes new token ids on; the first call carries the prompt."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._prompt_seen = watch, False

    def put(self, ids: torch.Tensor) -> None:
        if self._prompt_seen:
            self._watch(ids.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to flush."""
