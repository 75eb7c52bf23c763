"""Readers for low-bit checkpoints, one file per format."""
