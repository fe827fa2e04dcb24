"""Detokenizer: token ids to increments of text, cut at stop strings."""

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)


class Detokenizer:
    """Turns the generated tokens of one request into text that can be sent at once.

    The pieces it returns join to `tokenizer.decode(generated_token_ids)` without special
    tokens, up to the first stop string. Two kinds of text are held back until more is known:
    the bytes of an unfinished character, and what may be the beginning of a stop string.

    A token cannot be decoded alone (a character may span several, and some tokenizers drop the
    space of a first word), so each is decoded behind the tokens of the piece before it.
    Decoding everything each time would be right too, and quadratic in the length.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._window: list[int] = []  # tokens of the last piece, then those not yet returned
        self._num_returned = 0  # how many of the window's tokens are already text
        self._returned_text = ""
        self._held = ""  # characters that may begin a stop string

    def add(self, token_id: int) -> str:
        """The text that this token makes certain; sets `stopped` at a stop string."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._returned_text):
            return ""
        fresh = text[len(self._returned_text) :]
        self._window = self._window[self._num_returned :]
        self._num_returned = len(self._window)
        self._returned_text = self._decode(self._window)
        return self._cut(fresh)

    def flush(self) -> str:
        """What is still held back when no more tokens come."""
        text = self._cut(self._decode(self._window)[len(self._returned_text) :]) + self._held
        self._window, self._num_returned, self._returned_text, self._held = [], 0, "", ""
        return text

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _cut(self, fresh: str) -> str:
        text = self._held + fresh
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            # The one that ends first: then the cut does not depend on where tokens ended.
            return text[: min(found)[1]]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
