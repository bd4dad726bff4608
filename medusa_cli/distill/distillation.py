"""A run's distillation: what is still to be answered, by this model or by servers, and where answers are kept."""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from medusa_cli.data.conversation import Conversation
from medusa_cli.distill.endpoint import Tokenizer, answer_remotely, connect
from medusa_cli.distill.filters import in_order, unique
from medusa_cli.distill.local import MAX_BATCH, answer_locally, choose_batch_size
from medusa_cli.distill.records import Answered, Failed, Outcome, RecordWriter, TooLong, merge_parts, part_of
from medusa_cli.drafters.base import check_layers
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.runs.recipe import COLDEST, DistillRecipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run, provenance

log = logging.getLogger(__name__)


class Processes(Protocol):
    """Processes that share the work: this one's rank among `size`, and how they wait for one another."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: Any) -> list[Any]: ...

    def strided_shard(self, items: Sequence[Any]) -> list[Any]: ...

    def wait(self) -> None: ...

    def destroy(self) -> None: ...


@dataclass(frozen=True)
class Endpoint:
    """Servers that answer in the model's place: addresses with commas between, the model's name there, concurrency."""

    addresses: str
    model: str | None = None
    concurrency: int = 8


@dataclass(frozen=True)
class Summary:
    """Counts after a distillation, of all processes together.

    skipped: prompts too long for the context; dropped: conversations with too short an answer; duplicates: seeds that
    ask what another asks; new_tokens: answer tokens of this call.
    """

    run: str
    conversations: int
    answer_tokens: int
    failed: int
    skipped: int
    duplicates: int
    dropped: int
    new_tokens: int
    tokens_per_s: float


def check_settings(settings: DistillRecipe) -> None:
    """Raises UsageError for settings that exclude each other."""
    if 0 < settings.temperature < COLDEST:
        raise UsageError(f"distill.temperature={settings.temperature} is too close to 0", "use 0 for greedy")
    if settings.max_new_tokens >= settings.context:
        raise UsageError(
            f"@max_new_tokens {settings.max_new_tokens} leaves no room for a prompt in @context {settings.context}",
            "lower @max_new_tokens or raise @context",
        )


class Distillation:
    """Opens a run's data for more conversations, and the model or the servers that answer.

    seeds: what this process answers. `answers` does the work, `finish` ends it. Under several processes each writes
    a part of its own, which the first one merges at the end; `processes` shares the work.
    """

    def __init__(
        self,
        run: Run,
        seeds: Sequence[Conversation],
        model: str,
        settings: DistillRecipe,
        loading: LoadOptions,
        processes: Processes,
        *,
        chat_template: str | None = None,
        rounding: str | None = None,
        endpoint: Endpoint | None = None,
        dedup: bool = True,
        min_answer_tokens: int = 0,
    ) -> None:
        self.run, self._processes, self._endpoint = run, processes, endpoint
        template = run.template_with(chat_template)
        self._model: Backbone | Tokenizer
        if endpoint is not None:
            self._model = Tokenizer(model, template, trust_remote_code=loading.trust_remote_code)
            self._servers, silent = connect(endpoint.addresses, endpoint.model, self._model)
            for line in silent:
                log.warning(f"@endpoint {line}; the others take its work until it answers")
        else:
            rows = settings.batch_size or MAX_BATCH
            self._model = load_backbone(model, loading, chat_template=template, rows=rows)
            check_layers(settings.taps, self._model.num_layers, "distill.taps")
            if settings.batch_size is None:
                settings = replace(settings, batch_size=choose_batch_size(self._model, settings, processes.size))
        self.settings = settings
        run.bind(self._model.identity)
        self._width = self._model.hidden_size * (1 + len(settings.taps))
        header = provenance(
            self._model.identity, seed=settings.seed, settings=shared_settings(settings, template, rounding)
        )
        # The run's own file is the first process's alone.
        self._file = RecordWriter(run, self._width, header, min_answer_tokens) if processes.rank == 0 else None
        if self._file is not None:
            merge_parts(run, self._file, self._width)  # of processes that were interrupted
            run.failed_path.unlink(missing_ok=True)  # what failed earlier is asked again
            run.keep_template(template)
            processes.wait()  # for the others, who began to wait before they loaded anything
        if self._file is not None and processes.size == 1:
            self._writer = self._file
        else:
            self._writer = RecordWriter(part_of(run, processes.rank), self._width, header, min_answer_tokens)
        answered = set(processes.gather(sorted(self._file.answered) if self._file else [])[0])
        chosen = in_order(seeds, settings.random_seed, settings.batch_size or MAX_BATCH, settings.max_samples)
        distinct = unique(chosen, answered) if dedup else chosen
        left = [seed for seed in distinct if seed.id not in answered]
        self._duplicates = len(chosen) - len(distinct)
        if self._duplicates:
            log.info(f"{self._duplicates:,} seeds ask what another asks and are left out (@no_dedup keeps them)")
        if len(left) < len(distinct):
            log.info(f"resuming: {len(distinct) - len(left):,} conversations are there already")
        self.seeds = processes.strided_shard(left)
        self._failed = self._skipped = self._tokens = 0
        self._seconds = 0.0

    def answers(self) -> Iterator[float]:
        """Answers the seeds and writes each conversation as it ends; yields tokens/s so far after each seed."""
        start = time.perf_counter()
        with closing(self._writer):
            for outcome in self._outcomes():
                if isinstance(outcome, Answered):
                    self._tokens += outcome.conversation.positions
                    self._writer.write(outcome.conversation, outcome.states)
                elif isinstance(outcome, TooLong):
                    self._skipped += 1
                else:
                    self._fail(outcome)
                self._seconds = time.perf_counter() - start
                yield self._tokens / self._seconds

    def _outcomes(self) -> Iterator[Outcome]:
        if isinstance(self._model, Tokenizer):
            assert self._endpoint is not None
            return answer_remotely(self._servers, self._model, self.seeds, self.settings, self._endpoint.concurrency)
        return answer_locally(self._model, self.seeds, self.settings)

    def _fail(self, failed: Failed) -> None:
        self._failed += 1
        with self.run.failed_path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"id": failed.id, "reason": failed.reason}) + "\n")

    def finish(self) -> Summary | None:
        """Merges the parts of all processes; returns the counts to the first one, None to the others."""
        rate = self._tokens / max(self._seconds, 1e-9)
        counts = self._processes.gather((self._failed, self._skipped, self._tokens, rate))
        if self._processes.size > 1:
            if self._file is not None:
                merge_parts(self.run, self._file, self._width)
                self._file.close()
            self._processes.wait()
            self._processes.destroy()
        file = self._file
        if file is None:
            return None
        failed, skipped, tokens, rate = (sum(column) for column in zip(*counts, strict=True))
        dropped = sum(shortest < file.min_answer_tokens for shortest in file.dropped.values())
        if skipped:
            room = min(self.settings.context, self._model.max_positions)
            log.info(f"{skipped:,} prompts were skipped: too long for a context of {room:,} positions (@context)")
        if dropped:
            log.info(f"{dropped:,} conversations were dropped: an answer of fewer than {file.min_answer_tokens} tokens")
        if failed:
            log.warning(
                f"{failed:,} conversations failed, see {self.run.failed_path}; the same command asks them again"
            )
        return Summary(
            run=str(self.run.path),
            conversations=len(file.done),
            answer_tokens=file.tokens,
            failed=failed,
            skipped=skipped,
            duplicates=self._duplicates,
            dropped=dropped,
            new_tokens=tokens,
            tokens_per_s=round(rate, 1),
        )


def shared_settings(settings: DistillRecipe, template: str | None, rounding: str | None) -> dict[str, Any]:
    """Returns the settings that all conversations of one file share."""
    shared: dict[str, Any] = {
        key: getattr(settings, key) for key in ("max_new_tokens", "max_turns", "temperature", "random_seed")
    }
    digest = hashlib.sha256(template.encode()).hexdigest()[:16] if template else None
    others = {"rounding": rounding, "taps": list(settings.taps), "chat_template": digest}
    return shared | {key: value for key, value in others.items() if value}
