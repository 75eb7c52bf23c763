"""Few cases that cover all combinations of a few values."""

from collections import defaultdict
from itertools import combinations, product


def covering(*axes, strength=2):
    """Cases in which any `strength` axes take every combination of their values; by greed.

    Always the same cases in the same order, most new combinations first: a covering array, see
    D. R. Kuhn, R. N. Kacker, Y. Lei, "Practical Combinatorial Testing", NIST SP 800-142 (2010).
    """
    cases = list(product(*(range(len(axis)) for axis in axes)))
    groups = list(combinations(range(len(axes)), strength))
    parts = [{(group, tuple(case[i] for i in group)) for group in groups} for case in cases]
    holders = defaultdict(list)  # combination -> the cases it is in
    for number, held in enumerate(parts):
        for part in held:
            holders[part].append(number)
    missing = set(holders)
    fresh = [len(groups)] * len(cases)  # missing combinations of every case
    chosen = []
    while missing:
        best = max(range(len(cases)), key=fresh.__getitem__)
        chosen.append(tuple(axis[i] for axis, i in zip(axes, cases[best], strict=True)))
        for part in parts[best] & missing:
            missing.remove(part)
            for number in holders[part]:
                fresh[number] -= 1
    return chosen
