"""The frozen language model that verifies: loading, forward passes over trees, the KV cache."""

from medusa_cli.backbone.cache import KVCache
from medusa_cli.backbone.load import load_backbone
from medusa_cli.backbone.model import Backbone, Output
from medusa_cli.backbone.pseudo import Pseudo
from medusa_cli.backbone.slots import SlotCache

__all__ = ["Backbone", "KVCache", "Output", "Pseudo", "SlotCache", "load_backbone"]
