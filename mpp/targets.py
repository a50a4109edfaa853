"""What a corrupted patch is to be predicted as, from the uint8 pixels that the model will see.

The three kinds of the ViT paper, appendix B.1.2. Colour classes come from integer sums, so that no
device, precision or normalisation can move a patch across the edge of a bin.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from mpp.errors import UserError
from mpp.patches import cut

BITS = 3  # B.1.2: "3-bit, mean color (i.e., 512 colors in total)"
COLORS = 2 ** (3 * BITS)
_BIN_WIDTH = 2 ** (8 - BITS)


def color_bins(images: Tensor, patch_size: int, cells: int = 1) -> Tensor:
    """Mean-colour class of every patch, or of every cell of a patch, exactly.

    Each channel's mean is cut to its top three bits and the three are packed red first:
    class = 64 R + 8 G + B. With S the sum over a cell of n pixels, the level is S // (32 n).

    Args:
        images: uint8 [batch, height, width, channel], augmented, before normalisation.
        patch_size: side in pixels.
        cells: cells along a side of the patch; 4 gives the paper's second target.

    Returns:
        int64 [batch, patch, cells * cells], row-major in grid and cells, values in 0 .. 511.

    Raises:
        TypeError: images are not uint8 (normalised pixels would give wrong classes).
        UserError: the cells do not divide the patch.

    Source: ViT paper, B.1.2, targets 1 and 2.
    """
    levels = _levels(*_channel_sums(images, patch_size, cells))
    return _pack(levels)


def nearest_color_bins(images: Tensor, positions: Tensor, patch_size: int) -> Tensor:
    """A baseline without a network: the mean colour of the nearest uncorrupted patches.

    All uncorrupted patches at the smallest Euclidean distance on the grid count alike. Where every
    patch is corrupted there is none to look at, and the class is 0.

    Args:
        images: uint8 [batch, height, width, channel].
        positions: int64 [batch, corrupted].

    Returns:
        int64 [batch, corrupted], values in 0 .. 511.
    """
    sums, pixels = _channel_sums(images, patch_size, 1)
    sums = sums[:, :, 0]
    columns = images.shape[2] // patch_size
    patch = torch.arange(sums.shape[1], device=images.device)
    row, column = patch // columns, patch % columns
    distance = (row[:, None] - row) ** 2 + (column[:, None] - column) ** 2
    hidden = torch.zeros(sums.shape[:2], dtype=torch.bool, device=images.device)
    hidden = hidden.scatter(1, positions, True)
    far = torch.iinfo(distance.dtype).max
    reach = distance[positions].masked_fill(hidden[:, None, :], far)
    nearest = reach.amin(-1, keepdim=True)
    chosen = ((reach == nearest) & (nearest < far)).int()
    # Integers by channel: GPUs lack integer matrix products, and some of them doubles.
    neighbor_sums = torch.stack([(chosen * channel[:, None]).sum(-1) for channel in sums.int().unbind(-1)], dim=-1)
    neighbor_pixels = chosen.sum(-1, keepdim=True).clamp(min=1) * pixels
    return _pack(_levels(neighbor_sums, neighbor_pixels))


def bin_colors(bins: Tensor) -> Tensor:
    """The middle colour of each class, int64 [...] -> uint8 [..., 3]."""
    shifts = torch.tensor([2 * BITS, BITS, 0], device=bins.device)
    levels = (bins[..., None] >> shifts) & (2**BITS - 1)
    return (levels * _BIN_WIDTH + _BIN_WIDTH // 2).to(torch.uint8)


def patch_pixels(images: Tensor, patch_size: int) -> Tensor:
    """Pixels of every patch in [-1, 1], uint8 [batch, height, width, 3] -> float32 [batch, patch, p * p * 3].

    Source: ViT paper, B.1.2, target 3; no normalisation within the patch.
    """
    _require_uint8(images)
    return rearrange(cut(images, patch_size), "b n p q c -> b n (p q c)").float() / 127.5 - 1.0


def _require_uint8(images: Tensor) -> None:
    if images.dtype != torch.uint8:
        raise TypeError(f"targets need the uint8 pixels before normalisation, not {images.dtype}")


def _channel_sums(images: Tensor, patch_size: int, cells: int) -> tuple[Tensor, int]:
    """Sum of each channel over each cell, int64 [batch, patch, cell, channel], and pixels in a cell."""
    _require_uint8(images)
    if patch_size % cells:
        raise UserError(
            f"objective.target=colors_4x4 needs a patch size that {cells} divides, not {patch_size}: "
            "use mean_color or pixels, or another patch size"
        )
    cell = patch_size // cells
    pixels = rearrange(cut(images, patch_size), "b n (u p) (v q) c -> b n (u v) (p q) c", p=cell, q=cell)
    return pixels.sum(dim=3, dtype=torch.int64), cell * cell


def _levels(sums: Tensor, pixels: int | Tensor) -> Tensor:
    return sums // (_BIN_WIDTH * pixels)


def _pack(levels: Tensor) -> Tensor:
    red, green, blue = levels.unbind(-1)
    return (red << 2 * BITS) | (green << BITS) | blue


@dataclass(frozen=True)
class Target:
    """A kind of target: what it is, how many outputs predict it, and what a prediction costs.

    Attributes:
        of_patches: (uint8 images [batch, height, width, channel], patch size) -> [batch, patch, ...].
        outputs: (patch size) -> outputs of the head for one patch.
        cost: (prediction [batch, corrupted, outputs], target [batch, corrupted, ...]) -> [batch, corrupted],
            in float32.
        decide: (prediction) -> the most likely target, in the target's own form.
        paint: (target [batch, corrupted, ...], patch size) -> uint8 [batch, corrupted, row, column, 3].
        colors: whether the target is a colour class, so that accuracy and entropy mean something.
    """

    of_patches: Callable[[Tensor, int], Tensor]
    outputs: Callable[[int], int]
    cost: Callable[[Tensor, Tensor], Tensor]
    decide: Callable[[Tensor], Tensor]
    paint: Callable[[Tensor, int], Tensor]
    colors: bool


def color_logits(prediction: Tensor) -> Tensor:
    """Logits of each cell, [batch, corrupted, cells * 512] -> [batch, corrupted, cell, 512], float32."""
    return rearrange(prediction.float(), "b k (cell color) -> b k cell color", color=COLORS)


def _color_cost(prediction: Tensor, target: Tensor) -> Tensor:
    logits = color_logits(prediction)
    cost = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none")
    return cost.view_as(target).mean(-1)


def _pixel_cost(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction.float() - target).square().mean(-1)


def _paint_colors(bins: Tensor, patch_size: int) -> Tensor:
    cells = round(bins.shape[-1] ** 0.5)
    colors = rearrange(bin_colors(bins), "b k (u v) c -> b k u v c", u=cells)
    return repeat(colors, "b k u v c -> b k (u p) (v q) c", p=patch_size // cells, q=patch_size // cells)


def _paint_pixels(pixels: Tensor, patch_size: int) -> Tensor:
    square = rearrange(pixels, "b k (p q c) -> b k p q c", p=patch_size, q=patch_size)
    return ((square + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _color_target(cells: int) -> Target:
    return Target(
        of_patches=lambda images, patch_size: color_bins(images, patch_size, cells),
        outputs=lambda patch_size: cells * cells * COLORS,
        cost=_color_cost,
        decide=lambda prediction: color_logits(prediction).argmax(-1),
        paint=_paint_colors,
        colors=True,
    )


TARGETS = {
    "mean_color": _color_target(cells=1),
    "colors_4x4": _color_target(cells=4),
    "pixels": Target(
        of_patches=patch_pixels,
        outputs=lambda patch_size: patch_size * patch_size * 3,
        cost=_pixel_cost,
        decide=lambda prediction: prediction.float(),
        paint=_paint_pixels,
        colors=False,
    ),
}
