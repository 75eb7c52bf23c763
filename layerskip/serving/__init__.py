"""Many requests on one model at once, each with the same text as if it were alone."""
