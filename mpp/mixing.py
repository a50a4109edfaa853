"""Mixup and CutMix: each image with its neighbour in the stream, and their targets alike.

Places 2j and 2j + 1 of a micro-batch are partners. A micro-batch is an even number of places of the stream
that follow on each other, so that neither its size nor the number of processes changes who is whose partner.
"""

import math

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

from mpp import draws


def draw(seed: int, epoch: int, index: int, *, mixup: float, cutmix: float, image_size: int) -> dict[str, np.ndarray]:
    """How one image is mixed with its partner: a pure function of its arguments.

    The image's own share is drawn from Beta(alpha, alpha); its partner draws another for itself. CutMix takes the
    rest of the area from the partner, as a square around a uniform centre. The borders may cut the square, and the
    share is then the part of the area that truly stays.

    Args:
        mixup, cutmix: their alphas; 0 for none. With both, either at even odds.
        image_size: side in pixels.

    Returns:
        mix_share: float32 [], the image's own share, in [0, 1].
        mix_box: int64 [4], what CutMix takes from the partner: top, left, bottom, right; zeros for nothing.

    Raises:
        ValueError: both alphas are 0.

    Source: Zhang et al. 2018 (arXiv 1710.09412) and Yun et al. 2019 (arXiv 1905.04899), as timm/data/mixup.py.
    """
    if not (mixup > 0 or cutmix > 0):
        raise ValueError(f"mixup={mixup} and cutmix={cutmix} mix nothing; one of them must be positive")
    switch, chance, row, column = draws.uniforms(draws.words(seed, "mixing", epoch, index, 4)).tolist()
    pastes = switch < 0.5 if mixup > 0 and cutmix > 0 else cutmix > 0
    alpha = cutmix if pastes else mixup
    share, box = float(betaincinv(alpha, alpha, chance)), (0, 0, 0, 0)
    if pastes:
        side = int(image_size * math.sqrt(1 - share))
        top, bottom = _span(int(row * image_size), side, image_size)
        left, right = _span(int(column * image_size), side, image_size)
        area = (bottom - top) * (right - left)
        share = 1 - area / image_size**2
        box = (top, left, bottom, right) if area else box
    return {"mix_share": np.array(share, dtype=np.float32), "mix_box": np.array(box, dtype=np.int64)}


def _span(center: int, side: int, limit: int) -> tuple[int, int]:
    """Where a side around a centre begins and ends, within 0 .. limit."""
    return max(center - side // 2, 0), min(center + (side + 1) // 2, limit)


def blend_images(images: Tensor, shares: Tensor, boxes: Tensor) -> Tensor:
    """Images with a part of their partners; one of share 1 keeps its bits.

    Args:
        images: float [batch, channel, height, width].
        shares: float [batch], of the image itself.
        boxes: int64 [batch, 4], as `draw` gives them. Where there is one, the partner is pasted in it and nowhere
            else; else the whole is blended.

    Returns:
        As `images`.

    Raises:
        ValueError: the batch is odd, so that an image has no partner.
    """
    top, left, bottom, right = boxes[:, :, None, None].unbind(1)
    rows = torch.arange(images.shape[2], device=images.device)[:, None]
    columns = torch.arange(images.shape[3], device=images.device)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    kept = torch.where(bottom > top, (~inside).to(images.dtype), shares[:, None, None].to(images.dtype))
    return _blend(images, kept[:, None])


def blend_targets(targets: Tensor, shares: Tensor) -> Tensor:
    """Targets with their partners', by the share of each image; one of share 1 keeps its bits.

    Args:
        targets: float [batch, class].
        shares: float [batch], of the image itself.

    Returns:
        As `targets`.

    Raises:
        ValueError: the batch is odd, so that an image has no partner.
    """
    return _blend(targets, shares[:, None].to(targets.dtype))


def _blend(own: Tensor, share: Tensor) -> Tensor:
    """share * own + (1 - share) * partner."""
    if len(own) % 2:
        raise ValueError(f"a batch of {len(own)} leaves one without a partner; its length must be even")
    partner = own[torch.arange(len(own), device=own.device) ^ 1]
    return torch.where(share == 1, own, share * own + (1 - share) * partner)
