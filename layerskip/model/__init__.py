"""A `transformers` checkpoint as 2L residual sublayers, and ways to compute them."""
