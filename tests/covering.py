"""Few cases that cover all combinations of some values."""

from collections import defaultdict
from itertools import combinations, product


def covering(*axes, strength=2):
    """Choose cases so that any `strength` axes take every combination of their values.

    A greedy covering array: each case adds the most new combinations. The result is always the
    same. See D. R. Kuhn, R. N. Kacker, Y. Lei, "Practical Combinatorial Testing", NIST SP 800-142
    (2010).
    """
    cases = list(product(*(range(len(axis)) for axis in axes)))
    groups = list(combinations(range(len(axes)), strength))
    parts = [{(group, tuple(case[i] for i in group)) for group in groups} for case in cases]
    holders = defaultdict(list)  # combination -> the cases that contain it
    for number, held in enumerate(parts):
        for part in held:
            holders[part].append(number)
    missing = set(holders)
    fresh = [len(groups)] * len(cases)  # number of missing combinations in each case
    chosen = []
    while missing:
        best = max(range(len(cases)), key=fresh.__getitem__)
        chosen.append(tuple(axis[i] for axis, i in zip(axes, cases[best], strict=True)))
        for part in parts[best] & missing:
            missing.remove(part)
            for number in holders[part]:
                fresh[number] -= 1
    return chosen
