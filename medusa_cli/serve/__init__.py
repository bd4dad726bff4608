"""An OpenAI-compatible server on top of the decoder that all commands use."""
