"""Engines, which run plans of forward passes over a KV cache of slots and return states and logits."""

from medusa_cli.engine.cache import Cache, Slots
from medusa_cli.engine.engine import Engine
from medusa_cli.engine.extra_rows import ExtraRows
from medusa_cli.engine.load import load_backbone
from medusa_cli.engine.plan import Output, Plan

__all__ = ["Cache", "Engine", "Output", "Plan", "ExtraRows", "Slots", "load_backbone"]
