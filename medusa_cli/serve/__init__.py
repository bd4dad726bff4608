"""An OpenAI-compatible server over the one step that all decoding is made of."""
