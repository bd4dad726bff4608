"""Access to files and servers without torch: I/O, weights, named models and data, GGUF, and chat servers."""
