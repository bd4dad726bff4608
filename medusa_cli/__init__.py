"""Make any Hugging Face causal LM decode several tokens a step, with the same output."""

__version__ = "0.1.0"
