"""mpp/probe.py against timm and scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from mpp import data, model, probe, sources
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


@pytest.mark.parametrize("rows", [12, 60])  # fewer and more than features
def test_few_shot_is_ridge_regression_on_standardised_features(rows):
    rng = np.random.default_rng(1)
    centers = rng.normal(size=(4, 20))
    labels, tested = np.arange(rows) % 4, np.arange(200) % 4
    fit = centers[labels] + rng.normal(size=(rows, 20)) * 1.5
    test = centers[tested] + rng.normal(size=(200, 20)) * 1.5
    found = probe.few_shot_accuracy((fit.astype(np.float32), labels), (test.astype(np.float32), tested), 4, 30.0)
    mean, spread = fit.mean(0), fit.std(0) + 1e-5
    x = np.hstack([(fit - mean) / spread, np.full((rows, 1), 100.0)])
    model = Ridge(alpha=30.0, fit_intercept=False).fit(x, np.where(np.eye(4)[labels] == 1, 1, -1))
    guessed = model.predict(np.hstack([(test - mean) / spread, np.full((200, 1), 100.0)])).argmax(1)
    assert found == (guessed == tested).mean() > 0.3


def test_features_of_a_whole_model_are_what_its_last_layer_reads():
    torch.manual_seed(0)
    shape = {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    encoder = build_encoder("vit_tiny_patch16_224", image_size=16, **shape).eval()
    images = torch.randn(3, 3, 16, 16)
    classifier = model.Classifier(encoder, 5).eval()
    torch.nn.init.normal_(classifier.head.weight)
    read = model.represent(classifier, images)
    torch.testing.assert_close(classifier.head(read), classifier(images))
    assert torch.equal(model.represent(encoder, images), encoder.forward_features(images)[:, 0])
    masked = model.MaskedPatchModel(encoder, 512)
    assert torch.equal(model.represent(masked, images), encoder.forward_features(images)[:, 1:].mean(1))
