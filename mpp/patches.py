"""Grid arithmetic: from an image to its patches, in raster order."""

from einops import rearrange
from torch import Tensor

from mpp.errors import UserError


def grid_size(image_size: int, patch_size: int) -> tuple[int, int]:
    """Rows and columns of patches in a square image.

    Args:
        image_size: side in pixels.
        patch_size: side in pixels.

    Raises:
        UserError: the patch does not divide the image; border pixels would be dropped unseen.
    """
    side, border = divmod(image_size, patch_size)
    if border or side == 0:
        nearest = " or ".join(str(n * patch_size) for n in (side, side + 1) if n > 0)
        raise UserError(
            f"data.image_size={image_size} is not a multiple of the patch size {patch_size} "
            f"({border} border pixels would be dropped); use {nearest}"
        )
    return side, side


def cut(images: Tensor, patch_size: int) -> Tensor:
    """Patches of an image, [batch, height, width, channel] -> [batch, patch, row, column, channel]."""
    return rearrange(images, "b (h p) (w q) c -> b (h w) p q c", p=patch_size, q=patch_size)
