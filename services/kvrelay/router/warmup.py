"""Readiness: a pair that can serve is attached, and a real request has gone all the way through it once.

    COLD ─a placement is possible─▶ warm-up request ─went through─▶ WARM
                                        └─ failed: says why, tries again
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvrelay.core.errors import KvrelayError
from kvrelay.core.ids import RequestId, TokenId
from kvrelay.core.output import GenerateRequest, Output
from kvrelay.core.placement import PlacementRequest
from kvrelay.core.request import SamplingParams

log = logging.getLogger(__name__)

WARMUP_S = 60.0
RETRY_S = 1.0
_TOKENS = 2
"""One would be answered by prefill alone and prove nothing about the handoff."""


class WarmUp:
    def __init__(
        self, generate: Callable[[GenerateRequest], AsyncGenerator[Output, None]], can_serve: Callable[[], bool],
        token_id: TokenId,
    ) -> None:
        self.is_warm = False
        self.why_not = "the warm-up request has not been sent yet"
        self._generate = generate
        self._can_serve = can_serve
        self._token_id = token_id
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Ends when warm."""
        while not self.is_warm:
            if self._can_serve():
                await self._try_once()
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _try_once(self) -> None:
        self.why_not = "the warm-up request is under way"
        request = GenerateRequest(
            request_id=RequestId(f"warm-up-{uuid.uuid4().hex[:8]}"),
            prompt_ids=(self._token_id,),
            sampling=SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True),
            timeout_s=WARMUP_S,
        )
        try:
            async with aclosing(self._generate(request)) as outputs:
                async for _ in outputs:
                    pass
            self.is_warm = True
            log.info("warm: ready to serve")
        except KvrelayError as error:
            self.why_not = f"the warm-up request failed: {error.message}"
            log.warning("%s", self.why_not)
            await asyncio.sleep(RETRY_S)


SMALLEST = PlacementRequest(num_tokens=1, num_blocks=1, max_tokens=_TOKENS, replay=True)
"""Whoever can take this can serve. A replay needs no free block: a full pool is busy, not unready."""
