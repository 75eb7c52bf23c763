"""Training a draft for a frozen model, and judging what it is worth."""
