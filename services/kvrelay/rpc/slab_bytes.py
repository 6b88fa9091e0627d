"""Push frames as bytes, with a slab's payload copied once on the way out and not at all on the way in.

    PushFrame   12 <length>  PushSlab:  <header: fields 1 to 8>  4a <length> <payload>

These are protobuf's own bytes: the other end may use the generated classes. They would copy each payload three times
on the way out (into the message, out of it, into gRPC), and for a megabyte a copy is mostly fresh pages.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from kvrelay.core.errors import BadRequest
from kvrelay.core.handoff import Slab
from kvrelay.pb import transfer_pb2 as pb
from kvrelay.rpc.frames import Frame, frame_from_pb, frame_to_pb

_SLAB_TAG = pb.PushFrame.SLAB_FIELD_NUMBER << 3 | 2
_PAYLOAD_TAG = pb.PushSlab.PAYLOAD_FIELD_NUMBER << 3 | 2
MAX_HEADER_BYTES = 128
"""Seven varints of 32 bits and a checksum, each with its tag: at most 51."""


def frame_to_bytes(frame: Frame) -> bytes:
    if not isinstance(frame, Slab):
        return frame_to_pb(frame).SerializeToString()
    payload = memoryview(frame.payload).cast("B")
    header = _header_of(frame) + bytes((_PAYLOAD_TAG,)) + _varint(len(payload))
    return b"".join((bytes((_SLAB_TAG,)), _varint(len(header) + len(payload)), header, payload))


def frame_from_bytes(data: bytes) -> Frame:
    """Raises BadRequest for bytes that are no frame. A slab's payload is a view of `data`."""
    try:
        return _slab_from(data) or frame_from_pb(pb.PushFrame.FromString(data))
    except DecodeError as error:
        raise BadRequest(f"a push frame that cannot be read: {error}") from error


def _header_of(slab: Slab) -> bytes:
    return pb.PushSlab(
        seq_no=slab.seq_no, first_block=slab.first_block, num_blocks=slab.num_blocks, layer_begin=slab.layer_begin,
        layer_end=slab.layer_end, head_begin=slab.head_begin, head_end=slab.head_end, checksum=slab.checksum,
    ).SerializeToString()  # fmt: skip


def _slab_from(data: bytes) -> Slab | None:
    """None: not a slab written as above, with its payload last; the generated classes read it."""
    if not data or data[0] != _SLAB_TAG:
        return None
    length, begin = _read_varint(data, 1)
    if begin + length != len(data):
        return None
    payload_at = _payload_tag(data, begin)
    if payload_at is None:
        return None
    size, payload_begin = _read_varint(data, payload_at + 1)
    if payload_begin + size != len(data):
        return None
    header = pb.PushSlab.FromString(data[begin:payload_at])
    return Slab(
        seq_no=header.seq_no, first_block=header.first_block, num_blocks=header.num_blocks,
        layer_begin=header.layer_begin, layer_end=header.layer_end, head_begin=header.head_begin,
        head_end=header.head_end, checksum=header.checksum, payload=memoryview(data)[payload_begin:],
    )  # fmt: skip


def _payload_tag(data: bytes, at: int) -> int | None:
    """Where the payload's tag is, over fields of known kinds; None if there is anything else before it."""
    end = min(len(data), at + MAX_HEADER_BYTES)
    while at < end:
        tag = data[at]
        if tag == _PAYLOAD_TAG:
            return at
        if tag & 7 == 0:
            _, at = _read_varint(data, at + 1)
        elif tag & 7 == 1:
            at += 9
        else:
            return None
    return None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where the next byte is). Raises BadRequest where there is none."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise BadRequest("a push frame that cannot be read: a number without an end")
