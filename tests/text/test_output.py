"""Text out of ids: what is streamed equals the whole, wherever the stream is cut (STR-02, TOK-01, SMP-05)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.text.output import OutputText, TextStep
from kvrelay.text.stops import StopMatcher


@dataclass(frozen=True)
class Pieces:
    """A tokenizer that is a list of byte strings."""

    table: tuple[bytes, ...]

    def token_bytes(self, token_id: int, /) -> bytes:
        return self.table[token_id]


BYTES = Pieces((*(bytes([i]) for i in range(256)), b""))
CONTROL = 256


@dataclass(frozen=True)
class Whole:
    text: str
    offsets: tuple[int, ...]
    stop: str | None


def run(output: OutputText, chunks: Sequence[Sequence[int]]) -> Whole:
    steps: list[TextStep] = []
    for chunk in chunks:
        steps.append(output.push(chunk))
        if steps[-1].stop is not None:
            break
    else:
        steps.append(output.finish())
    offsets = tuple(offset for step in steps for offset in step.offsets)
    assert steps[-1].num_visible_tokens == len(offsets)
    return Whole("".join(step.text for step in steps), offsets, steps[-1].stop)


def one_by_one(data: bytes) -> list[list[int]]:
    return [[byte] for byte in data]


def test_STR_02_no_text_at_or_after_the_earliest_match() -> None:
    data = b"abcdefgh"
    for stops, text, stop in [
        (("cd",), "ab", "cd"),
        (("cdX", "de"), "abc", "de"),
        (("h",), "abcdefg", "h"),
        (("abcdefgh",), "", "abcdefgh"),
        (("ef", "cde", "fg", "defX"), "ab", "cde"),
        (("bcdX", "cd"), "ab", "cd"),
        (("xyz",), "abcdefgh", None),
    ]:
        for chunks in (one_by_one(data), [list(data)], [list(data[:3]), list(data[3:])]):
            result = run(OutputText(BYTES, stops), chunks)
            assert (result.text, result.stop) == (text, stop)
            assert result.offsets == tuple(range(len(text))), "logprobs only for tokens before the match"


def test_STR_02_a_stop_of_three_byte_characters() -> None:
    result = run(OutputText(BYTES, ("日本",)), one_by_one("は日本語".encode()))
    assert result == Whole("は", (0, 0, 0), "日本")


def test_STR_02_a_later_match_waits_for_an_earlier_one_that_is_still_possible() -> None:
    output = OutputText(BYTES, ("abcd", "bc"))
    assert output.push(list(b"abc")).stop is None
    assert output.push(b"d") == TextStep("", (), 0, "abcd")
    output = OutputText(BYTES, ("abcd", "bc"))
    output.push(list(b"abc"))
    assert output.finish() == TextStep("a", (0,), 1, "bc")


def test_nothing_comes_after_a_stop() -> None:
    output = OutputText(BYTES, ("b",))
    assert output.push(list(b"abc")).stop == "b"
    assert output.push(list(b"xyz")) == TextStep("", (), 1, "b")
    assert output.finish() == TextStep("", (), 1, "b")


@pytest.mark.parametrize("text", ["é", "語", "🌶", "👩‍👩‍👧", "e\u0301"])
def test_TOK_01_no_delta_splits_a_code_point(text: str) -> None:
    output = OutputText(BYTES)
    texts = [output.push([byte]).text for byte in text.encode()] + [output.finish().text]
    assert "".join(texts) == text
    assert all("\ufffd" not in piece for piece in texts)


def test_TOK_01_a_cut_character_is_one_replacement_in_both_modes() -> None:
    cut = "a🌶".encode()[:-1]
    assert run(OutputText(BYTES), one_by_one(cut)).text == run(OutputText(BYTES), [list(cut)]).text == "a\ufffd"


def test_control_tokens_have_no_text_and_are_visible_at_the_end() -> None:
    result = run(OutputText(BYTES, ("xyz",)), [[*b"hi"], [CONTROL]])
    assert result == Whole("hi", (0, 1, 2), None)
    assert OutputText(BYTES).push([CONTROL]) == TextStep("", (0,), 1, None)


def test_SMP_05_stop_text_is_ignored_until_min_tokens() -> None:
    result = run(OutputText(BYTES, ("c",), min_tokens=5), one_by_one(b"abcdecx"))
    assert result == Whole("abcde", (0, 1, 2, 3, 4), "c")
    reaches_back = run(OutputText(BYTES, ("ef",), min_tokens=5), one_by_one(b"abcdefef"))
    assert reaches_back.text == "abcdef"


def test_SMP_05_a_character_begun_before_min_tokens_takes_no_part() -> None:
    data = "é".encode()
    result = run(OutputText(BYTES, ("é",), min_tokens=1), one_by_one(data + data))
    assert (result.text, result.stop) == ("é", "é")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


ALPHABET = st.sampled_from([*"ab", "é", "🌶"])
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4).map(tuple)
TOKENS = st.lists(
    st.one_of(
        st.text(ALPHABET, max_size=3).map(str.encode),
        st.binary(max_size=3),
        st.sampled_from([b"\xc3", b"\xa9", b"\xf0\x9f", b"\x8c\xb6", b"\xef\xbf\xbd", b"\xed\xa0", b""]),
    ),
    max_size=24,
)


def oracle(tokens: Sequence[bytes], stops: tuple[str, ...]) -> Whole:
    """The definition: decode everything, cut at the earliest match, list the tokens that start before it."""
    text = b"".join(tokens).decode("utf-8", errors="replace")
    matches = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    offsets = token_offsets(tokens)
    if not matches:
        return Whole(text, offsets, None)
    start, _, stop = min(matches)
    return Whole(text[:start], tuple(offset for offset in offsets if offset < start), stop)


def token_offsets(tokens: Sequence[bytes]) -> tuple[int, ...]:
    """Which character the first byte of each token falls into: decode up to it, and decode up to and with it."""
    data = b"".join(tokens)
    offsets, position = [], 0
    for token in tokens:
        before = len(data[:position].decode("utf-8", errors="replace"))
        if token:
            with_first = len(data[: position + 1].decode("utf-8", errors="replace"))
            offsets.append(with_first - 1)
        else:
            offsets.append(before - _is_cut(data[:position]))
        position += len(token)
    return tuple(offsets)


def _is_cut(data: bytes) -> bool:
    """Does `data` end inside a character that more bytes could still complete?"""
    if b"\xed" in data[-2:-1] and 0xA0 <= data[-1] < 0xC0:
        return False
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return bool(decoder.getstate()[0])


@example(tokens=[b"\xed\xc2", b""], stops=(), cuts=[])
@given(tokens=TOKENS, stops=STOPS, cuts=st.lists(st.integers(1, 5), max_size=24))
@settings(max_examples=1000, deadline=None)
def test_any_chunking_gives_the_text_of_the_whole(tokens: list[bytes], stops: tuple[str, ...], cuts: list[int]) -> None:
    ids = list(range(len(tokens)))
    chunks = []
    for size in [*cuts, len(ids)]:
        chunks.append(ids[:size])
        ids = ids[size:]
    assert run(OutputText(Pieces(tuple(tokens)), stops), chunks) == oracle(tokens, stops)


@given(tokens=TOKENS, stops=STOPS, min_tokens=st.integers(0, 6), cut=st.integers(0, 24))
@settings(max_examples=300, deadline=None)
def test_min_tokens_does_not_depend_on_the_chunking(
    tokens: list[bytes], stops: tuple[str, ...], min_tokens: int, cut: int
) -> None:
    pieces = Pieces(tuple(tokens))
    ids = list(range(len(tokens)))
    singly = run(OutputText(pieces, stops, min_tokens), [[i] for i in ids])
    assert run(OutputText(pieces, stops, min_tokens), [ids[:cut], ids[cut:]]) == singly
    assert len(singly.offsets) >= min(min_tokens, len(ids))
