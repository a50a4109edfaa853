"""What nobody may read: access tokens are taken out of everything that is said or written."""

import os
import re

# Tokens of the Hugging Face Hub, and passwords inside an address.
_TOKEN = re.compile(r"hf_(?:[a-z]+_)?[A-Za-z0-9]{8,}")
_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
_SHORTEST = 6  # a shorter value would take words out of sentences


def hide(text: str) -> str:
    """The text with `…` in place of every access token and of every password in an address."""
    for name in _VARIABLES:
        value = os.environ.get(name, "").strip()
        if len(value) >= _SHORTEST:
            text = text.replace(value, "…")
    return _PASSWORD.sub(r"\1…@", _TOKEN.sub("hf_…", text))


def holds_one(text: str) -> bool:
    """Whether a text has anything in it that `hide` would take out."""
    return hide(text) != text
