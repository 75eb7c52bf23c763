"""Systems of papers, which work here and pay nowhere by our own figures (see docs/experiments.md).

They use the public protocols only. Users choose them by name (see `layerskip.registry`), and no
other room imports or names them.
"""
