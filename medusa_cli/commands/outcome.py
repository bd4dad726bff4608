"""What a training came to, in words and for machines: how good its heads are, and what they cost the model."""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_cli import console
from medusa_cli.runs.reading import Document
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.training import Trainer

# Nats a token from the original beyond which joint training warns.
FAR = 0.05
# Of a validation, as the log has it, what the summary keeps.
KEPT = ("loss", "head_losses", "accuracies", "positions", "parts")


def validations(log: Sequence[Document]) -> Document:
    """The last validation of a log, and the acceptance to expect after it and, where there was one, before step 1."""
    checks = [line for line in log if line["event"] == "validated"]
    last = {key: checks[-1][key] for key in KEPT} if checks else None
    start = next((one for one in checks if one["step"] == 0), None)
    return {
        "validation": last,
        "expected_acceptance": last and expected_acceptance(last["accuracies"]),
        "expected_acceptance_at_start": start and expected_acceptance(start["accuracies"]),
    }


def expected_acceptance(accuracies: Sequence[float]) -> float:
    """Tokens a step over a chain of the heads' first guesses: 1 + a_1 + a_1 a_2 + ..., as if each were independent."""
    return 1 + sum(accumulate(accuracies, mul))


def finish(
    trainer: "Trainer", target: Run, source: Path, coverage: float, summary: Document, json: bool, run: str
) -> None:
    """Save the drafter with its provenance and say what came of it."""
    from medusa_cli.training.leaving import leave

    target, run = leave(trainer, target, source, coverage, summary["validation"], run)
    rate = summary["positions"] / summary["seconds"] if summary["seconds"] else 0.0
    if json:
        console.emit_json(
            {
                "run": str(target.path),
                "drafter": str(target.drafter_dir),
                "heads": trainer.drafter.num_heads,
                "steps": trainer.steps,
                "positions": trainer.positions,
                "loss": summary["loss"],
                "validation": summary["validation"],
                "expected_acceptance": summary["expected_acceptance"],
                "expected_acceptance_at_start": summary["expected_acceptance_at_start"],
                "draft_coverage": coverage,
                "tokens_per_s": round(rate, 1),
                "seconds": round(summary["wall_seconds"], 1),
            }
        )
        return
    console.result(
        f"{target.drafter_dir}: {trainer.drafter.num_heads} heads, {trainer.steps:,} steps"
        + (f" at {rate:,.0f} tokens/s" if rate else "")
        + _gain(summary)
        + f". Curves: {trainer.run.path / 'train.png'}. Next: medusa calibrate --run {run}"
    )


def _gain(summary: Document) -> str:
    """What held-out answers say of the heads, as words; nothing where none were held out."""
    if summary["validation"] is None:
        return ""
    start = summary["expected_acceptance_at_start"]
    return (
        f", held-out top-1 by head {shares(summary['validation']['accuracies'])}, "
        f"about {summary['expected_acceptance']:.2f} tokens a step over a chain of first guesses"
        + (f" ({start:.2f} at the start)" if start else "")
    )


def cost(parts: dict[str, float]) -> str:
    """What joint training has made of the model so far, as words after a validation; nothing in stage 1."""
    if "kl" not in parts:
        return f"; perplexity {math.exp(parts['nll']):.3f}" if "nll" in parts else ""
    words = (
        f"; KL to the original {parts['kl']:.4f} nats, perplexity {math.exp(parts['nll']):.3f} "
        f"(original {math.exp(parts['nll_original']):.3f}), greedy agreement {parts['agreement']:.1%}"
    )
    if parts["kl"] > FAR:
        console.warn(f"the model moves away from the original (KL over {FAR} nats): lower train.lambda_0 or the rates")
    return words


def shares(values: Sequence[float]) -> str:
    """Shares of 1 in two digits each."""
    return "/".join(f"{value:.2f}".lstrip("0") for value in values)
