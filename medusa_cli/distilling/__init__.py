"""Self-distillation: seed prompts in, conversations in the model's own words out (Medusa, section 3.3.2)."""

from medusa_cli.distilling.distilled import Distilled, Settings
from medusa_cli.distilling.local import distill
from medusa_cli.distilling.records import RecordWriter
from medusa_cli.distilling.seeds import Seed, read_seeds

__all__ = ["Distilled", "RecordWriter", "Seed", "Settings", "distill", "read_seeds"]
