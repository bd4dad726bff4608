"""Self-distillation: seed prompts in, conversations in the model's own words out (Medusa, section 3.3.2)."""

from medusa_cli.data.seeds import read_seeds
from medusa_cli.distill.distillation import Distillation, Endpoint, Summary
from medusa_cli.distill.local import answer_locally
from medusa_cli.distill.records import Answered, Failed, RecordWriter, TooLong

__all__ = [
    "Answered",
    "Distillation",
    "Endpoint",
    "Failed",
    "RecordWriter",
    "Summary",
    "TooLong",
    "answer_locally",
    "read_seeds",
]
