"""Training drafters on the model's own answers, and measuring how good their guesses are."""

from medusa_cli.training.build import build_drafter
from medusa_cli.training.calibration import Calibration, calibrate
from medusa_cli.training.conversations import Conversations, split_conversations
from medusa_cli.training.data import Dataset, frequent_tokens
from medusa_cli.training.distributed import World
from medusa_cli.training.events import Event, Saved, Stepped, Stopped, Validated
from medusa_cli.training.loop import Trainer
from medusa_cli.training.prefill import load_dataset

__all__ = [
    "Calibration",
    "Conversations",
    "Dataset",
    "Event",
    "Saved",
    "Stepped",
    "Stopped",
    "Trainer",
    "Validated",
    "World",
    "build_drafter",
    "calibrate",
    "frequent_tokens",
    "load_dataset",
    "split_conversations",
]
