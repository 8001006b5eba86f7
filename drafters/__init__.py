"""drafters: train, measure and export draft heads for speculative decoding on frozen language models."""

__version__ = "0.1.0"
