"""Rounds of draft, verify, accept, on an opened model; no text, no files, no clock."""
