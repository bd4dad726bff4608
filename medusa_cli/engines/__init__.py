"""Engines: plans of forward passes in, states and logits out, over one KV cache of slots."""

from medusa_cli.engines.cache import Cache
from medusa_cli.engines.engine import Engine
from medusa_cli.engines.load import attach, load_backbone
from medusa_cli.engines.plan import Output, Plan
from medusa_cli.engines.pseudo import Pseudo

__all__ = ["Cache", "Engine", "Output", "Plan", "Pseudo", "attach", "load_backbone"]
