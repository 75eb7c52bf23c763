"""Systems from papers, which work here but gain less than the default drafts (docs/experiments.md).

They use only the public protocols. Users choose them by name (see `config.registry`); no other
part imports or names them.
"""
