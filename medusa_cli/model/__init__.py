"""The frozen language model: loading, identity, chat template, adapters, masks."""

from medusa_cli.model.backbone import Backbone

__all__ = ["Backbone"]
