"""An OpenAI-compatible server over the decoder that all commands use."""
