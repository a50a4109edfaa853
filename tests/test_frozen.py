"""mpp/frozen.py: which images are drawn, and figures recomputed from the features themselves."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier

from mpp import data, frozen, sources
from mpp.encoders import build_encoder
from mpp.errors import UserError


def made(labels, classes="abc"):
    return sources.Pictures(np.zeros((len(labels), 8, 8, 3), np.uint8), list(classes), np.array(labels))


def test_every_class_gives_as_many_rows_and_fewer_shots_lie_within_more():
    source = made(np.arange(30) % 3)
    few, more = frozen.shot_rows(source, 5, 2), frozen.shot_rows(source, 5, 7)
    assert np.bincount(source.labels[few]).tolist() == [2, 2, 2] and set(few) < set(more)
    assert list(few) == sorted(few) and set(few) != set(frozen.shot_rows(source, 6, 2))
    # The images that fine-tuning with `per_class` draws by the same seed.
    assert np.array_equal(more, data.labelled_rows(source, 5, 7, 0.0)[0])


def test_classes_with_fewer_images_than_shots_are_named():
    source = made([0, 0, 0, 1, 2, 2])
    with pytest.raises(UserError, match=r"3 images of each class .* fewer of b \(1\), c \(2\); .*--allow-fewer"):
        frozen.shot_rows(source, 0, 3)
    assert frozen.shot_rows(source, 0, 3, allow_fewer=True).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.bincount(source.labels[frozen.shot_rows(source, 0, 2, allow_fewer=True)]).tolist() == [2, 1, 2]


def test_sources_without_one_label_an_image_are_refused():
    several = sources.Pictures(np.zeros((2, 8, 8, 3), np.uint8), ["a", "b"], np.array([[0, 1], [1, -1]]))
    for source in (several, sources.Pictures(np.zeros((2, 8, 8, 3), np.uint8), None, None)):
        with pytest.raises(UserError, match="one label each"):
            frozen.shot_rows(source, 0, 1)


@pytest.fixture
def probes():
    torch.manual_seed(0)
    model = build_encoder("vit_tiny_patch16_224", image_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=3)
    train, test = sources.open_source("synthetic:60", "train"), sources.open_source("synthetic:40", "test")
    found = frozen.Probes(
        train=train,
        test=test,
        test_rows=np.array([3, 5, 9, 14, 20, 21, 33]),
        view=data.View(16),
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        shots=(1, 4),
        seeds=(0, 7),
        form="plain",
        strength=3.0,
        neighbors=(2, 5),
        temperature=0.1,
        kind="patches",
        block=None,
        micro_batch=4,
        workers=0,
    )
    return model, found


def read(model, source, rows):
    pixels = np.stack([data.whole_image(source.picture(int(row)), 16) for row in rows])
    with torch.no_grad():
        tokens = model.eval().forward_features(torch.from_numpy((pixels / 127.5 - 1).transpose(0, 3, 1, 2)).float())
    return tokens[:, 1:].mean(1).numpy().astype(np.float64)


def test_probes_are_means_over_seeds_of_ridge_and_neighbours(probes):
    model, found = probes
    numbers = found.measure(model, Accelerator(cpu=True))
    tested, labels = read(model, found.test, found.test_rows), found.test.labels[found.test_rows]
    expected = {}
    for shots in (1, 4):
        hits = []
        for seed in (0, 7):
            rows = frozen.shot_rows(found.train, seed, shots)
            ridge = Ridge(alpha=3.0, fit_intercept=False)
            ridge.fit(read(model, found.train, rows), 2.0 * np.eye(10)[found.train.labels[rows]] - 1)
            hits.append((ridge.predict(tested).argmax(1) == labels).mean())
        expected[f"probe_{shots}_shot_accuracy"] = np.mean(hits)
    for count in (2, 5):
        hits = []
        for seed in (0, 7):
            rows = frozen.shot_rows(found.train, seed, 4)
            near = KNeighborsClassifier(count, metric="cosine", weights=lambda far: np.exp((1 - far) / 0.1))
            near.fit(read(model, found.train, rows), found.train.labels[rows])
            hits.append((near.predict(tested) == labels).mean())
        expected[f"probe_{count}_nn_accuracy"] = np.mean(hits)
    assert numbers == pytest.approx(expected) and len(set(numbers.values())) > 1


def test_probes_disturb_nothing(probes):
    model, found = probes
    model.train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    found.measure(model, Accelerator(cpu=True))
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_more_neighbours_than_images_are_refused(probes):
    import dataclasses

    with pytest.raises(UserError, match=r"neighbors=\[50\]: 4 images of each class are 40 in all"):
        dataclasses.replace(probes[1], neighbors=(50,))
