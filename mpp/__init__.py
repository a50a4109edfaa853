"""Masked patch prediction for Vision Transformers: objective, loop, recipes and checkpoints."""

__version__ = "0.1.0"
