"""Self-distillation: turns seed prompts into conversations in the model's own words (Medusa, section 3.3.2)."""

from medusa_cli.distill.distillation import Records, distill
from medusa_cli.distill.local import Outcome, answer_locally

__all__ = ["Outcome", "Records", "answer_locally", "distill"]
