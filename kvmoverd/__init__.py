"""kvmoverd: moves KV cache between storage, nodes and inference engines."""

__version__ = "0.1.0"
