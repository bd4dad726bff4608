"""Training drafters on the model's own answers, and measuring how often their drafts are right."""

from medusa_cli.data.packing import Dataset, frequent_tokens, split_conversations
from medusa_cli.model.distributed import Distributed
from medusa_cli.train.calibration import calibrate
from medusa_cli.train.log import Event, Prefilled, Saved, Started, Stepped, Stopped, Validated
from medusa_cli.train.loop import Trainer
from medusa_cli.train.prefill import load_dataset
from medusa_cli.train.setup import build_drafter
from medusa_cli.train.training import Trained, evaluate, train

__all__ = [
    "Dataset",
    "Distributed",
    "Event",
    "Prefilled",
    "Saved",
    "Started",
    "Stepped",
    "Stopped",
    "Trained",
    "Trainer",
    "Validated",
    "build_drafter",
    "calibrate",
    "evaluate",
    "frequent_tokens",
    "load_dataset",
    "split_conversations",
    "train",
]
