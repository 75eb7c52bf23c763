"""Readers of checkpoints of few bits: a file for each kind of checkpoint."""
