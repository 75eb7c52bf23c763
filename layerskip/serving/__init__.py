"""Many requests on one model at once, each with the text that it has alone."""
