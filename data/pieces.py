"""Cutting a long document into pieces whose ids, joined, are those of the whole document."""

from collections.abc import Iterator

MAX_PIECE = 2**19       # bytes that are encoded at a time


def pieces(text: bytes, size: int | None = None) -> Iterator[bytes]:
    """Cut a document into non-empty pieces of at most `size` bytes (MAX_PIECE)."""
    size, start = size or MAX_PIECE, 0
    while len(text) - start > size:
        end = start + cut_before_space(text[start:start + size])
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def cut_before_space(window: bytes) -> int:
    """The last place in a window, > 0, where a word starts in any surrounding text and for every tokenizer.

    That is before a space that follows a character other than white space, else before such a line feed: in
    no word of GPT-2's pattern does white space follow another character, and the only lookahead asks where
    white space ends. A window without such a place is cut at its end, but not inside a UTF-8 character.
    """
    for space in (b" ", b"\n"):
        place = len(window)
        while (place := window.rfind(space, 1, place)) > 0:
            before = window[max(0, place - 4):place].decode("utf-8", errors="replace")[-1]
            if not before.isspace():
                return place
    for place in range(len(window) - 1, max(0, len(window) - 4), -1):
        if window[place] >= 0xC0:                                       # the first byte of several
            return place
        if window[place] < 0x80:
            break
    return len(window)
