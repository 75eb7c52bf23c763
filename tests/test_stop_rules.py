"""Published stop rules, step by step. Their contract is tested in test_controllers.py."""

import math
import random

import pytest

from layerskip.research.stop_rules import Classifier, Entropy, Heuristic, TargetConfidence


def test_heuristic_follows_transformers():
    controller = Heuristic()
    controller.reset(1)
    lengths = []
    for drafted, accepted in ((20, 20), (22, 21), (21, 0), (0, 0), (20, 20)):
        lengths.append(controller.limit(0, 99))
        controller.update(0, drafted, accepted)
    assert lengths == [20, 22, 21, 20, 20]
    for _ in range(40):
        controller.update(0, 2, 0)
    assert controller.limit(0, 99) == 1
    controller.update(0, 1, 1)
    assert controller.limit(0, 99) == 3


def test_heuristic_starts_where_transformers_starts():
    transformers = pytest.importorskip("transformers")
    model_default = transformers.GenerationConfig._get_default_generation_params()
    assert model_default["num_assistant_tokens"] == Heuristic().limit(0, 1000)


def test_entropy_follows_svip():
    """It stops if sqrt(.15 H) > .3, so at H = .6."""
    controller = Entropy()
    controller.reset(2)
    assert controller.limit(0, 99) == 40
    for entropy, goes_on in ((0.0, True), (0.59, True), (0.61, False)):
        controller.see_draft(0, 0.1, entropy)
        assert controller.keep_drafting(0, 0.1) == goes_on
    assert controller.keep_drafting(1, 0.1)
    controller.see_draft(0, 0.1, math.nan)
    assert not controller.keep_drafting(0, 0.1)


def test_target_confidence_gates_what_follows():
    controller = TargetConfidence()
    controller.reset(2)
    limits = []
    for probability in (0.5, 0.4999, 1.0, math.nan):
        controller.see_target(0, probability, 1.0)
        limits.append(controller.limit(0, 9))
    assert limits == [5, 0, 5, 0]
    assert controller.limit(1, 9) == 5  # nothing is known yet


def draft_of(features, controller):
    """How many tokens it drafts, given their confidences and entropies."""
    drafted, limit = 0, controller.limit(0, len(features))
    for confidence, entropy in features:
        drafted += 1
        controller.see_draft(0, confidence, entropy)
        if drafted == limit or not controller.keep_drafting(0, confidence):
            break
    return drafted


def test_classifier_learns_which_drafts_are_rejected():
    """Here the entropy decides (above 1), and the confidences carry no information."""
    controller = Classifier()
    controller.reset(1)
    sure, unsure = (0.5, 0.2), (0.5, 2.5)
    assert draft_of([unsure] * 9, controller) == 9
    controller.update(0, 9, 0)
    draws = random.Random(0)
    for _ in range(60):
        text = [(draws.random(), draws.choice((0.2, 2.5))) for _ in range(9)]
        drafted = draft_of(text, controller)
        right = [entropy < 1 for _, entropy in text[:drafted]]
        controller.update(0, drafted, right.index(False) if False in right else drafted)
    assert draft_of([sure] * 9, controller) == 9
    assert draft_of([sure, unsure, sure], controller) == 2
    controller.forget(0)
    assert draft_of([unsure] * 9, controller) == 9
