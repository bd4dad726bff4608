"""Engines: plans of forward passes in, states and logits out, over one KV cache of slots."""

from medusa_cli.engine.cache import Cache
from medusa_cli.engine.engine import Engine
from medusa_cli.engine.extra_rows import ExtraRows
from medusa_cli.engine.load import attach, load_backbone
from medusa_cli.engine.plan import Output, Plan

__all__ = ["Cache", "Engine", "Output", "Plan", "ExtraRows", "attach", "load_backbone"]
