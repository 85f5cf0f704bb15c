"""The reader of protobuf's encoding, against messages that protobuf itself writes."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortgpu.model.protobuf import Reader, TooManyFieldsError

MANY = 10_000


def fields(data: bytes, most: int = MANY) -> list[tuple[int, int | None, bytes]]:
    reader = Reader(data, most)
    return [(number, value, reader.text(extent)) for number, value, extent in reader.fields()]


@given(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=300), st.floats(width=32))
def test_fields_of_each_wire_type(number: int, text: bytes, real: float) -> None:
    data = onnx.AttributeProto(i=number, s=text, f=real).SerializeToString()
    found = {key: (value, content) for key, value, content in fields(data)}
    assert found[3][0] == number % 2**64
    assert found[4] == (None, text)
    assert len(found[2][1]) == 4
    assert found[2][0] is None


def test_a_number_of_eight_bytes_is_passed_over() -> None:
    message = bytes([1 << 3 | 1]) + bytes(8) + bytes([2 << 3, 5])
    assert [(number, value) for number, value, _ in fields(message)] == [(1, None), (2, 5)]


def test_only_the_extent_that_is_asked_for_is_read() -> None:
    inner = onnx.TensorProto(name="w").SerializeToString()
    data = onnx.AttributeProto(name="a", t=onnx.TensorProto(name="w")).SerializeToString()
    reader = Reader(data, MANY)
    (extent,) = (extent for number, _, extent in reader.fields() if number == 5)
    assert reader.text(extent) == inner
    assert [reader.text(part) for _, _, part in reader.fields(extent)] == [b"w"]


@pytest.mark.parametrize("numbers", [[], [0], [1, 127, 128, 300, 2**63]])
def test_numbers_of_a_repeated_field(numbers: list[int]) -> None:
    def varint(number: int) -> bytes:
        head = b""
        while number > 0x7F:
            head, number = head + bytes([number & 0x7F | 0x80]), number >> 7
        return head + bytes([number])

    packed = b"".join(map(varint, numbers))
    reader = Reader(packed, MANY)
    assert reader.numbers(None, (0, len(packed))) == numbers
    assert reader.numbers(7, (0, 0)) == [7], "one that is not packed"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\0\0\0\0", "damaged"),  # zeros, the end of a file that was not fully written
        (b"\x0b", "damaged"),  # the group of old messages
        (b"\x0a\x05ab", "cut off"),
        (b"\x08" + b"\xff" * 11, "damaged"),  # a number of more than 64 bits
    ],
)
def test_what_is_no_message(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fields(data)


@pytest.mark.parametrize("data", [b"\x08", b"\x0a", b"\x80", b"\x08\x80"])
def test_what_ends_amid_a_number(data: bytes) -> None:
    with pytest.raises((IndexError, ValueError)):
        fields(data)


def test_no_more_fields_and_numbers_are_read_than_were_allowed() -> None:
    two = b"\x08\x01\x08\x02"
    assert len(fields(two, 2)) == 2
    with pytest.raises(TooManyFieldsError):
        fields(two, 1)
    with pytest.raises(TooManyFieldsError):
        Reader(b"\x01\x02", 1).numbers(None, (0, 2))
