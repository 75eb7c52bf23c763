"""A `transformers` checkpoint as 2L residual sublayers; no rounds, no laws."""
