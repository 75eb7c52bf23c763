"""Lossless self-speculative decoding with a subset of a model's own sublayers."""

__version__ = "0.1.0"
