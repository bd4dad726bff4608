"""Files on disk and on the network, without torch: I/O, weights, named models and data, GGUF, chat servers."""
