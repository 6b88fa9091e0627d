"""Names in Redis. Everything is below `kvr:<namespace>:`; ids that come from clients cannot break out of their key.

    w                       set of worker ids: the index, so that nobody walks the whole store
    w:<worker>              record and load, with the lease as TTL
    ev                      pub/sub: join, drain, leave
    s:<tenant>:<session>    where the session last decoded
    p:<block hash>          who holds a prefix block
    q:<tenant>              token bucket
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from kvrelay.core.ids import BlockHash, TenantId, WorkerId
from kvrelay.core.placement import SessionKey

_PLAIN = re.compile(r"[A-Za-z0-9_.\-]{1,96}")
_HASHED = "~"
"""Not a plain character: a hashed id never equals a plain one."""


def safe(text: str) -> str:
    """`text` itself where it is short and plain, else its digest. Half surrogates and newlines are fine."""
    if _PLAIN.fullmatch(text):
        return text
    return _HASHED + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Keys:
    namespace: str

    def _at(self, *parts: str) -> str:
        return ":".join(("kvr", safe(self.namespace), *parts))

    @property
    def index(self) -> str:
        return self._at("w")

    @property
    def events(self) -> str:
        return self._at("ev")

    def worker(self, worker_id: WorkerId) -> str:
        return self._at("w", safe(worker_id))

    def session(self, key: SessionKey) -> str:
        return self._at("s", safe(key.tenant), safe(key.session))

    def prefix(self, block: BlockHash) -> str:
        return self._at("p", block.hex())

    def quota(self, tenant: TenantId) -> str:
        return self._at("q", safe(tenant))
