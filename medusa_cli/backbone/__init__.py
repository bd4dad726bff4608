"""The frozen language model that verifies: loading, forward passes over trees, the KV cache."""

from medusa_cli.backbone.cache import KVCache, SlotCache
from medusa_cli.backbone.load import load_backbone
from medusa_cli.backbone.model import Backbone, Output

__all__ = ["Backbone", "KVCache", "Output", "SlotCache", "load_backbone"]
