"""DISCO: a classifier, learnt from recorded rounds, stops a draft (Mamou et al. 2024, 2405.04304).

It predicts from a drafted token's confidence and its place in the draft whether the target accepts
it. Drafting stops behind a token that is unlikely to be. Record long drafts by a controller that
reads confidences, learn from them, and decode:

    layerskip benchmark MODEL --method self --controller confidence --threshold 0 --output RUN.jsonl
    python -m layerskip.research.disco RUN.jsonl disco.json
    layerskip generate MODEL --controller disco --classifier disco.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from layerskip.costs.speculation import CostTable
from layerskip.decoding.controllers import SIGNALS, Fixed
from layerskip.files import schema
from layerskip.files.reading import errors_of
from layerskip.files.records import RunFile, read_run
from layerskip.files.writing import write_text

_STEPS = 50  # of Newton's method, which converges in about ten
_PENALTY = 1.0  # of squared weights, so that separable data have finite ones
_THRESHOLDS = [each / 20 for each in range(1, 20)]
_LOWEST = 1e-4  # distance of a confidence from 0 and 1


class Classifier(NamedTuple):
    """A logistic regression on `features`.

    Attributes:
        signal: the kind of confidence it was trained on, as `Controller.signal`.
        threshold: the probability of acceptance below which a draft stops.
    """

    weights: tuple[float, ...]
    threshold: float
    signal: str

    def probability(self, confidence: float, place: int) -> float:
        """The probability that the token at a place (from 0) of a draft is accepted."""
        return float(_logistic(np.dot(self.weights, features(confidence, place))))

    def save(self, path: str | Path) -> None:
        document = {"kind": "disco", "schema": 1, **self._asdict()}
        write_text(Path(path), json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Classifier:
        """Read a file that `save` wrote.

        Raises:
            ValueError: it cannot be read or is something else; says why in one line.
        """
        check = schema.has(
            kind=schema.one_of("disco"),
            schema=schema.version(1),
            weights=schema.items(schema.NUMBER, len(features(0.5, 0))),
            threshold=schema.SHARE,
            signal=schema.one_of(*SIGNALS),
        )
        with errors_of(f"the classifier {path}"):
            found = check(schema.parse(Path(path).read_bytes()), "")
        return cls(tuple(found["weights"]), found["threshold"], found["signal"])


def features(confidence: float, place: int) -> tuple[float, float, float]:
    """The classifier's inputs: 1, a token's log odds, and the logarithm of its place from 1 on."""
    sure = min(max(confidence, _LOWEST), 1.0 - _LOWEST)
    return 1.0, math.log(sure / (1.0 - sure)), math.log1p(place)


def _logistic(values: Any) -> Any:
    return 0.5 * (1.0 + np.tanh(0.5 * values))


class Disco(Fixed):
    """Stops a draft behind a token whose predicted acceptance is below the threshold."""

    needs_confidence = True

    def __init__(
        self,
        classifier: Classifier | str | None = None,
        max_draft_length: int = 8,
        threshold: float | None = None,
    ) -> None:
        super().__init__(max_draft_length)
        if classifier is None:
            raise ValueError("the controller disco needs a classifier, a file that it has learnt")
        learnt = Classifier.load(classifier) if isinstance(classifier, str) else classifier
        self.classifier, self.signal = learnt, learnt.signal
        self.threshold = learnt.threshold if threshold is None else threshold
        self.places: dict[int, int] = {}

    def limit(self, row: int, allowed: int) -> int:
        self.places[row] = 0
        return super().limit(row, allowed)

    def keep_drafting(self, row: int, confidence: float) -> bool:
        place = self.places[row]
        self.places[row] = place + 1
        if math.isnan(confidence):
            return False
        return self.classifier.probability(confidence, place) >= self.threshold


class Draft(NamedTuple):
    """A recorded draft: the confidences of its tokens, and how many were accepted."""

    confidences: Sequence[float]
    accepted: int


def recorded(run: RunFile, method: str) -> Iterator[Draft]:
    """Yield a method's drafts with confidences, from a run file."""
    for record in run.records:
        if record["method"] != method or not record.get("rounds"):
            continue
        rounds = record["rounds"]
        for sure, accepted in zip(rounds["confidences"] or (), rounds["accepted"], strict=False):
            for confidences, right in zip(sure, accepted, strict=True):
                if confidences:
                    yield Draft(confidences, right)


def learn(drafts: Sequence[Draft], costs: CostTable, signal: str) -> Classifier:
    """Fit the classifier, and choose the threshold that gives most tokens for their cost.

    Tokens behind the first rejected one are left out: nobody knows whether they were right.

    Raises:
        ValueError: the drafts hold no accepted or no rejected token.
    """
    rows, labels = [], []
    for draft in drafts:
        for place, confidence in enumerate(draft.confidences[: draft.accepted + 1]):
            rows.append(features(confidence, place))
            labels.append(float(place < draft.accepted))
    if len({*labels}) < 2:
        raise ValueError(
            "the recorded drafts must hold accepted and rejected tokens with confidences: record "
            "longer drafts, by a controller that reads confidences"
        )
    x, y = np.array(rows), np.array(labels)  # (N, F), (N,)
    weights = np.zeros(x.shape[1])
    for _ in range(_STEPS):  # Newton's method on the penalised log-likelihood
        p = _logistic(x @ weights)  # (N,)
        slope = x.T @ (y - p) - _PENALTY * weights
        bend = (x * (p * (1.0 - p))[:, None]).T @ x + _PENALTY * np.eye(len(weights))
        weights += np.linalg.solve(bend, slope)
    fitted = Classifier((*map(float, weights),), 0.5, signal)

    def rate(threshold: float) -> float:
        tokens, cost = 0.0, 0.0
        for confidences, accepted in drafts:
            sure = map(fitted.probability, confidences, range(len(confidences)))
            length = next((k + 1 for k, p in enumerate(sure) if p < threshold), len(confidences))
            tokens += 1 + min(accepted, length)
            cost += costs.round_cost(length)
        return tokens / cost

    return fitted._replace(threshold=max(_THRESHOLDS, key=rate))


def main(run: Path, output: Path, method: str | None = None) -> None:
    """Learn a classifier from the drafts of a run, by the first method that has confidences."""
    found = read_run(run)
    for each in found.header["methods"]:
        drafts = [*recorded(found, each["name"])]
        if drafts and each["name"] == (method or each["name"]):
            costs = CostTable.from_dict(next(iter(each["costs"].values())))
            signal = "probability" if each["controller"] == "confidence" else "margin"
            return learn(drafts, costs, signal).save(output)
    raise ValueError(f"{run} holds no drafts with confidences of {method or 'any method'}")


if __name__ == "__main__":
    import typer

    typer.run(main)
