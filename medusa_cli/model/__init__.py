"""The frozen language model: loading, what it is called by, how its conversations are laid out."""

from medusa_cli.model.backbone import Backbone

__all__ = ["Backbone"]
