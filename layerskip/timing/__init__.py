"""Timing of passes and sublayers on this machine."""
