"""What a sender must show to push: the receiver's own signature under a reservation.

    receiver: Reserved + handle ─▶ router ─▶ sender ─▶ Push: Open with the handle ─▶ receiver: looks at its signature

The one who signs is the one who checks, so the key is made by each worker at its start and never leaves it: there is
none to hand out, to steal from a file or to rotate, and a handle ends with the process that gave it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from kvrelay.core.clock import Clock
from kvrelay.core.ids import TransferId

_EXPIRY_BYTES = 8
_MAC_BYTES = 32
_PURPOSE = b"kvrelay push handle 1"


class HandleSeal:
    """`[8: expiry, ms][32: HMAC-SHA256 over purpose, transfer id, tenant and expiry]`. Any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(_MAC_BYTES)

    def sign(self, transfer_id: TransferId, tenant: bytes, valid_ms: int) -> bytes:
        expiry = (self._now_ms() + valid_ms).to_bytes(_EXPIRY_BYTES, "big")
        return expiry + self._mac(transfer_id, tenant, expiry)

    def fault(self, handle: bytes, transfer_id: TransferId, tenant: bytes) -> str:
        """Why this handle allows no Push of this transfer by a sender of this tenant; empty if it does."""
        if not handle:
            return "it shows no handle"
        expiry, mac = handle[:_EXPIRY_BYTES], handle[_EXPIRY_BYTES:]
        if not hmac.compare_digest(mac, self._mac(transfer_id, tenant, expiry)):
            return "its handle was not given for this transfer and tenant"
        return "its handle has expired" if int.from_bytes(expiry, "big") < self._now_ms() else ""

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1e3)

    def _mac(self, transfer_id: TransferId, tenant: bytes, expiry: bytes) -> bytes:
        parts = (_PURPOSE, transfer_id.encode(), tenant, expiry)
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, message, hashlib.sha256)
