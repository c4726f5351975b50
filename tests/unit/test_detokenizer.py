"""Incremental detokenisation against the tokenizers library's whole decode."""

import pytest
from api_fakes import BACKEND, SPECIAL, TOKENIZER, VOCAB, ids_of, sentencepiece_backend, split_bytes
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models

from cluster.errors import ModelError
from cluster.frontend.detokenizer import Detokenizer
from cluster.frontend.token_table import TokenTable

SENTENCEPIECE = sentencepiece_backend()
SENTENCEPIECE_TABLE = TokenTable.build(SENTENCEPIECE)


def run(table: TokenTable, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(table, **options)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, VOCAB + 3)), st.booleans())
def test_any_byte_level_tokens_equal_the_whole_decode(ids: list[int], skip: bool) -> None:
    pieces = run(TOKENIZER.table, ids, skip_special_tokens=skip)
    assert "".join(pieces) == BACKEND.decode(ids, skip_special_tokens=skip)


@given(st.text())
def test_any_text_comes_back_from_single_bytes(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    pieces = run(TOKENIZER.table, split_bytes(text))
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@given(st.text())
def test_any_text_comes_back_from_sentencepiece_tokens(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    assert "".join(run(SENTENCEPIECE_TABLE, ids)) == SENTENCEPIECE.decode(ids)


@given(st.lists(st.integers(0, SENTENCEPIECE.get_vocab_size() - 1)), st.booleans())
def test_any_sentencepiece_tokens_without_broken_bytes_equal_the_whole_decode(ids: list[int], skip: bool) -> None:
    ids = [token_id for token_id in ids if not 3 + 0x80 <= token_id < 3 + 256]
    pieces = run(SENTENCEPIECE_TABLE, ids, skip_special_tokens=skip)
    assert "".join(pieces) == SENTENCEPIECE.decode(ids, skip_special_tokens=skip)


def test_an_incomplete_character_is_held_back_until_it_is_complete() -> None:
    assert run(TOKENIZER.table, split_bytes("a😀b")) == ["a", "", "", "", "😀", "b", ""]


def test_an_incomplete_character_at_the_end_becomes_one_replacement() -> None:
    assert run(TOKENIZER.table, split_bytes("a😀")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_a_byte_fallback_character_is_sent_when_complete() -> None:
    ids = [3 + byte for byte in "你好".encode()]
    assert run(SENTENCEPIECE_TABLE, ids) == ["", "", "你", "", "", "好", ""]


def test_special_tokens_are_skipped_only_when_asked() -> None:
    ids = [*ids_of("a"), BACKEND.token_to_id(SPECIAL[1]), BACKEND.token_to_id("<think>"), BACKEND.token_to_id(" été")]
    assert "".join(run(TOKENIZER.table, ids)) == "a<think> été"
    assert "".join(run(TOKENIZER.table, ids, skip_special_tokens=False)) == "a<|im_end|><think> été"


def test_a_text_that_continues_keeps_its_leading_space() -> None:
    ids = SENTENCEPIECE.encode("Paris", add_special_tokens=False).ids
    assert "".join(run(SENTENCEPIECE_TABLE, ids, starts_text=False)) == " Paris"
    assert "".join(run(SENTENCEPIECE_TABLE, ids, starts_text=True)) == "Paris"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_an_unknown_decoder_is_refused(decoder: decoders.Decoder | None) -> None:
    backend = BackendTokenizer(models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ModelError, match="decoder"):
        TokenTable.build(backend)


def test_every_piece_joined_is_the_vocabulary() -> None:
    for token_id in range(VOCAB):
        text = TOKENIZER.table.piece(token_id).decode("utf-8", "replace")
        assert text == BACKEND.decode([token_id], skip_special_tokens=False)
