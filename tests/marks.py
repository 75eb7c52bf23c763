"""Cases of a parameter that do not run by default. A tuple stands for several parameters."""

import pytest


def _marking(mark):
    def marked(*cases):
        each = (case if isinstance(case, tuple) else (case,) for case in cases)
        return [pytest.param(*values, marks=mark) for values in each]

    return marked


slow, thorough = map(_marking, (pytest.mark.slow, pytest.mark.thorough))
