"""mpp/credentials.py: nothing secret is left in a text, and nothing else is taken out."""

import pytest

from mpp import credentials


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("token hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345 was refused", "token hf_… was refused"),
        ("hf_oauth_AbCdEfGhIjKl", "hf_…"),
        ("https://me:pass-word@hub.example/api", "https://me:…@hub.example/api"),
        ("key=hf_AbCdEfGhIjKl;x", "key=hf_…;x"),
    ],
)
def test_tokens_and_passwords_are_hidden(text, shown):
    assert credentials.hide(text) == shown
    assert credentials.holds_one(text)


@pytest.mark.parametrize("text", ["hf-hub:org/name", "hf_hub_id", "https://hub.example:8080/a@b", "data.source=demo"])
def test_other_words_stay(text):
    assert credentials.hide(text) == text and not credentials.holds_one(text)


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"])
def test_whatever_the_environment_holds_is_hidden(name, monkeypatch):
    monkeypatch.setenv(name, " 0123456789abcdef\n")
    assert credentials.hide("wandb: 0123456789abcdef!") == "wandb: …!"
    monkeypatch.setenv(name, "a")
    assert credentials.hide("a word") == "a word"
