"""Confidence intervals for what a few seeds measure on one test split."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from mpp import draws

_WORDS_AT_ONCE = 2**20  # random words held at a time; another number would draw other images


@dataclass(frozen=True)
class Interval:
    """A mean and what it may as well be.

    Attributes:
        estimate: the mean over seeds and images.
        low, high: the ends of its confidence interval.
    """

    estimate: float
    low: float
    high: float


def bootstrap(values: np.ndarray, *, level: float = 0.95, replicates: int = 2000, seed: int = 0) -> Interval:
    """Confidence interval of the mean over both other seeds and other test images, by a two-way bootstrap.

    Every replicate draws seeds and images with replacement, each on their own (Owen 2007). The plain percentiles of
    the crossed bootstrap are far too narrow for 3 or 5 seeds, and count what is peculiar to one image under one seed
    three times. Here the deviation of a replicate is a sum of two parts, each corrected:

    - seeds: the mean of the drawn seed means, smoothed by normal noise of variance s**2 / seeds on every draw, which
      makes up for the resampled variance being too small by (seeds - 1) / seeds and for the few values that a mean of
      so few can take (Silverman and Young 1987; Hesterberg 2004). s is the standard deviation of the seed means.
    - images: the mean of the drawn image means, scaled by sqrt(images / (images - 1)) for the same reason, and so that
      the rest of the two-way analysis of variance (interaction and chance), which the seed means hold too, counts
      once. It is left with the seeds, whose variance, if it were taken out there, would often be cut at 0 (2 seeds
      then cover 86 % at worst). It is taken out here no further than the seeds' part makes up for, so that the
      interval is not narrower than with the images alone.
    - each part is stretched from the normal to Student's quantile of its own degrees of freedom, so that squares of
      half-widths add (Howe 1974). Satterthwaite's common degrees of freedom, which Hesterberg 2015 would put into the
      levels, are estimated from the same few seeds and cover 87 % (2 seeds) and 92 % (3) at worst.

    The ends are the BCa percentiles (Efron 1987) with the skewness of the image means, which matters for an accuracy
    near 1. For normal parts a level of 95 % then covers 95 % or more: at most 97.9 % with 5 seeds, 98.7 % with 3
    and 99.3 % with 2, the most where chance outweighs both seeds and images. Two seeds say so little of their own
    variance that the interval is many times as wide as with 5. Where the effect of seeds is itself skew (an accuracy
    near 1 that varies widely between seeds), 91 to 94 % are covered, as by Student's interval of the seeds alone.

    One seed says nothing of other seeds: the interval is then that of one trained model over other images. Likewise,
    one image says nothing of other images. Where all values are equal, the interval has no width, for there is nothing
    to resample; an accuracy of exactly 1 on n images does not refute one of 1 - 3 / n (the rule of three, at 95 %).

    Args:
        values: float or bool [seed, image]: hits (0 or 1), or differences of two arms' hits, paired on seed and image.
            The interval of hits is cut to [0, 1], and of values that are all -1, 0 or 1 to [-1, 1]. Differences
            that are never negative look like hits.
        level: how often the interval shall hold the truth, in (0, 1).
        replicates: how often to draw; the ends vary by some 3 % of the width between `seed`s with 2000.
        seed: of the drawing.

    Raises:
        ValueError: values are empty, not two-dimensional or not finite; the level is not in (0, 1), or the replicates
            are too few for it.

    Source: Owen 2007 (The pigeonhole bootstrap); Hesterberg 2004 (Unbiasing the bootstrap) and 2015
    (arXiv 1411.5279); Silverman and Young 1987 (The bootstrap: to smooth or not to smooth?); Howe 1974 (Approximate
    confidence limits on the mean of X + Y); Efron 1987 (Better bootstrap confidence intervals).
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"values have shape {values.shape}; they must be [seed, image], with one of each at least")
    if not np.isfinite(values).all():
        raise ValueError("values hold NaN or infinity; every seed must have measured every image")
    if not 0 < level < 1:
        raise ValueError(f"level={level} is not between 0 and 1; 0.95 is usual")
    if replicates * (1 - level) < 2:
        raise ValueError(f"replicates={replicates} are too few for level={level}; take more than {2 / (1 - level):.0f}")
    if values.min() == values.max():
        return Interval(*[float(values[0, 0])] * 3)

    seeds, images = values.shape
    seeds_free, images_free = max(seeds - 1, 1), max(images - 1, 1)  # with one only, its sum of squares is 0
    estimate = values.mean()
    of_seed, of_image = values.mean(axis=1) - estimate, values.mean(axis=0) - estimate
    rest = values - estimate - of_seed[:, None] - of_image
    # Each as a variance of the mean: mean square / (seeds * images).
    by_seeds = np.sum(of_seed**2) / seeds_free / seeds
    by_images = np.sum(of_image**2) / images_free / images
    by_rest = np.sum(rest**2) / (seeds_free * images_free) / values.size

    upper = (1 + level) / 2
    stretch_seeds, stretch_images = stdtrit([seeds_free, images_free], upper) / ndtri(upper)
    own = max(by_images - min(by_rest, stretch_seeds**2 * by_seeds), 0.0)  # of the images' part
    scale = math.sqrt(own / by_images * images / images_free) if by_images > 0 else 0.0
    drawn_seeds, drawn_images = _drawn(of_seed, of_image, math.sqrt(by_seeds), replicates, seed)
    deviations = stretch_seeds * drawn_seeds + stretch_images * scale * drawn_images

    # A mean's acceleration and bias correction are both a sixth of its skewness (Efron 1987).
    skew = np.mean(of_image**3) / images**2 / max(by_seeds + own, by_images) ** 1.5 if by_images > 0 else 0.0
    shifted = skew / 6 + ndtri([1 - upper, upper])
    low, high = estimate + np.quantile(deviations, ndtr(skew / 6 + shifted / (1 - skew / 6 * shifted)))
    if np.isin(values, (-1, 0, 1)).all():
        low, high = max(low, -1.0 if values.min() < 0 else 0.0), min(high, 1.0)
    return Interval(float(estimate), float(low), float(high))


def _drawn(
    of_seed: np.ndarray, of_image: np.ndarray, noise: float, replicates: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Means of seeds and of images that are drawn with replacement, two float arrays [replicate].

    Args:
        of_seed, of_image: what is drawn, [seed] and [image].
        noise: standard deviation of the normal noise on each seed drawn.
    """
    seeds, images = len(of_seed), len(of_image)
    by_seed, by_image = np.empty(replicates), np.empty(replicates)
    words = seeds + images + 1
    step = max(_WORDS_AT_ONCE // words, 1)
    for first in range(0, replicates, step):
        part = slice(first, min(first + step, replicates))
        raw = draws.words(seed, "resampling", 0, first, (part.stop - first) * words).reshape(-1, words)
        by_seed[part] = of_seed[draws.below(raw[:, :seeds], seeds)].mean(axis=1)
        by_image[part] = of_image[draws.below(raw[:, seeds:-1], images)].mean(axis=1)
        # The mean of the noise of every seed drawn, as one number; a chance of 0 would make it infinite.
        by_seed[part] += noise / math.sqrt(seeds) * ndtri(np.maximum(draws.uniforms(raw[:, -1]), 2.0**-53))
    return by_seed, by_image
