"""Search for the sublayers to leave out; knows models and cost tables, not the command line."""
