"""Classifiers on frozen features: regularised least squares, nearest neighbours, logistic regression.

Arrays in, scores out. What makes features is in `mpp/features.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot

from mpp.errors import UserError

Labelled = tuple[np.ndarray, np.ndarray]  # features [row, width], and labels [row]

_CONSTANT = 100.0  # a feature that is hardly regularised, in place of a bias
_PAIRS = 2**25  # similarities that are held at a time
_GRAIN = 2.0**40  # similarities closer than its inverse are equal
_CHUNK = 2**14  # rows that are scored at a time
_ITERATIONS = 5000


def accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of rows whose label has the highest score, of scores [row, class] and labels [row]."""
    return float((scores.argmax(1) == np.asarray(labels)).mean())


def ridge(
    fit: np.ndarray,
    labels: np.ndarray,
    test: np.ndarray,
    classes: int,
    *,
    form: Literal["whitened", "plain"] = "whitened",
    strength: float = 1024.0,
) -> np.ndarray:
    """Scores by regularised least squares from features to -1 and 1, in closed form.

    Args:
        fit, test: float [row, width].
        labels: int [row], of `fit`.
        form: whitened: features standardised by those of `fit`, and a constant of 100, as Google's code does. plain:
            features as they are, the paper's sentence alone.
        strength: of the regularisation.

    Returns:
        float64 [row of `test`, class].

    Source: ViT paper, section 4.1; whitened from big_vision's `fewshot_lsr`.
    """
    x, tested = np.asarray(fit, dtype=np.float64), np.asarray(test, dtype=np.float64)
    if form == "whitened":
        mean, spread = x.mean(0), x.std(0) + 1e-5
        x, tested = (
            np.pad((rows - mean) / spread, ((0, 0), (0, 1)), constant_values=_CONSTANT) for rows in (x, tested)
        )
    y = 2.0 * np.eye(classes)[np.asarray(labels)] - 1.0
    if len(x) >= x.shape[1]:
        weights = np.linalg.solve(x.T @ x + strength * np.eye(x.shape[1]), x.T @ y)
    else:
        weights = x.T @ np.linalg.solve(x @ x.T + strength * np.eye(len(x)), y)
    return tested @ weights


def nearest(
    fit: np.ndarray,
    labels: np.ndarray,
    test: np.ndarray,
    classes: int,
    *,
    neighbors: Sequence[int],
    temperature: float = 0.07,
    device: torch.device | str = "cpu",
) -> dict[int, np.ndarray]:
    """Scores by votes of the rows with the highest cosine similarity, each weighing exp(similarity / temperature).

    Of rows that are equally similar, those that come first in `fit` are nearer.

    Args:
        fit, test: float [row, width].
        labels: int [row], of `fit`.
        neighbors: how many rows vote; each number gives scores of its own.

    Returns:
        By number of neighbours, float64 [row of `test`, class]; those of a row sum to 1.

    Raises:
        UserError: there are fewer rows than neighbours.

    Source: Wu et al. 2018 (arXiv 1805.01978), section 3.4; DINO (arXiv 2104.14294), appendix F.1.
    """
    most = max(neighbors)
    if most > len(fit):
        raise UserError(
            f"probe.neighbors: {most} neighbours are asked for among {len(fit)} images; use at most that many"
        )
    known = normalize(torch.tensor(np.asarray(fit), dtype=torch.float64, device=device))
    targets = _targets(labels, device)
    found: dict[int, list[Tensor]] = {count: [] for count in neighbors}
    size = max(_PAIRS // len(fit), 1)
    for start in range(0, len(test), size):
        chunk = torch.tensor(np.asarray(test[start : start + size]), dtype=torch.float64, device=device)
        # Equal rows are equally similar only up to the order in which a product sums, which depends on their place.
        similarity = (normalize(chunk) @ known.T).mul_(_GRAIN).round_()
        rows = _highest(similarity, most)
        values, order = similarity.gather(1, rows).sort(stable=True, dim=1, descending=True)
        rows = rows.gather(1, order)
        for count in found:
            weights = (values[:, :count] / _GRAIN / temperature).softmax(1)
            scores = weights.new_zeros(len(chunk), classes).scatter_add_(1, targets[rows[:, :count]], weights)
            found[count].append(scores.cpu())
    return {count: torch.cat(parts).numpy() for count, parts in found.items()}


def _highest(values: Tensor, count: int) -> Tensor:
    """Places of the highest values of each row, rising, int64 [row, count]; of equal ones the first."""
    top, places = values.topk(count)
    least = top[:, -1:]
    tied = ((values >= least).sum(1) > count).nonzero()[:, 0]  # of several sets, topk takes any
    above, equal = values[tied] > least[tied], values[tied] == least[tied]
    chosen = above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))
    places[tied] = chosen.nonzero()[:, 1].view(-1, count)
    return places.sort(1).values


@dataclass(frozen=True)
class Logistic:
    """What logistic regression found.

    Attributes:
        scores: logits of the test rows, float64 [row, class].
        strength: that was chosen.
        tried: accuracy on the held-out rows by strength; empty where there were none.
        at_edge: whether the chosen strength is the least or greatest of several, so that others may be better.
        converged: whether every fit reached its optimum.
    """

    scores: np.ndarray
    strength: float
    tried: dict[float, float]
    at_edge: bool
    converged: bool


def logistic(
    fit: np.ndarray,
    labels: np.ndarray,
    test: np.ndarray,
    classes: int,
    *,
    strengths: Sequence[float],
    choice: Labelled | None = None,
    tolerance: float = 1e-5,
    device: torch.device | str = "cpu",
) -> Logistic:
    """Multinomial logistic regression on standardised features.

    What is least is strength * (sum of the losses) + |weights|^2 / 2, with a free bias; scikit-learn's C. With
    `choice`, the strength is the one of the highest accuracy there (then of the lowest loss, then the least), and
    the classifier is fitted on `fit` and `choice` together. Without, it is the middle one.

    Args:
        fit, test: float [row, width].
        labels: int [row], of `fit`.
        strengths: to choose from.
        choice: features [row, width] and labels [row] that are held out; no row is as None.
        tolerance: at the optimum no derivative of the mean loss and penalty is larger, or no step gains more than
            1e-4 of it.
    """
    strengths = sorted(strengths)
    best, tried, converged = strengths[len(strengths) // 2], dict[float, float](), True
    if choice is not None and len(choice[1]):
        best, tried, converged = _choose((fit, labels), choice, classes, strengths, tolerance, device)
        fit, labels = (np.concatenate(pair) for pair in ((fit, choice[0]), (labels, choice[1])))
    standardised = _standardisation(fit, device)
    weights, final = _optimum(standardised(fit), _targets(labels, device), classes, best, tolerance, None)
    scores = [_logits(standardised(test[start : start + _CHUNK]), weights) for start in range(0, len(test), _CHUNK)]
    at_edge = bool(tried) and len(strengths) > 1 and best in (strengths[0], strengths[-1])
    return Logistic(torch.cat(scores).cpu().numpy(), best, tried, at_edge, converged and final)


def _choose(
    fit: Labelled,
    choice: Labelled,
    classes: int,
    strengths: Sequence[float],
    tolerance: float,
    device: torch.device | str,
) -> tuple[float, dict[float, float], bool]:
    """The best of rising strengths on held-out rows, the accuracy of each, and whether all fits converged."""
    standardised = _standardisation(fit[0], device)
    x, y = standardised(fit[0]), _targets(fit[1], device)
    held_out, wanted = standardised(choice[0]), _targets(choice[1], device)
    tried: dict[float, float] = {}
    losses: dict[float, float] = {}
    converged, weights = True, None
    for strength in strengths:
        weights, reached = _optimum(x, y, classes, strength, tolerance, weights)
        logits = _logits(held_out, weights)
        tried[strength] = float((logits.argmax(1) == wanted).double().mean())
        losses[strength] = float(cross_entropy(logits, wanted))
        converged &= reached
    return min(strengths, key=lambda strength: (-tried[strength], losses[strength], strength)), tried, converged


def _targets(labels: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.tensor(np.asarray(labels), dtype=torch.int64, device=device)


def _standardisation(fit: np.ndarray, device: torch.device | str) -> Callable[[np.ndarray], Tensor]:
    """From features to float64 [row, axis] on the device, standardised by those of `fit`.

    Where `fit` has fewer rows than features, axes are turned to the few that its rows span: no other can have a
    weight, and what is least stays so.
    """
    from sklearn.preprocessing import StandardScaler  # here, for it takes a second that others need not wait

    scaler = StandardScaler()
    for start in range(0, len(fit), _CHUNK):
        scaler.partial_fit(np.asarray(fit[start : start + _CHUNK], dtype=np.float64))
    mean, spread = (torch.tensor(part, device=device) for part in (scaler.mean_, scaler.scale_))

    def standardised(features: np.ndarray) -> Tensor:
        return torch.tensor(np.asarray(features), dtype=torch.float64, device=device).sub_(mean).div_(spread)

    if len(fit) >= fit.shape[1]:
        return standardised
    axes = torch.linalg.qr(standardised(fit).T).Q
    return lambda features: standardised(features) @ axes


def _optimum(
    features: Tensor, labels: Tensor, classes: int, strength: float, tolerance: float, start: Tensor | None
) -> tuple[Tensor, bool]:
    """Weights and, below them, biases, float64 [axis + 1, class]; and whether they are the optimum."""
    penalty = 1 / (strength * len(features))

    def objective(vector: np.ndarray) -> tuple[float, np.ndarray]:
        """Mean loss and penalty, which have the least place of the sum, and their gradient."""
        weights = torch.tensor(vector, device=features.device).view(-1, classes)
        total, gradient = weights.new_zeros(()), torch.zeros_like(weights)
        for x, y in zip(features.split(_CHUNK), labels.split(_CHUNK), strict=True):
            logits = _logits(x, weights)
            total += cross_entropy(logits, y, reduction="sum")
            error = logits.softmax(1) - one_hot(y, classes)
            gradient[:-1] += x.T @ error
            gradient[-1] += error.sum(0)
        total, gradient = total / len(features), gradient / len(features)
        total += penalty / 2 * weights[:-1].square().sum()
        gradient[:-1] += penalty * weights[:-1]
        return total.item(), gradient.flatten().cpu().numpy()

    if start is None:
        start = features.new_zeros(features.shape[1] + 1, classes)
    options = {"maxiter": _ITERATIONS, "maxfun": 2 * _ITERATIONS, "gtol": tolerance, "ftol": 1e-4 * tolerance}
    with threadpool_limits(1, "blas"):  # SciPy's threads and torch's would wait for each other at every step
        found = minimize(objective, start.flatten().cpu().numpy(), jac=True, method="L-BFGS-B", options=options)
    return torch.tensor(found.x, device=features.device).view(-1, classes), bool(found.success)


def _logits(features: Tensor, weights: Tensor) -> Tensor:
    return torch.addmm(weights[-1], features, weights[:-1])
