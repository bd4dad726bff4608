"""Training of drafters on the model's own answers, and measurement of how often their drafts are correct."""

from medusa_cli.train.calibration import calibrate
from medusa_cli.train.estimate import estimate
from medusa_cli.train.loop import Trainer
from medusa_cli.train.training import evaluate, train

__all__ = ["Trainer", "calibrate", "estimate", "evaluate", "train"]
