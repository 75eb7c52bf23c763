"""Files that runs and searches leave behind: what they hold, reading, writing; no torch."""
