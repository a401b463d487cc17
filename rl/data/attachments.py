"""What a row holds beside text, such as images: from its places in the messages to its token ids.

A row of text holds nothing, so `Attachments` leaves everything as it is. extras/images has what stands for images.
"""

from collections.abc import Mapping
from typing import Any

from extras import images

read_attachments, check_attachments, refuse_attachments = images.read, images.check_pixels, images.refuse


class Attachments:
    """What a row holds beside text, in the order of its places in the messages. Here nothing, so nothing is changed."""

    chat_template: str | None = None  # in the place of the tokenizer's

    def in_messages(self, messages: list[dict]) -> list[dict]:
        """Messages as the chat template wants them."""
        return messages

    def without_places(self, text: str) -> str:
        """A text of a message, without what marks a place in it."""
        return text

    def in_text(self, text: str) -> str:
        """What the chat template has written, with all that is to be tokenized."""
        return text

    def in_ids(self, ids: list[int], mask: list[int] | None = None) -> tuple[list[int], list[int] | None]:
        """Token ids and their loss mask, with those of the attachments in their places."""
        return ids, mask


def attachments_of(tokenizer: Any, row: Mapping[str, Any]) -> Attachments:
    """The attachments of a row. Raises ValueError, naming the row, if the tokenizer's model cannot read them."""
    return images.of_row(tokenizer, row) or Attachments()
