"""Systems from papers, which work here but pay nowhere by our measurements (docs/experiments.md).

They use only the public protocols. Users choose them by name (see `layerskip.registry`); no other
part imports or names them.
"""
