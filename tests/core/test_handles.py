"""Leave to push: for one transfer, one tenant, one time, and from the worker that gave it."""

from __future__ import annotations

import pytest

from kvrelay.core.clock import FakeClock
from kvrelay.core.handles import HandleSeal
from kvrelay.core.ids import TransferId

T1, T2 = TransferId("t1"), TransferId("t2")
STRANGE = "its handle was not given for this transfer and tenant"


def test_a_handle_opens_what_it_was_given_for_until_it_expires() -> None:
    clock = FakeClock()
    seal = HandleSeal(clock)
    handle = seal.sign(T1, b"acme", 2_000)
    clock.advance(1.9)
    assert seal.fault(handle, T1, b"acme") == ""
    clock.advance(0.2)
    assert seal.fault(handle, T1, b"acme") == "its handle has expired"


def test_and_nothing_else() -> None:
    clock = FakeClock()
    seal = HandleSeal(clock)
    handle = seal.sign(T1, b"acme", 2_000)
    assert seal.fault(handle, T2, b"acme") == STRANGE
    assert seal.fault(handle, T1, b"other") == STRANGE
    assert seal.fault(handle, TransferId("t"), b"1acme") == STRANGE, "where one part ends is signed too"
    assert HandleSeal(clock).fault(handle, T1, b"acme") == STRANGE, "another process, or the same one started again"
    assert seal.fault(b"", T1, b"acme") == "it shows no handle"


@pytest.mark.parametrize("position", range(40))
def test_every_bit_of_it_counts(position: int) -> None:
    """Its expiry included."""
    seal = HandleSeal(FakeClock())
    forged = bytearray(seal.sign(T1, b"acme", 2_000))
    forged[position] ^= 1
    assert seal.fault(bytes(forged), T1, b"acme") == STRANGE
    assert seal.fault(bytes(forged[:position]), T1, b"acme") != ""
