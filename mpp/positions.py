"""Position embeddings beside timm's learned table: 2-D, sine and cosine, relative, and in every layer.

Source: ViT paper, appendix D.4; the fixed table from "Better plain ViT baselines" (2205.01580).
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from timm.layers import Attention, resample_abs_pos_embed
from timm.models.vision_transformer import Block
from torch import Tensor, nn

STANDARD_DEVIATION = 0.02  # of every learned position embedding at the start, as in the paper's code


class Positions(nn.Module):
    """Learned embeddings of the places of a sequence, which it adds to tokens.

    1-D: one vector for each place. 2-D: one of half the width for each row and one for each column of the
    grid, side by side. The class token has a vector of its own in both.

    Args:
        grid: rows and columns of patches.
        prefix: tokens before the patches.
        width: of the tokens, even for 2-D.
        two_dimensional: which of the two.
        dropout: after the sum.
    """

    def __init__(
        self, grid: tuple[int, int], prefix: int, width: int, two_dimensional: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        rows, columns = grid
        self.two_dimensional = two_dimensional
        self.prefix = _learned(1, prefix, width)
        if two_dimensional:
            self.rows, self.columns = _learned(1, rows, width // 2), _learned(1, columns, width // 2)
        else:
            self.patches = _learned(1, rows * columns, width)
        self.dropout = nn.Dropout(dropout)

    def table(self) -> Tensor:
        """All embeddings, [1, prefix + patch, width]."""
        if not self.two_dimensional:
            return torch.cat([self.prefix, self.patches], dim=1)
        rows = repeat(self.rows, "1 h d -> 1 (h w) d", w=self.columns.shape[1])
        columns = repeat(self.columns, "1 w d -> 1 (h w) d", h=self.rows.shape[1])
        return torch.cat([self.prefix, torch.cat([rows, columns], dim=-1)], dim=1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(tokens + self.table())


def _learned(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape).normal_(std=STANDARD_DEVIATION))


class PositionedBlock(Block):
    """timm's block, with position embeddings added to what enters it where it was given some."""

    def use(self, positions: Positions, *, own: bool) -> None:
        """Takes embeddings: its own, or ones that the encoder holds for several blocks."""
        if own:
            self.positions = positions
        self._entered_by = [positions]  # in a list, a module is not this one's part

    def forward(self, x: Tensor, *arguments: Any, **more: Any) -> Tensor:
        for positions in getattr(self, "_entered_by", ()):
            x = positions(x)
        return super().forward(x, *arguments, **more)


class RelativeAttention(Attention):
    """timm's attention with an embedding of every offset between query and key.

    The embedding serves as a second key: query . embedding(place of query - place of key) is added to query .
    key before the softmax. Places count along the sequence, the class token first (1-D relative attention); the
    embeddings are a layer's own and common to its heads.

    Source: ViT paper, D.4, "relative positional embeddings".
    """

    def use(self, tokens: int) -> None:
        """Makes the embeddings for sequences of so many tokens."""
        self.relative = _learned(2 * tokens - 1, self.head_dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        assert attn_mask is None and not is_causal
        query, key, value = rearrange(
            self.qkv(x), "b t (three head d) -> three b head t d", three=3, head=self.num_heads
        )
        place = torch.arange(x.shape[1], device=x.device)
        offsets = place[:, None] - place[None, :] + x.shape[1] - 1
        bias = torch.einsum("bhqd,qkd->bhqk", query, self.relative[offsets].to(query.dtype)) * self.scale
        dropout = self.attn_drop.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
        return self.proj_drop(self.proj(rearrange(mixed, "b head t d -> b t (head d)")))


def sincos_table(grid: tuple[int, int], width: int) -> Tensor:
    """Fixed 2-D position embeddings, float32 [1, patch, width]: sin x, cos x, sin y, cos y, a quarter each.

    Source: "Better plain ViT baselines for ImageNet-1k" (2205.01580), its code.
    """
    y, x = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    frequency = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4 - 1))
    y, x = y.flatten()[:, None] * frequency, x.flatten()[:, None] * frequency
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()[None]


def resize_table(embedding: Tensor, prefix: int, grid: tuple[int, int], way: str = "bilinear_corners") -> Tensor:
    """Position embeddings for another grid; the entries of class tokens are kept.

    Args:
        embedding: [1, prefix + old patches, width], the old grid a square.
        prefix: entries that belong to no patch.
        grid: new rows and columns.
        way: bilinear_corners: linear in both directions with corner on corner, as the paper's code
            (`scipy.ndimage.zoom(order=1)`); bilinear or bicubic, anti-aliased, as timm.

    Returns:
        [1, prefix + rows * columns, width].

    Source: ViT paper, section 3.2.
    """
    tokens, patches = embedding[:, :prefix], embedding[:, prefix:]
    side = round(patches.shape[1] ** 0.5)
    if (side, side) == tuple(grid):
        return embedding
    if way != "bilinear_corners":
        return resample_abs_pos_embed(
            embedding, new_size=list(grid), old_size=[side, side], num_prefix_tokens=prefix, interpolation=way
        )
    square = rearrange(patches, "1 (h w) d -> 1 d h w", h=side)
    resized = F.interpolate(square.float(), size=grid, mode="bilinear", align_corners=True).to(embedding.dtype)
    return torch.cat([tokens, rearrange(resized, "1 d h w -> 1 (h w) d")], dim=1)


def resize_line(embedding: Tensor, count: int) -> Tensor:
    """Embeddings of rows or columns, [1, place, width], for another number of them; linear, end on end."""
    line = rearrange(embedding.float(), "1 n d -> 1 d n")
    resized = F.interpolate(line, size=count, mode="linear", align_corners=True)
    return rearrange(resized, "1 d n -> 1 n d").to(embedding.dtype)
