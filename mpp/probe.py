"""What frozen features are worth: features once, and a linear classifier on them."""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from timm.models import VisionTransformer

from mpp.data import View, normalize
from mpp.sources import Source

STRENGTHS = (0.001, 0.01, 0.1, 1.0)  # inverse regularisation, chosen on held-out training rows


def pixels(source: Source, rows: Sequence[int] | np.ndarray, view: View) -> np.ndarray:
    """Raw pixels of some rows as evaluation cuts them, uint8 [row, image_size, image_size, 3]."""
    images = np.empty((len(rows), view.image_size, view.image_size, 3), dtype=np.uint8)
    for place, row in enumerate(rows):
        images[place] = view.evaluate(source.picture(int(row)))
    return images


@torch.no_grad()
def patch_means(
    encoder: VisionTransformer,
    source: Source,
    rows: Sequence[int] | np.ndarray,
    view: View,
    mean: Sequence[float],
    std: Sequence[float],
    micro_batch: int = 256,
) -> np.ndarray:
    """Mean of an image's patch tokens after the final norm, the features by which MPP is probed.

    Returns:
        float32 [row, width].
    """
    encoder.eval()
    device = next(encoder.parameters()).device
    found = [np.empty((0, encoder.embed_dim), dtype=np.float32)]
    for start in range(0, len(rows), micro_batch):
        batch = torch.from_numpy(pixels(source, rows[start : start + micro_batch], view)).to(device)
        tokens = encoder.forward_features(normalize(batch, mean, std))
        found.append(tokens[:, encoder.num_prefix_tokens :].mean(1).float().cpu().numpy())
    return np.concatenate(found)


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
