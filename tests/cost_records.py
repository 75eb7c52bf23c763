"""Made-up "cost" records: the costs of sublayers on machines where drafts pay, or do not."""

from layerskip.config.skips import SkipConfig
from layerskip.costs.cost_model import Rates
from layerskip.search.prices import Prices
from layerskip.search.space import Space
from layerskip.timing.cost_tables import traffic_of


def analytic(model, draft, rows=1):
    return Rates().table(traffic_of(model, draft), None, 0, rows)


def prices_of(record, skip, context=40, size=None):
    """A config's mask in a space that holds it, and the prices of that space.

    Args:
        size: size of the draft vocabulary.
    """
    some = {"experts": skip.experts, "windows": skip.window, "vocabularies": size}
    space = Space(
        kind="sublayer",
        num_layers=len(record["attention"]),
        allow_ends=True,
        bits=skip.low and skip.low.bits,
        **{name: (number,) for name, number in some.items() if number is not None},
    )
    smaller = space.numbers["vocabulary"].get(size, 0)
    return Prices(space, record, context), space.mask(skip) | smaller


def cost_table(record, skip, context=40, size=None):
    """The costs of rounds that draft with a config."""
    prices, mask = prices_of(record, skip, context, size)
    return prices.table(mask)


def step_seconds(record, context=40):
    return prices_of(record, SkipConfig(), context)[0].step


def cost_record(
    layers=6,
    *,
    attention=1e-3,
    mlp=1e-3,
    head=5e-4,
    rest=5e-4,
    growth=0.03,
    keys=0.0,
):
    """Seconds of sublayers, head and rest; each further token of a pass adds `growth` times these.

    Args:
        attention, mlp: seconds of each layer: one number for all, or a list.
        keys: seconds per layer and token of context.
    """
    weights = {
        name: [value] * layers if isinstance(value, float) else list(value)
        for name, value in (("attention", attention), ("mlp", mlp))
    }
    return {
        "kind": "cost",
        "batch_size": 1,
        "contexts": [16, 64],
        **weights,
        "head": head,
        "rest": rest,
        "keys": [keys] * layers,
        "windows": [None] * layers,
        "growth": [[1, 1.0], [9, 1 + 8 * growth]],
        "key_growth": [[1, 1.0], [9, 1 + 8 * growth]],
        "repeated": [[1.0, 1.0]],
    }


MACHINES = {
    "reads weights": cost_record(),
    "free verification": cost_record(growth=0.0, rest=1e-5, head=1e-5),
    "dear verification": cost_record(growth=0.4),
    "dear heads": cost_record(head=6e-3),
    "trimmed heads": cost_record(head=6e-3) | {"vocabulary": 97},
    "dear rest": cost_record(rest=2e-2),
    "cheap ends": cost_record(attention=[1e-4, 2e-3, 3e-3, 1e-3, 5e-4, 1e-4], mlp=4e-4, growth=0.1),
    "long contexts": cost_record(keys=5e-5, growth=0.06),
}
"""By what is special about them."""
