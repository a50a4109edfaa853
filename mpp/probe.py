"""What frozen features are worth: features once, and a linear classifier on them."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from mpp.data import HeldOutSamples, View, held_out_batches, normalize
from mpp.encoders import Encoder, mean_feature
from mpp.sources import Source

STRENGTHS = (0.001, 0.01, 0.1, 1.0)  # inverse regularisation, chosen on held-out training rows


def pixels(source: Source, rows: Sequence[int] | np.ndarray, view: View) -> np.ndarray:
    """Raw pixels of some rows as evaluation cuts them, uint8 [row, image_size, image_size, 3]."""
    images = np.empty((len(rows), view.image_size, view.image_size, 3), dtype=np.uint8)
    for place, row in enumerate(rows):
        images[place] = view.evaluate(source.picture(int(row)))
    return images


@torch.no_grad()
def features(
    represent: Callable[[Tensor], Tensor],
    model: nn.Module,
    source: Source,
    rows: Sequence[int] | np.ndarray,
    view: View,
    mean: Sequence[float],
    std: Sequence[float],
    micro_batch: int = 256,
    workers: int = 0,
) -> np.ndarray:
    """What a frozen model makes of some images.

    Args:
        represent: from normalised images, [batch, channel, height, width], to [batch, width].
        model: that it uses; set to evaluation.
        workers: loader processes.

    Returns:
        float32 [row, width].

    Raises:
        ImageError: an image can't be read.
    """
    model.eval()
    device = next(model.parameters()).device

    def of(images: Tensor) -> np.ndarray:
        return represent(normalize(images, mean, std)).float().cpu().numpy()

    if not len(rows):
        return of(torch.zeros(0, view.image_size, view.image_size, 3, dtype=torch.uint8, device=device))
    samples = HeldOutSamples(source, rows, view, _nothing)
    batches = held_out_batches(samples, micro_batch=micro_batch, processes=1, process=0, workers=workers, device=device)
    with closing(batches):
        return np.concatenate([of(batch["images"]) for batch in batches])


def _nothing(_: int, __: int) -> dict[str, np.ndarray]:
    return {}


def patch_means(
    encoder: Encoder,
    source: Source,
    rows: Sequence[int] | np.ndarray,
    view: View,
    mean: Sequence[float],
    std: Sequence[float],
    micro_batch: int = 256,
) -> np.ndarray:
    """Mean of an image's patch tokens (of a ResNet's map) after the final norm, by which MPP is probed.

    Returns:
        float32 [row, width].
    """
    return features(partial(mean_feature, encoder), encoder, source, rows, view, mean, std, micro_batch)


def few_shot_accuracy(
    fit: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], classes: int, strength: float = 1024.0
) -> float:
    """Test accuracy of regularised least squares from frozen features to -1 and 1, in closed form.

    Features are standardised by those of `fit` and get a constant of 100, which is hardly regularised.

    Args:
        fit, test: features [row, feature] and labels [row].
        strength: of the regularisation.

    Source: ViT paper, section 4.1; its details from big_vision's `fewshot_lsr`.
    """
    mean, spread = fit[0].mean(0, dtype=np.float64), fit[0].std(0, dtype=np.float64) + 1e-5

    def features(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([(rows - mean) / spread, np.full((len(rows), 1), 100.0)], axis=1)

    x, y = features(fit[0]), 2.0 * np.eye(classes)[fit[1]] - 1.0
    if len(x) >= x.shape[1]:
        weights = np.linalg.solve(x.T @ x + strength * np.eye(x.shape[1]), x.T @ y)
    else:
        weights = x.T @ np.linalg.solve(x @ x.T + strength * np.eye(len(x)), y)
    return float(((features(test[0]) @ weights).argmax(1) == test[1]).mean())


def linear_accuracy(
    fit: tuple[np.ndarray, np.ndarray], choice: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> float:
    """Test accuracy of logistic regression on standardised features.

    Its strength is chosen on `choice`; it is then fitted on `fit` and `choice` together. Where `choice`
    is empty, the strength is the middle one.

    Args:
        fit, choice, test: features [row, feature] and labels [row].
    """

    def fitted(strength: float, features: np.ndarray, labels: np.ndarray) -> Pipeline:
        # Turning the axes to the principal ones leaves the solution as it is, and has no more axes than rows.
        model = make_pipeline(StandardScaler(), PCA(svd_solver="full"), LogisticRegression(C=strength, max_iter=300))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return model.fit(features, labels)

    best = STRENGTHS[len(STRENGTHS) // 2]
    if len(choice[1]):
        best = max(STRENGTHS, key=lambda strength: fitted(strength, *fit).score(*choice))
    together = (np.concatenate([fit[0], choice[0]]), np.concatenate([fit[1], choice[1]]))
    return float(fitted(best, *together).score(*test))
