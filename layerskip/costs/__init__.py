"""What drafting costs and gains, in closed formulas; no torch, no clock."""
