"""Decoding loops that are not ours: transformers' generate and llama.cpp, on the same prompts."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from medusa_cli.backbone import Backbone
from medusa_cli.benchmarks.continuation import Continuation, Watch, share
from medusa_cli.decoding import Sampling

LOOKUP_TOKENS = 10


class Transformers:
    """transformers' generate on the unmodified model; many prompts padded left.

    lookup: with its prompt lookup. assistant: a smaller model of the same vocabulary that drafts for it.
    """

    def __init__(self, backbone: Backbone, sampling: Sampling, lookup: bool = False, assistant: Any = None) -> None:
        self._model = backbone.model
        self._ends = sorted(backbone.eos_ids)
        self._options: dict[str, Any] = {"eos_token_id": self._ends, "pad_token_id": self._ends[0] if self._ends else 0}
        # Penalties and the like that the model comes with are no method's: all decode by the same rule.
        self._model.generation_config = GenerationConfig(**self._options)
        if assistant is not None:
            self._options["assistant_model"] = assistant
        if lookup:
            self._options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        if sampling.greedy:
            self._options |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        else:
            cuts = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
            self._options |= {"do_sample": True, **cuts}

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, watch: Watch) -> list[Continuation]:
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self._options["pad_token_id"])
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, width - len(prompt) :] = 1
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        streamer = _Watcher(watch) if len(prompts) == 1 else None  # transformers streams one sequence alone
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, streamer=streamer, **self._options
            )
        if ids.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        answers = [self._ended(row) for row in out[:, width:].tolist()]
        for answer in answers if streamer is None else []:
            watch(answer)
        return share(answers, seconds, [None] * len(answers))

    def _ended(self, tokens: list[int]) -> list[int]:
        """An answer without the padding after its end."""
        ends = [place for place, token in enumerate(tokens) if token in self._ends]
        return tokens[: ends[0] + 1] if ends else tokens


class LlamaCpp:
    """llama.cpp on a GGUF file of the same model, with as many threads as torch has; greedy alone."""

    def __init__(self, gguf: Path, backbone: Backbone) -> None:
        from llama_cpp import Llama  # type: ignore[import-not-found, unused-ignore]

        threads = torch.get_num_threads()
        self._model: Any = Llama(
            str(gguf), n_ctx=backbone.max_positions, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._ends = backbone.eos_ids

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, watch: Watch) -> list[Continuation]:
        return [self._answer(prompt, max_new_tokens, watch) for prompt in prompts]

    def _answer(self, prompt: Sequence[int], max_new_tokens: int, watch: Watch) -> Continuation:
        tokens: list[int] = []
        self._model.reset()  # no method may keep a prompt from the turn before
        start = time.perf_counter()
        for token in self._model.generate(list(prompt), temp=0.0, top_k=1):
            tokens.append(int(token))
            watch(tokens[-1:])
            if len(tokens) == max_new_tokens or tokens[-1] in self._ends:
                break
        return Continuation(tokens, time.perf_counter() - start, None)


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
