"""Texts that go on after other texts: a response after its prompt, an answer after a turn of the policy."""

import functools

from transformers import PreTrainedTokenizerBase


def encode_behind(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Token ids of `text` where it goes on after `before`. If it was encoded by itself, a SentencePiece tokenizer
    (Llama 2) would put a space of its own in front.
    """

    def encode(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    ids = encode(text)
    token = (tokenizer.convert_ids_to_tokens(ids[:1]) or [""])[0]
    if before and (token.startswith("▁") or token.startswith("Ġ") and not text.startswith(" ")):
        for start in (before, "\n"):  # unless `text` merges with what it follows
            head, whole = encode(start), encode(start + text)
            if whole[: len(head)] == head:
                return whole[len(head) :]
    return ids


def without_control_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text, with an invisible U+2060 (word joiner) inside all that spells a special token, such as `<|im_end|>`. A
    policy can write such text with ordinary tokens. It could end its turn and add one that praises it.
    """
    for token in _control_tokens(tokenizer):
        text = text.replace(token, f"{token[0]}\u2060{token[1:]}")
    return text


@functools.lru_cache(maxsize=8)
def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The special tokens of more than one character, which take longer to list than a short text to search."""
    added = tokenizer.added_tokens_decoder.values()
    return [token.content for token in added if token.special and len(token.content) > 1]
