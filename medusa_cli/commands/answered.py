"""What a distillation came to, in words and for machines."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from medusa_cli import console
from medusa_cli.errors import UserError
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.distilling import RecordWriter


@dataclass(frozen=True)
class Outcome:
    """Seeds left out, and sums over all processes: prompts too long, failures, tokens made, tokens a second."""

    duplicates: int
    too_long: float
    failed: float
    new_tokens: float
    rate: float

    def show(
        self, written: "RecordWriter", target: Run, run: str, *, least: int, room: tuple[int, int], json: bool
    ) -> None:
        """Say it, and what the run's file holds now; UserError where that is nothing.

        least: what an answer was held to; room: what a prompt was, by --context and by the model.
        """
        dropped = sum(tokens < least for tokens in written.dropped.values())
        if self.too_long:
            context, positions = room
            limit = (
                f"--context {context} leaves" if context <= positions else f"the model's {positions} positions leave"
            )
            console.info(f"{self.too_long:,} prompts were skipped: longer than {limit} room for")
        if dropped:
            console.info(f"{dropped:,} conversations were dropped: an answer of fewer than {least} tokens")
        if self.failed:
            console.warn(
                f"{self.failed:,} conversations failed, see {target.failed_path}; the same command asks for them again"
            )
        if json:
            summary = {"failed": self.failed, "run": str(target.path), "conversations": len(written.done)}
            summary |= {"answer_tokens": written.tokens, "skipped": self.too_long, "duplicates": self.duplicates}
            made = {"new_tokens": self.new_tokens, "tokens_per_s": round(self.rate, 1)}
            console.emit_json({**summary, "dropped": dropped, **made})
        if not written.done:
            raise UserError(
                f"{target.distill_path} holds no conversation: each was skipped, dropped or failed",
                "give another --seed, a larger --context or fewer --max-new-tokens",
            )
        if json:
            return
        console.result(
            f"{written.tokens:,} answer tokens in {len(written.done):,} conversations: {target.distill_path} "
            f"({self.new_tokens:,} made now at {self.rate:,.0f} tokens/s). Next: medusa train --run {run}"
        )
