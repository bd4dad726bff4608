"""Decoding: the loop over draft, verify, accept and keep, and its plain reference."""

from medusa_cli.decoding.accept import accept
from medusa_cli.decoding.batch import generate_batch
from medusa_cli.decoding.generate import generate
from medusa_cli.decoding.plain import generate_plain
from medusa_cli.decoding.sampling import Sampling
from medusa_cli.decoding.types import Stats, Step, Verdict

__all__ = ["Sampling", "Stats", "Step", "Verdict", "accept", "generate", "generate_batch", "generate_plain"]
