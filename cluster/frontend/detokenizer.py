"""Token ids to text, one token at a time."""

import codecs

from cluster.frontend.token_table import TokenTable

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of a growing list of tokens.

    The pieces joined equal the tokenizer's decode of all tokens. An incomplete UTF-8 character is held
    back until its last byte arrives; bytes that can be part of no character become U+FFFD, one for each
    maximal invalid sequence (WHATWG's rule, and that of byte-level decoders).
    """

    def __init__(self, table: TokenTable, *, skip_special_tokens: bool = True, starts_text: bool = True) -> None:
        """With `starts_text` False the tokens continue an earlier text, and their leading space is kept."""
        self._table = table
        self._skip = table.special_ids if skip_special_tokens else frozenset()
        self._decoder = _Utf8Decoder("replace")
        self._spaces_to_strip = table.strip_leading_spaces if starts_text else 0

    def feed(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._skip:
            return ""
        return self._strip(self._decoder.decode(self._table.piece(token_id)))

    def flush(self) -> str:
        """The text has ended: U+FFFD if a character is still incomplete, else nothing."""
        return self._strip(self._decoder.decode(b"", True))

    def _strip(self, text: str) -> str:
        while self._spaces_to_strip and text:
            if text[0] != " ":
                self._spaces_to_strip = 0
            else:
                self._spaces_to_strip -= 1
                text = text[1:]
        return text
