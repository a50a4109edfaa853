"""Entry points that measure what a pre-trained encoder is worth."""
