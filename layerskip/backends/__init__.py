"""Ways to compute the sublayers of a model, one file each."""
