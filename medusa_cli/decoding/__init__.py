"""Decoding: one step of draft, verify, accept and keep, for one sequence or many."""

from medusa_cli.decoding.accept import accept
from medusa_cli.decoding.decoder import Decoder
from medusa_cli.decoding.generate import answer, generate, generate_batch, generate_plain
from medusa_cli.decoding.likelihood import Likelihood
from medusa_cli.decoding.lookup import Lookup
from medusa_cli.decoding.pace import Pace
from medusa_cli.decoding.reply import Piece, Reply
from medusa_cli.decoding.request import Request
from medusa_cli.decoding.sampling import Sampling
from medusa_cli.decoding.types import Stats, Step, Verdict

__all__ = [
    "Decoder",
    "Likelihood",
    "Lookup",
    "Pace",
    "Piece",
    "Reply",
    "Request",
    "Sampling",
    "Stats",
    "Step",
    "Verdict",
    "accept",
    "answer",
    "generate",
    "generate_batch",
    "generate_plain",
]
