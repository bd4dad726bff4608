"""Training drafters on the model's own answers, and measuring how often their drafts are right."""

from medusa_cli.train.calibration import calibrate
from medusa_cli.train.estimate import estimate
from medusa_cli.train.loop import Trainer
from medusa_cli.train.training import evaluate, train

__all__ = ["Trainer", "calibrate", "estimate", "evaluate", "train"]
