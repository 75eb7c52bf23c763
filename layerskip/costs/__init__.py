"""Costs and gains of drafting in closed formulas; uses neither torch nor a clock."""
