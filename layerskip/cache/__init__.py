"""Keys, values and recurrent states of a batch."""
