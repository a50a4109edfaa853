"""mpp/probe.py against timm and scikit-learn."""

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from mpp import data, probe, sources
from mpp.encoders import build_encoder


def test_features_are_the_mean_of_the_patch_tokens_and_never_change():
    torch.manual_seed(0)
    encoder = build_encoder(
        "vit_tiny_patch16_224", image_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=3, dropout=0.5
    )
    encoder.train()  # dropout must not reach the features
    images = np.random.default_rng(0).integers(0, 256, (7, 16, 16, 3), dtype=np.uint8)
    source, rows = sources.Pictures(images, None, None), np.array([5, 0, 6, 1, 2])
    found = probe.patch_means(encoder, source, rows, data.View(16), (0.5,) * 3, (0.25,) * 3, micro_batch=2)
    pixels = torch.from_numpy(((images[rows] / 255 - 0.5) / 0.25).transpose(0, 3, 1, 2)).float()
    tokens = encoder.eval().forward_features(pixels)
    assert np.allclose(found, tokens[:, 1:].mean(1).detach().numpy(), atol=1e-5)
    assert np.array_equal(
        found, probe.patch_means(encoder, source, rows, data.View(16), (0.5,) * 3, (0.25,) * 3, micro_batch=2)
    )


def test_the_classifier_is_scikit_learns_with_the_strength_chosen_on_held_out_rows():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(3, 6))
    labels = np.arange(150) % 3
    features = centers[labels] * 2.0 + rng.normal(size=(150, 6)) * 3.0 + 7.0
    parts = [slice(0, 60), slice(60, 90), slice(90, 150)]
    fit, choice, test = ((features[part], labels[part]) for part in parts)

    def accuracy(strength, train, score):
        mean, std = train[0].mean(0), train[0].std(0)
        model = LogisticRegression(C=strength, max_iter=300).fit((train[0] - mean) / std, train[1])
        return model.score((score[0] - mean) / std, score[1])

    best = max(probe.STRENGTHS, key=lambda strength: accuracy(strength, fit, choice))
    both = (features[:90], labels[:90])
    assert probe.linear_accuracy(fit, choice, test) == accuracy(best, both, test) > 0.4


def test_raw_pixels_are_the_evaluation_pixels():
    source = sources.open_source("synthetic:4", "train")
    found = probe.pixels(source, np.array([2, 0]), data.View(16))
    assert np.array_equal(found[0], data.whole_image(source.picture(2), 16)) and found.shape == (2, 16, 16, 3)
