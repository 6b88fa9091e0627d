"""May this sequence have its blocks now? Prompt and growth allowance are held from admission on.

    blocks of a sequence with n choices, prompt of P tokens, allowance of g tokens per choice, b tokens per block:

        ceil((P + g) / b)  +  (n - 1) · (ceil((P + g) / b) - floor(P / b))
        the first choice      the others share the full blocks of the prompt

New work leaves the watermark free, so that what runs can grow. A replay may use it, but it leaves one block to each
running sequence that has used up its allowance: it would be the newest, and the first to go when they grow.
A pool that holds nothing has nobody to protect, and a request may take all of it.
"""

from __future__ import annotations

import math

from kvrelay.core.config import EngineSettings
from kvrelay.core.events import Reserved
from kvrelay.core.kv import blocks_for
from kvrelay.core.request import Leg, Start
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.spec import EngineSpec
from kvrelay.engine.work import Work


class Admission:
    """Grants rows and blocks."""

    def __init__(self, settings: EngineSettings, spec: EngineSpec, work: Work) -> None:
        self._settings = settings
        self._spec = spec
        self._work = work
        self._max_rows = min(settings.max_num_seqs, settings.max_batch_tokens)
        self._watermark = math.ceil(settings.watermark_fraction * spec.num_blocks)

    def never_fits(self, start: Start, leg: Leg) -> str:
        """Why this worker can never run it; empty if it can."""
        spec, num_needed = self._spec, start.num_tokens + (leg is not Leg.SEND)
        if num_needed > spec.max_sequence:
            return f"{num_needed} tokens are more than the {spec.max_sequence} that fit here (context or KV pool)"
        if len(start.choices) > self._max_rows:
            return f"{len(start.choices)} choices are more than the {self._max_rows} rows of a step"
        if self._num_blocks(start, leg, 1) > spec.num_blocks:
            return f"{len(start.choices)} choices of {start.num_tokens} tokens are more than {spec.num_blocks} blocks"
        return ""

    def grant(self, seq: Sequence) -> bool:
        """Blocks for the whole prompt and the allowance, if there are rows and blocks now."""
        work, start = self._work, seq.start
        if work.num_rows + len(seq.choices) > self._max_rows:
            return False
        num_tokens = len(seq.tokens)
        num_spare = self._num_with_allowance(start, seq.leg) - blocks_for(num_tokens, self._spec.block_size)
        num_cached = work.cache.allocate(seq.table, num_tokens, num_spare=num_spare, leave=self._leave(start))
        if num_cached is None:
            return False
        seq.num_cached = seq.num_computed = num_cached
        return True

    def reserve(self, seq: Sequence) -> bool:
        """`grant` for a sequence whose KV will arrive from elsewhere, and tell everybody that it may come."""
        if self._work.reservations.is_full or not self.grant(seq):
            return False
        self._work.reservations.open(seq)
        self._work.tell(Reserved(seq.key(seq.choices[0]), seq.num_cached))
        return True

    def reserve_waiting(self) -> None:
        """Replays at the head of the queue that wait for a reservation."""
        waiting = self._work.waiting
        while (seq := waiting.head) is not None and seq.leg is Leg.RECEIVE:
            self._work.is_short_of_room = not self.reserve(seq)
            if self._work.is_short_of_room:
                return
            waiting.remove(seq)

    def next_to_compute(self) -> Sequence | None:
        """Admits the head of the queue if it computes its prompt here and there is room, and takes it out."""
        seq = self._work.waiting.head
        if seq is None or seq.leg is Leg.RECEIVE:
            return None
        self._work.is_short_of_room = not self.grant(seq)
        if self._work.is_short_of_room:
            return None
        self._work.waiting.remove(seq)
        self._work.run(seq)
        return seq

    def _leave(self, start: Start) -> int:
        pool = self._work.cache.pool
        if pool.num_available == pool.num_blocks:
            return 0
        hungry = sum(1 for seq in self._work.running if not seq.table.spare and seq.leg is not Leg.SEND)
        return hungry if start.replay else max(self._watermark, hungry)

    def _num_with_allowance(self, start: Start, leg: Leg) -> int:
        """Blocks at admission: with the whole allowance if the pool could ever give that, else with one token of it."""
        num_left = min(start.sampling.max_tokens - start.next_index, self._spec.max_sequence - start.num_tokens)
        wanted = self._num_blocks(start, leg, min(num_left, self._settings.growth_tokens))
        return wanted if wanted <= self._spec.num_blocks else self._num_blocks(start, leg, 1)

    def _num_blocks(self, start: Start, leg: Leg, allowance: int) -> int:
        size, num_tokens = self._spec.block_size, start.num_tokens
        if leg is Leg.SEND:
            return blocks_for(num_tokens, size)
        each = blocks_for(num_tokens + allowance, size)
        return each + (len(start.choices) - 1) * (each - num_tokens // size)
