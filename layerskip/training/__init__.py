"""Training of a draft for a frozen model, and measurement of its value."""
