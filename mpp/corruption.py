"""The corruption of masked patch prediction: which patches, what happens to them, and doing it.

ViT paper, appendix B.1.2: half of the patch embeddings are corrupted; of these 80 % take a learnable
[mask] embedding, 10 % the embedding of a random other patch, and 10 % stay as they are.
"""

import numpy as np
import torch
from torch import Tensor

from mpp import draws
from mpp.errors import UserError

MASK, RANDOM, KEEP = 0, 1, 2
ACTIONS = {"masked": MASK, "random": RANDOM, "kept": KEEP}
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1  # ViT paper, B.1.2

Plan = dict[str, np.ndarray]


def corrupted_count(patch_count: int, corruption: float) -> int:
    """K, the number of corrupted patches in every image: round(corruption * patch_count).

    Raises:
        UserError: no patch would be corrupted, or there is no other patch to take an embedding from.
    """
    count = round(corruption * patch_count)
    if count < 1 or patch_count < 2:
        raise UserError(
            f"objective.corruption={corruption} of {patch_count} patches corrupts {count}: "
            "raise it, or use a larger image or smaller patches"
        )
    return count


def plan(
    seed: int,
    epoch: int,
    index: int,
    patch_count: int,
    corruption: float,
    purpose: str = "corruption",
) -> Plan:
    """The corruption of one image: a pure function of its arguments.

    Each position draws its own action, as BERT does for each token; a donor is another position of
    the same image, so that a sample does not depend on the batch it is in.

    Returns:
        positions: int64 [K], the corrupted patches, distinct and ascending.
        actions: int64 [K], MASK, RANDOM or KEEP.
        donors: int64 [K], the patch whose embedding a RANDOM position takes; never the position itself.

    Source: ViT paper, B.1.2; the exact count, own draw and same-image donor are this project's choice.
    """
    count = corrupted_count(patch_count, corruption)
    raw = draws.words(seed, purpose, epoch, index, patch_count + 2 * count)
    keys, action_words, donor_words = np.split(raw, [patch_count, patch_count + count])
    positions = np.sort(np.argsort(keys, kind="stable")[:count])
    share = draws.uniforms(action_words)
    actions = np.select([share < MASK_SHARE, share < MASK_SHARE + RANDOM_SHARE], [MASK, RANDOM], KEEP)
    donors = draws.below(donor_words, patch_count - 1)
    donors += donors >= positions
    return {"positions": positions, "actions": actions.astype(np.int64), "donors": donors}


def corrupt(tokens: Tensor, mask_embedding: Tensor, positions: Tensor, actions: Tensor, donors: Tensor) -> Tensor:
    """Patch embeddings with the plan carried out; untouched ones are the same bits.

    Args:
        tokens: [batch, patch, width], before position embeddings are added (B.1.2).
        mask_embedding: [width].
        positions, actions, donors: int64 [batch, corrupted].

    Returns:
        [batch, patch, width]; donors give their own uncorrupted embedding, with gradient.
    """
    own, other = take(tokens, positions), take(tokens, donors)
    action = actions[..., None]
    new = torch.where(action == RANDOM, other, own)
    new = torch.where(action == MASK, mask_embedding.to(tokens.dtype), new)
    return tokens.scatter(1, positions[..., None].expand_as(new), new)


def take(tokens: Tensor, positions: Tensor) -> Tensor:
    """Tokens at given positions, [batch, patch, ...] and [batch, corrupted] -> [batch, corrupted, ...]."""
    index = positions.reshape(*positions.shape, *[1] * (tokens.dim() - 2))
    return tokens.gather(1, index.expand(-1, -1, *tokens.shape[2:]))
