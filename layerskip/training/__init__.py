"""Training of a draft for a frozen model, and measuring what it is worth."""
