"""Frames by hand are frames by protobuf, byte for byte, in both directions; nonsense is refused, never misread."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.errors import BadRequest
from kvrelay.core.handoff import Slab
from kvrelay.pb import transfer_pb2 as pb
from kvrelay.rpc.frames import Frame, frame_from_pb, frame_to_pb
from kvrelay.rpc.slab_bytes import frame_from_bytes, frame_to_bytes
from tests.rpc import strategies


def plain(frame: Frame) -> Frame:
    return replace(frame, payload=bytes(frame.payload)) if isinstance(frame, Slab) else frame


@given(strategies.frame)
def test_both_ways_and_both_makers(frame: Frame) -> None:
    data = frame_to_bytes(frame)
    assert plain(frame_from_pb(pb.PushFrame.FromString(data))) == plain(frame)
    assert plain(frame_from_bytes(data)) == plain(frame)
    assert plain(frame_from_bytes(frame_to_pb(frame).SerializeToString())) == plain(frame)


def test_a_payload_is_not_copied_on_arrival() -> None:
    data = frame_to_bytes(Slab(1, 2, 3, 0, 30, 0, 3, 2**63, bytes(range(256)) * 4000))
    assert pb.PushFrame.FromString(data).SerializeToString() == data
    slab = frame_from_bytes(data)
    assert isinstance(slab, Slab)
    assert isinstance(slab.payload, memoryview)
    assert slab.payload.obj is data


@given(st.binary(max_size=80))
def test_nonsense_is_refused_or_read_as_protobuf_does(data: bytes) -> None:
    for given_data in (data, b"\x12" + data, b"\x12" + bytes((len(data),)) + data):
        try:
            found = frame_from_bytes(given_data)
        except BadRequest:
            continue
        assert plain(found) == plain(frame_from_pb(pb.PushFrame.FromString(given_data)))


@pytest.mark.parametrize("cut_at", range(60))
def test_a_cut_slab_is_refused(cut_at: int) -> None:
    data = frame_to_bytes(Slab(1, 2, 3, 0, 30, 0, 3, 2**63, bytes(40)))
    with pytest.raises(BadRequest):
        frame_from_bytes(data[:cut_at])
