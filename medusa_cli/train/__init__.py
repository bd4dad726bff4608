"""Training drafters on the model's own answers, and measuring how good their guesses are."""

from medusa_cli.data.packing import Dataset, frequent_tokens, split_conversations
from medusa_cli.train.calibration import Calibration, calibrate
from medusa_cli.train.distributed import Distributed
from medusa_cli.train.events import Event, Saved, Stepped, Stopped, Validated
from medusa_cli.train.loop import Trainer
from medusa_cli.train.prefill import load_dataset
from medusa_cli.train.setup import build_drafter

__all__ = [
    "Calibration",
    "Dataset",
    "Event",
    "Saved",
    "Stepped",
    "Stopped",
    "Trainer",
    "Validated",
    "Distributed",
    "build_drafter",
    "calibrate",
    "frequent_tokens",
    "load_dataset",
    "split_conversations",
]
