"""The images of one row: their places in its messages, in the text of the chat template, and in its token ids."""

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from extras.images import FIRST
from extras.images.images import Images, Tokens
from rl.data.attachments import Attachments
from rl.data.rows import Row, named

PLACE = "<image>"  # in the text of a message, as verl has it


class RowImages(Attachments):
    """See `Attachments`. Raises ValueError, naming the row, if its prompt is not a message list, or if the model has no
    processor.
    """

    def __init__(self, images: Images, tokenizer: PreTrainedTokenizerBase, row: Row):
        if isinstance(row.get("prompt"), str):
            raise ValueError(f"{named(row)}: the prompt is a text; rows with images need messages")
        images.load_processor(tokenizer.name_or_path, tokenizer, named(row))
        self.images, self.where, self.numbers = images, named(row), row["images"]
        self.chat_template = images.processor.chat_template

    def in_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose contents are lists of parts where a text has `<image>`, as chat templates want them: texts,
        and images in these places.
        """
        return [message | {"content": _parts(message["content"])} for message in messages]

    def without_places(self, text: str) -> str:
        """A text of a message without `<image>`, which the chat template replaces."""
        return text.replace(PLACE, "")

    def in_text(self, text: str) -> str:
        """The text of a chat template with what belongs in front of and after its images. Raises ValueError, naming
        the row, for an image that the model's processor refuses.
        """
        token = self.images.processor.image_token
        first, *rest = text.split(token)
        try:
            around = [self.images.tokens(k) for k in self.numbers] + [Tokens("", (), "")] * len(rest)
        except ValueError as error:  # such as one that is 300 times as wide as high
            problem = f"the model's processor refuses an image ({error})"
            raise ValueError(f"{self.where}: {problem}; drop the row") from error
        return first + "".join(x.before + token + x.after + piece for x, piece in zip(around, rest, strict=False))

    def in_ids(self, ids: list[int], mask: list[int] | None = None) -> tuple[list[int], list[int]]:
        """Token ids with those of images where the chat template has a token for each, and their mask, 0 for images.
        Raises ValueError, naming the row, if there are more or fewer such places than images.
        """
        if (count := ids.count(self.images.token_id)) != len(self.numbers):
            problem = f"has {len(self.numbers)} image(s), and its messages {count} place(s) for them"
            fix = f"write {PLACE} for each image, in their order, or fix the column images"
            raise ValueError(f"{self.where}: {problem}; {fix}")
        numbers, pairs = iter(self.numbers), []
        for token, is_learned in zip(ids, mask or [0] * len(ids), strict=True):
            is_place = token == self.images.token_id
            pairs += self._pairs(next(numbers)) if is_place else [(token, is_learned)]
        return [token for token, _ in pairs], [is_learned for _, is_learned in pairs]

    def _pairs(self, number: int) -> list[tuple[int, int]]:
        """The token ids of an image, each with its mask."""
        return [(FIRST + number, 0)] * len(self.images.tokens(number).ids)


def _parts(content: str) -> str | list[dict[str, str]]:
    texts = [x for x in re.split(f"({PLACE})", content) if x]
    parts = [{"type": "image"} if x == PLACE else {"type": "text", "text": x} for x in texts]
    return parts if PLACE in content else content
