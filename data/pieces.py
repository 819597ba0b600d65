"""Cutting a long document into pieces whose ids, joined, are those of the whole document."""

from collections.abc import Callable, Iterable, Iterator

MAX_PIECE = 2**19       # bytes that are encoded at a time


def pieces(blocks: Iterable[bytes], cut: Callable[[bytes], int], size: int | None = None) -> Iterator[bytes]:
    """Join the blocks of a document and cut it into non-empty pieces of at most `size` bytes (MAX_PIECE).

    The cuts depend on the document alone, not on the blocks. Starting at one of the cuts gives the same cuts
    from there on.
    """
    size = size or MAX_PIECE
    rest = b""
    for block in blocks:
        rest += block
        start = 0
        while len(rest) - start > size:
            end = start + cut(rest[start:start + size])
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


def cut_before_space(window: bytes) -> int:
    """The last place in a window where a word of GPT2_PATTERN starts in any surrounding text.

    That is before a space or line feed that follows a character other than white space: in no word does white
    space follow another character, and the only lookahead asks where white space ends. A window without white
    space is cut at its end, but not inside a UTF-8 character.
    """
    end = len(window)
    while True:
        place = max(window.rfind(b" ", 1, end), window.rfind(b"\n", 1, end))
        if place < 1:
            break
        before = window[max(0, place - 4):place].decode("utf-8", errors="replace")[-1]
        if not before.isspace():
            return place
        end = place
    for place in range(len(window) - 1, max(0, len(window) - 4), -1):
        if window[place] >= 0xC0:                                       # the first byte of several
            return place
        if window[place] < 0x80:
            break
    return len(window)
