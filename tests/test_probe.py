"""mpp/probe.py against scikit-learn, NumPy, and what can be said without computing."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from mpp import probe
from mpp.errors import UserError


def blobs(rows, width, classes=4, noise=2.0, seed=0):
    """Overlapping classes far from the origin, on axes of different scale: float32 [row, width], labels [row]."""
    centers = np.random.default_rng(0).normal(size=(classes, width))
    rng = np.random.default_rng(seed + 1)
    labels = rng.permutation(np.arange(rows) % classes)
    features = (centers[labels] + rng.normal(size=(rows, width)) * noise) * np.linspace(0.5, 3, width) + 5
    return features.astype(np.float32), labels


def agree(scores, expected):
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert np.array_equal(scores.argmax(1), expected.argmax(1))


def test_accuracy_is_the_share_of_rows_whose_label_scores_highest():
    scores = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [-1.0, -2.0]])
    assert probe.accuracy(scores, np.array([1, 0, 0, 0])) == 0.75


# ---------------------------------------------------------------- regularised least squares


def prepared(form, fit, test):
    """What each form regresses on."""
    fit, test = fit.astype(np.float64), test.astype(np.float64)
    if form == "plain":
        return fit, test
    mean, spread = fit.mean(0), fit.std(0) + 1e-5
    return tuple(np.hstack([(rows - mean) / spread, np.full((len(rows), 1), 100.0)]) for rows in (fit, test))


@pytest.mark.parametrize("form", ["whitened", "plain"])
@pytest.mark.parametrize("rows", [12, 60])  # fewer and more than features
@pytest.mark.parametrize("strength", [0.5, 1024.0])
def test_ridge_is_least_squares_with_a_row_of_regularisation_for_each_feature(form, rows, strength):
    (fit, labels), (test, tested) = blobs(rows, 20), blobs(200, 20, seed=5)
    scores = probe.ridge(fit, labels, test, 4, form=form, strength=strength)
    assert scores.dtype == np.float64 and scores.shape == (200, 4)
    x, z = prepared(form, fit, test)
    y = np.where(np.arange(4) == labels[:, None], 1.0, -1.0)
    width = x.shape[1]
    weights = np.linalg.lstsq(
        np.vstack([x, strength**0.5 * np.eye(width)]), np.vstack([y, np.zeros((width, 4))]), rcond=None
    )[0]
    agree(scores, z @ weights)
    agree(scores, Ridge(alpha=strength, fit_intercept=False, tol=1e-12).fit(x, y).predict(z))
    assert probe.accuracy(scores, tested) > 0.3


def test_ridge_solves_for_rows_or_for_features_whichever_are_fewer(monkeypatch):
    sizes, real = [], np.linalg.solve
    monkeypatch.setattr(np.linalg, "solve", lambda left, right: sizes.append(left.shape) or real(left, right))
    for rows in (5, 30):
        (fit, labels), (test, _) = blobs(rows, 8), blobs(10, 8, seed=5)
        probe.ridge(fit, labels, test, 4)
    assert sizes == [(5, 5), (9, 9)]


def test_ridge_is_whitened_with_a_strength_of_1024_unless_told_otherwise():
    (fit, labels), (test, _) = blobs(30, 8), blobs(10, 8, seed=5)
    usual = probe.ridge(fit, labels, test, 4)
    assert np.array_equal(usual, probe.ridge(fit, labels, test, 4, form="whitened", strength=1024.0))


@pytest.mark.parametrize("form", ["whitened", "plain"])
@pytest.mark.parametrize("rows", [1, 30])
def test_ridge_with_one_class_only_scores_the_others_just_opposite(form, rows):
    (fit, _), (test, _) = blobs(rows, 8), blobs(10, 8, seed=5)
    scores = probe.ridge(fit, np.full(rows, 2), test, 4, form=form, strength=1.0)
    assert np.isfinite(scores).all() and np.abs(scores).max() > 0.1
    for other in (0, 1, 3):  # their targets are all -1, and those of class 2 all 1
        np.testing.assert_allclose(scores[:, other], -scores[:, 2], rtol=1e-9)


def test_a_constant_feature_does_not_matter_to_whitened_ridge():
    (fit, labels), (test, _) = blobs(40, 8), blobs(10, 8, seed=5)
    more = [np.hstack([rows, np.full((len(rows), 1), 3.0, dtype=np.float32)]) for rows in (fit, test)]
    np.testing.assert_allclose(
        probe.ridge(more[0], labels, more[1], 4), probe.ridge(fit, labels, test, 4), rtol=1e-9, atol=1e-12
    )


# ---------------------------------------------------------------- nearest neighbours


@pytest.mark.parametrize("temperature", [0.07, 0.5])
@pytest.mark.parametrize("chunk", [1, 7 * 90, 2**25])  # similarities at a time: a test row, some, and all
def test_nearest_is_scikit_learns_classifier_with_weights_by_cosine(monkeypatch, temperature, chunk):
    monkeypatch.setattr(probe, "_PAIRS", chunk)
    (fit, labels), (test, tested) = blobs(90, 12), blobs(50, 12, seed=5)
    found = probe.nearest(fit, labels, test, 4, neighbors=[1, 5, 90], temperature=temperature)
    assert list(found) == [1, 5, 90]
    for count, scores in found.items():
        expected = KNeighborsClassifier(
            count,
            metric="cosine",
            weights=lambda distance: np.exp((1 - distance) / temperature),
            algorithm="brute",
        ).fit(fit.astype(np.float64), labels)
        agree(scores, expected.predict_proba(test.astype(np.float64)))
        assert scores.dtype == np.float64 and np.allclose(scores.sum(1), 1)
    assert probe.accuracy(found[5], tested) > 0.3


def test_the_temperature_is_007_unless_told_otherwise():
    (fit, labels), (test, _) = blobs(30, 8), blobs(10, 8, seed=5)
    usual = probe.nearest(fit, labels, test, 4, neighbors=[9])[9]
    assert np.array_equal(usual, probe.nearest(fit, labels, test, 4, neighbors=[9], temperature=0.07)[9])


@pytest.mark.parametrize("width", [3, 96])
@pytest.mark.parametrize("most", [149, 150])  # with a tie at the last place, and without one
def test_of_equally_similar_rows_the_first_vote_as_after_a_stable_sort(width, most):
    rng = np.random.default_rng(3)
    rows = 150
    kinds = rng.normal(size=(9, width)).astype(np.float32)  # each many times, far from one another in `fit`
    fit, test = kinds[rng.integers(0, 9, rows)], rng.normal(size=(40, width)).astype(np.float32)
    labels = np.arange(rows)  # a class of its own: the scores show which rows voted, and with what weight
    found = probe.nearest(fit, labels, test, rows, neighbors=[4, 30, 31, most], temperature=0.3)
    unit_fit, unit_test = (part / np.linalg.norm(part.astype(np.float64), axis=1)[:, None] for part in (fit, test))
    similarity = np.round(unit_test @ unit_fit.T, 10)
    order = np.argsort(-similarity, axis=1, kind="stable")
    for count, scores in found.items():
        assert [set(np.flatnonzero(row)) for row in scores] == [set(row) for row in order[:, :count]]
        chosen = order[:, :count]
        expected = softmax(np.take_along_axis(similarity, chosen, 1) / 0.3, axis=1)
        np.testing.assert_allclose(np.take_along_axis(scores, chosen, 1), expected, atol=1e-8)


def test_rows_that_are_all_alike_vote_from_the_first_on():
    fit, labels = np.ones((1000, 5), dtype=np.float32), np.arange(1000) // 10
    scores = probe.nearest(fit, labels, fit[:3], 100, neighbors=[15])[15]
    expected = np.zeros((3, 100))
    expected[:, 0], expected[:, 1] = 10 / 15, 5 / 15
    np.testing.assert_allclose(scores, expected, atol=1e-12)


def test_no_temperature_and_no_row_without_length_gives_nan():
    (fit, labels), (test, _) = blobs(30, 8), blobs(10, 8, seed=5)
    test[0] = fit[4] = 0  # similar to nothing: cosine 0
    scores = probe.nearest(fit, labels, test, 6, neighbors=[30], temperature=1e-4)[30]
    assert np.allclose(scores.sum(1), 1) and not scores[:, 4:].any()
    np.testing.assert_allclose(scores[0], np.bincount(labels, minlength=6) / 30, atol=1e-12)


def test_more_neighbours_than_rows_are_refused():
    (fit, labels), (test, _) = blobs(30, 8), blobs(10, 8, seed=5)
    with pytest.raises(UserError, match="31 neighbours are asked for among 30 images"):
        probe.nearest(fit, labels, test, 4, neighbors=[5, 31])


# ---------------------------------------------------------------- logistic regression


def in_scikit_learn(fit, labels, test, strength):
    """Its logits, which have no common part, from features standardised by it."""
    scaler = StandardScaler().fit(fit.astype(np.float64))
    model = LogisticRegression(C=strength, tol=1e-9, max_iter=5000).fit(
        scaler.transform(fit.astype(np.float64)), labels
    )
    return model.decision_function(scaler.transform(test.astype(np.float64)))


@pytest.mark.parametrize("rows", [24, 200])  # fewer and more than features
@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0])
def test_logistic_is_scikit_learns(monkeypatch, rows, strength):
    monkeypatch.setattr(probe, "_CHUNK", 77)
    (fit, labels), (test, tested) = blobs(rows, 30), blobs(150, 30, seed=5)
    found = logistic(fit, labels, test, 4, strengths=[strength])
    agree(found.scores, in_scikit_learn(fit, labels, test, strength))
    assert found.scores.dtype == np.float64 and found.converged
    assert (found.strength, found.tried, found.at_edge) == (strength, {}, False)
    assert probe.accuracy(found.scores, tested) > 0.4


def test_two_classes_are_a_softmax_of_two_whose_weights_share_the_penalty():
    (fit, labels), (test, _) = blobs(80, 6, classes=2), blobs(60, 6, classes=2, seed=5)
    scores = logistic(fit, labels, test, 2, strengths=[0.01]).scores
    # scikit-learn has one vector w there; weights of w / 2 and -w / 2 have half its penalty.
    np.testing.assert_allclose(scores[:, 1] - scores[:, 0], in_scikit_learn(fit, labels, test, 0.02), atol=1e-4)


logistic = partial(probe.logistic, tolerance=1e-9)  # as exactly as what it is compared with
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def parts(noise):
    return blobs(40, 10, noise=noise, seed=1), blobs(50, 10, noise=noise, seed=2), blobs(60, 10, noise=noise, seed=3)


@pytest.mark.parametrize("noise", [1.0, 2.0, 3.0])
def test_the_strength_is_chosen_on_held_out_rows_and_then_fitted_on_all(noise):
    fit, choice, test = parts(noise)
    scores = {strength: in_scikit_learn(*fit, choice[0], strength) for strength in STRENGTHS}
    accuracies = {strength: (found.argmax(1) == choice[1]).mean() for strength, found in scores.items()}
    losses = {
        strength: -log_softmax(found, axis=1)[np.arange(50), choice[1]].mean() for strength, found in scores.items()
    }
    best = min(STRENGTHS, key=lambda strength: (-accuracies[strength], losses[strength]))
    found = logistic(*fit, test[0], 4, strengths=STRENGTHS[::-1], choice=choice)
    assert found.tried == accuracies and found.strength == best and found.converged
    assert found.at_edge == (best in (STRENGTHS[0], STRENGTHS[-1]))
    together = [np.concatenate(pair) for pair in zip(fit, choice, strict=True)]
    agree(found.scores, in_scikit_learn(*together, test[0], best))


def test_the_best_strength_may_lie_within_the_grid_or_at_either_edge():
    fit, choice, test = parts(3.0)
    wide = logistic(*fit, test[0], 4, strengths=STRENGTHS, choice=choice)
    assert not wide.at_edge
    above = [strength for strength in STRENGTHS if strength >= wide.strength]
    below = [strength for strength in STRENGTHS if strength <= wide.strength]
    for grid in (above, below):
        found = logistic(*fit, test[0], 4, strengths=grid, choice=choice)
        assert (found.strength, found.at_edge) == (wide.strength, True)
    alone = logistic(*fit, test[0], 4, strengths=[wide.strength], choice=choice)
    assert not alone.at_edge and np.array_equal(alone.scores, wide.scores)


def test_among_equally_accurate_strengths_the_least_loss_wins_and_then_the_strongest_regularisation():
    fit, choice, test = parts(0.05)  # all are right, and the weakest regularisation is surest
    found = logistic(*fit, test[0], 4, strengths=STRENGTHS, choice=choice)
    assert set(found.tried.values()) == {1.0} and found.strength == max(STRENGTHS) and found.at_edge
    zeros = np.zeros(40, dtype=int), np.zeros(50, dtype=int)  # of one class, every loss is 0
    found = logistic(fit[0], zeros[0], test[0], 1, strengths=STRENGTHS, choice=(choice[0], zeros[1]))
    assert found.strength == min(STRENGTHS)


@pytest.mark.parametrize("choice", [None, (np.zeros((0, 10), dtype=np.float32), np.zeros(0, dtype=int))])
def test_without_held_out_rows_the_strength_is_the_middle_one(choice):
    fit, _, test = parts(2.0)
    found = logistic(*fit, test[0], 4, strengths=[1.0, 1e-4, 1e-2], choice=choice)
    assert (found.strength, found.tried, found.at_edge) == (1e-2, {}, False)
    assert np.array_equal(found.scores, logistic(*fit, test[0], 4, strengths=[1e-2]).scores)
    assert not logistic(*fit, test[0], 4, strengths=[1e-2, 1.0], choice=choice).at_edge  # nothing was chosen


@pytest.fixture
def optimised(monkeypatch):
    """Where each optimisation started and ended."""
    found, real = [], probe.minimize

    def watched(objective, start, **more):
        result = real(objective, start, **more)
        found.append((start.copy(), result.x.copy()))
        return result

    monkeypatch.setattr(probe, "minimize", watched)
    return found


def test_each_fit_starts_where_a_stronger_regularisation_ended(optimised):
    fit, choice, test = parts(2.0)
    logistic(*fit, test[0], 4, strengths=[1e-2, 1.0, 1e-4], choice=choice)
    starts, ends = zip(*optimised, strict=True)
    assert not starts[0].any() and len(starts) == 4
    assert np.array_equal(starts[1], ends[0]) and np.array_equal(starts[2], ends[1])
    size = [np.square(end.reshape(11, 4)[:10]).sum() for end in ends[:3]]
    assert size == sorted(size)


def test_there_are_no_more_weights_of_a_class_than_rows(optimised):
    (fit, labels), (test, _) = blobs(8, 5000), blobs(10, 5000, seed=5)
    logistic(fit, labels, test, 4, strengths=[0.1])
    assert len(optimised[0][0]) == (8 + 1) * 4


@pytest.mark.parametrize("strengths", [[1e-2], [1e-2, 1.0]])
def test_a_fit_that_was_cut_short_is_told(monkeypatch, strengths):
    fit, choice, test = parts(2.0)
    monkeypatch.setattr(probe, "_ITERATIONS", 2)
    assert not logistic(*fit, test[0], 4, strengths=strengths).converged
    calls, real = [], probe.minimize

    def short_at_first(*arguments, options, **more):
        calls.append(1)
        options = options if len(calls) == 1 else {**options, "maxiter": 5000, "maxfun": 5000}
        return real(*arguments, options=options, **more)

    monkeypatch.setattr(probe, "minimize", short_at_first)
    assert not logistic(*fit, test[0], 4, strengths=strengths, choice=choice).converged


def test_a_feature_that_is_constant_where_it_is_fitted_has_no_weight():
    fit, choice, test = parts(2.0)
    plain = logistic(*fit, test[0], 4, strengths=STRENGTHS, choice=choice)
    # 0.1 has no exact mean; and elsewhere the feature may vary.
    fitted, held_out = (np.hstack([rows, np.full((len(rows), 1), 0.1, np.float32)]) for rows in (fit[0], choice[0]))
    tested = np.hstack([test[0], np.arange(len(test[0]), dtype=np.float32)[:, None]])
    found = logistic(fitted, fit[1], tested, 4, strengths=STRENGTHS, choice=(held_out, choice[1]))
    assert found.tried == plain.tried
    np.testing.assert_allclose(found.scores, plain.scores, atol=1e-5)


def test_a_class_without_an_image_stays_in_the_softmax():
    (fit, labels), (test, _) = blobs(80, 6), blobs(30, 6, seed=5)
    labels = np.where(labels >= 2, labels + 1, labels)  # there is no class 2
    found = logistic(fit, labels, test, 5, strengths=[0.1])
    chance = softmax(found.scores, axis=1)
    assert found.scores.shape == (30, 5) and chance[:, 2].max() < 1e-5
    expected = softmax(in_scikit_learn(fit, labels, test, 0.1), axis=1)
    np.testing.assert_allclose(chance[:, [0, 1, 3, 4]], expected, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 30])
def test_one_class_alone_is_foretold_without_nan(rows):
    (fit, _), (test, _) = blobs(rows, 8), blobs(10, 8, seed=5)
    scores = logistic(fit, np.full(rows, 2), test, 4, strengths=[0.1, 1.0]).scores
    assert np.isfinite(scores).all() and (scores.argmax(1) == 2).all()


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
def test_features_may_be_of_either_library_and_any_precision_and_are_not_touched(make):
    (fit, labels), choice, (test, _) = blobs(30, 8), blobs(20, 8, seed=2), blobs(10, 8, seed=5)
    given = [make(part.astype(np.float64)) for part in (fit, test, choice[0])]
    before = [np.asarray(part).copy() for part in given]
    for array in given:
        if isinstance(array, np.ndarray):
            array.flags.writeable = False  # as one that is mapped from a file
    wanted = make(labels)
    ours = (
        probe.ridge(given[0], wanted, given[1], 4),
        probe.nearest(given[0], wanted, given[1], 4, neighbors=[3])[3],
        logistic(given[0], wanted, given[1], 4, strengths=[0.1, 1.0], choice=(given[2], choice[1])).scores,
    )
    theirs = (
        probe.ridge(fit, labels, test, 4),
        probe.nearest(fit, labels, test, 4, neighbors=[3])[3],
        logistic(fit, labels, test, 4, strengths=[0.1, 1.0], choice=choice).scores,
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)
    assert all(np.array_equal(array, old) for array, old in zip(given, before, strict=True))
