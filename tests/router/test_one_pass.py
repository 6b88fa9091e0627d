"""Tokens go from the link to the client's queue in the call that brings them; what goes wrong there ends it alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from kvrelay.core.errors import Broken
from kvrelay.core.events import Token, Tokens
from kvrelay.core.ids import Attempt, Choice, SeqKey
from kvrelay.core.output import Delta, GenerateRequest
from kvrelay.router.link_port import Arrival
from kvrelay.router.output_stage import Text
from kvrelay.text.output import OutputText, TextStep
from tests.router.table import GREEDY, Letters, Table, assert_undisturbed
from tests.support.virtual_time import run_virtual


class Exploding:
    """A text stage with a bug that shows at the third token."""

    def __init__(self, text: OutputText) -> None:
        self._text = text
        self._num_left = 2

    def push(self, token_ids: Sequence[int]) -> TextStep:
        self._num_left -= 1
        if self._num_left < 0:
            raise IndexError("a bug")
        return self._text.push(token_ids)

    def finish(self) -> TextStep:
        return self._text.finish()


def test_a_text_stage_that_breaks_ends_its_own_request_only() -> None:
    async def story() -> None:
        table = Table()
        broken = table.seat(replace(GREEDY, max_tokens=20))

        def new_text(request: GenerateRequest) -> Text:
            text = OutputText(Letters(), request.stop)
            return Exploding(text) if request is broken.request else text

        table.kitchen = replace(table.kitchen, new_text=new_text)
        other = table.seat(replace(GREEDY, max_tokens=20))
        await table.finish(broken)
        assert isinstance(broken.error, Broken)
        assert broken.ids() == broken.expected()[:2], "what came before has been delivered"
        assert [cancel.request_id for cancel in table.worker("decode-0").cancels] == [broken.request.request_id]
        assert_undisturbed(await table.finish(other))
        await table.assert_empty()

    run_virtual(story())


def test_tokens_of_a_running_choice_are_there_before_anybody_is_woken() -> None:
    async def story() -> None:
        table = Table(prefill=0, decode=0, mixed=1)
        guest = table.seat(replace(GREEDY, max_tokens=20), reads=False)
        await asyncio.sleep(1.5)  # the first token is there, the second is not
        assert guest.delivery is not None
        guest.delivery.take()
        worker = table.worker("mixed-0")
        [leg] = worker.legs.values()
        wanted = guest.expected()
        for first, count in ((1, 1), (2, 3), (1, 4), (5, 1)):
            tokens = tuple(Token(token_id) for token_id in wanted[first : first + count])
            key = SeqKey(guest.request.request_id, Choice(0), Attempt(0))
            leg.deliver(Arrival(worker.record.worker_id, Tokens(key, first, tokens)))
        outputs = guest.delivery.take()
        assert outputs is not None
        shown = [(each.first_index, len(each.tokens)) for each in outputs if isinstance(each, Delta)]
        assert shown == [(1, 1), (2, 3), (5, 1)], "what was known already was left out"
        await table.leaves(guest)
        await table.assert_empty()

    run_virtual(story())
