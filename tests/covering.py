"""Few cases that hold all combinations of some values."""

from collections import defaultdict
from itertools import combinations

import numpy as np
import pytest

APART = {"slow", "thorough", "wheel", "gpu", "network", "checkpoint", "postgres", "ray"}


def chosen(cases, strength=2):
    """Choose cases that together hold each combination of `strength` values that any case holds.

    `cases`, (C, A), gives the number of the value of every axis. The result is a list of few cases
    by their numbers: a greedy covering array, in which each case adds the most new combinations.
    It is always the same. See D. R. Kuhn, R. N. Kacker, Y. Lei, "Practical Combinatorial Testing",
    NIST SP 800-142 (2010).
    """
    held, count = [], 0  # the combination that every case has of each group of axes, numbered
    for group in map(list, combinations(range(cases.shape[1]), strength)):
        values, numbers = np.unique(cases[:, group], axis=0, return_inverse=True)
        held.append(count + numbers.ravel())
        count += len(values)
    parts, missing, picked = np.stack(held, 1), np.ones(count, bool), []  # (C, G)
    while missing.any():
        picked.append(int(missing[parts].sum(1).argmax()))
        missing[parts[picked[-1]]] = False
    return picked


def covering(*axes, strength=2):
    """Choose cases so that any `strength` axes take every combination of their values."""
    cases = np.indices([len(axis) for axis in axes]).reshape(len(axes), -1).T  # (C, A)
    picked = cases[chosen(cases, strength)]
    return [tuple(axis[n] for axis, n in zip(axes, case, strict=True)) for case in picked]


def _values(item):
    """What a case has of each of its parameters, by identity. Those of one mark are one."""
    params = item.callspec.params
    marks = (mark.args[0] for mark in item.iter_markers("parametrize"))
    groups = ([names] if isinstance(names, str) else names for names in marks)
    return [tuple(id(params[name]) for name in names) for names in groups]


def leave_pairs(items):
    """Mark as thorough what a matrix has beyond a choice that holds every pair of its values.

    So every value of each parameter is tried by default, also a new one, and beside every value of
    every other. A matrix has three parameters or more: of fewer, each case is a pair of its own.
    """
    matrices = defaultdict(list)
    for item in items:
        if not APART & {mark.name for mark in item.iter_markers()} and hasattr(item, "callspec"):
            matrices[item.nodeid.split("[")[0]].append(item)
    for cases in matrices.values():
        numbers = {}
        values = [[numbers.setdefault(v, len(numbers)) for v in _values(item)] for item in cases]
        values = np.array(values)  # (C, A)
        if values.shape[1] > 2:
            picked = set(chosen(values))
            for number, item in enumerate(cases):
                if number not in picked:
                    item.add_marker(pytest.mark.thorough)
