"""Few cases that cover all combinations of some values."""

from itertools import combinations

import numpy as np


def covering(*axes, strength=2):
    """Choose cases so that any `strength` axes take every combination of their values.

    A greedy covering array: each case adds the most new combinations. The result is always the
    same. See D. R. Kuhn, R. N. Kacker, Y. Lei, "Practical Combinatorial Testing", NIST SP 800-142
    (2010).
    """
    sizes = [len(axis) for axis in axes]
    places = np.indices(sizes).reshape(len(axes), -1)  # (A, C) of all C cases
    held, count = [], 0  # the combination that every case has of each group of axes, numbered
    for group in map(list, combinations(range(len(axes)), strength)):
        held.append(count + np.ravel_multi_index(places[group], [sizes[axis] for axis in group]))
        count = held[-1].max() + 1
    parts, missing, chosen = np.stack(held, 1), np.ones(count, bool), []  # (C, G), all combinations
    while missing.any():
        best = missing[parts].sum(1).argmax()
        chosen.append(tuple(axis[n] for axis, n in zip(axes, places[:, best], strict=True)))
        missing[parts[best]] = False
    return chosen
