"""mpp/patches.py against slicing by hand."""

import pytest
import torch

from mpp.errors import UserError
from mpp.patches import cut, grid_size


def test_cut_is_raster_order():
    images = torch.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    patches = cut(images, 2)
    assert patches.shape == (2, 6, 2, 2, 3)
    assert torch.equal(patches[1, 4], images[1, 2:4, 2:4])  # second row of patches, second column


@pytest.mark.parametrize(("image", "patch", "side"), [(224, 16, 14), (224, 14, 16), (384, 32, 12), (32, 32, 1)])
def test_grid(image, patch, side):
    assert grid_size(image, patch) == (side, side)


@pytest.mark.parametrize(
    ("image", "patch", "words"),
    [
        (
            220,
            16,
            "data.image_size=220 is not a multiple of the patch size 16 (12 border pixels would be dropped); use 208 or 224",
        ),
        (384, 14, "use 378 or 392"),
        (8, 16, "use 16"),
    ],
)
def test_border_is_refused_with_the_nearest_sizes(image, patch, words):
    with pytest.raises(UserError) as refusal:
        grid_size(image, patch)
    assert words in str(refusal.value)
