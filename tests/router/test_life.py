"""The ordinary life of a request: relay, local, one token, stops, several choices."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvrelay.core.ids import SessionId, TenantId, TokenId
from kvrelay.core.placement import SessionKey
from kvrelay.core.request import Leg, SamplingParams
from tests.router.table import GREEDY, PROMPT, Table, words
from tests.support.virtual_time import run_virtual


def test_a_request_is_relayed() -> None:
    async def story() -> None:
        table = Table()
        guest = await table.serve()
        assert guest.ids() == guest.expected()
        assert guest.finish().finish_reason == "length"
        assert guest.summary.num_output_tokens == 8
        assert guest.summary.num_prompt_tokens == len(PROMPT)
        assert (guest.summary.mode, guest.summary.num_attempts) == ("relay", 1)
        [receive], [send] = table.worker("decode-0").starts, table.worker("prefill-0").starts
        assert (receive.leg, send.leg) == (Leg.RECEIVE, Leg.SEND)
        assert receive.transfer_id == send.transfer_id
        assert send.handoff is not None
        assert send.handoff.receivers[0].worker_id == "decode-0"
        assert not table.worker("decode-0").cancels
        assert not table.worker("prefill-0").cancels
        await table.assert_empty()

    run_virtual(story())


def test_the_seven_moments_add_up() -> None:
    async def story() -> None:
        table = Table()
        guest = await table.serve()
        timing = guest.summary.timing
        assert timing.queue == 0
        assert timing.reserve == 1_000
        assert timing.prefill == 1_000
        assert timing.first_token == 2_000
        assert timing.transfer_hidden == 500
        assert timing.transfer_unhidden == 1_000

    run_virtual(story())


def test_no_prefill_worker_means_local() -> None:
    async def story() -> None:
        table = Table(prefill=0)
        guest = await table.serve()
        assert guest.ids() == guest.expected()
        assert guest.summary.mode == "local"
        [start] = table.worker("decode-0").starts
        assert start.leg is Leg.LOCAL
        await table.assert_empty()

    run_virtual(story())


def test_one_token_needs_no_decode() -> None:
    async def story() -> None:
        table = Table()
        guest = await table.serve(replace(GREEDY, max_tokens=1))
        assert guest.ids() == guest.expected()
        assert guest.finish().finish_reason == "length"
        assert not table.worker("decode-0").starts
        [start] = table.worker("prefill-0").starts
        assert start.leg is Leg.LOCAL
        await table.assert_empty()

    run_virtual(story())


def test_no_tokens_need_no_worker() -> None:
    async def story() -> None:
        table = Table(prefill=0, decode=0)
        guest = await table.serve(replace(GREEDY, max_tokens=0))
        assert guest.ids() == ()
        assert guest.finish().finish_reason == "length"
        assert guest.summary.num_output_tokens == 0

    run_virtual(story())


def test_several_choices_share_one_start_and_differ() -> None:
    async def story() -> None:
        table = Table()
        guest = await table.serve(SamplingParams(max_tokens=6, seed=11), n=3)
        for choice in range(3):
            assert guest.ids(choice) == guest.expected(choice)
        assert len({guest.ids(choice) for choice in range(3)}) == 3
        assert guest.summary.num_output_tokens == 18
        assert len(table.worker("decode-0").starts) == 1
        await table.assert_empty()

    run_virtual(story())


def test_the_seed_is_told_first_and_sampling_is_passed_on_untouched() -> None:
    async def story() -> None:
        table = Table()
        sampling = SamplingParams(
            max_tokens=5, seed=-7, top_p=0.5, repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=-0.5,
            logit_bias=((TokenId(3), -1.0),), logprobs=2,
        )
        guest = await table.serve(sampling)
        assert guest.started.seed == -7
        assert table.worker("decode-0").starts[0].sampling == sampling
        assert table.worker("prefill-0").starts[0].sampling == sampling
        tokens = [token for each in guest.outputs for token in getattr(each, "tokens", ())]
        assert all(token.logprob == -0.5 and len(token.top) == 2 for token in tokens)
        assert len(tokens) == 5

    run_virtual(story())


def test_a_text_stop_ends_the_choice_and_cancels_it() -> None:
    async def story() -> None:
        table = Table()
        full = "".join(map(chr, (await table.serve()).expected()))
        guest = await table.serve(stop=(full[3:5],))
        assert guest.text() == full[:3]
        assert guest.finish().finish_reason == "stop"
        assert guest.finish().stop_reason == full[3:5]
        assert guest.summary.num_output_tokens == 5
        [cancel] = table.worker("decode-0").cancels
        assert cancel.request_id == guest.request.request_id
        await table.assert_empty()

    run_virtual(story())


def test_a_stop_in_one_choice_leaves_the_other_alone() -> None:
    async def story() -> None:
        table = Table()
        sampling = SamplingParams(max_tokens=8, seed=5)
        plain = await table.serve(sampling, n=2)
        stop = "".join(map(chr, plain.ids(0)[2:4]))
        guest = await table.serve(sampling, n=2, stop=(stop,))
        assert guest.finish(0).finish_reason == "stop"
        assert guest.ids(1) == guest.expected(1)
        [cancel] = table.worker("decode-0").cancels
        assert cancel.choices == (0,)
        await table.assert_empty()

    run_virtual(story())


def test_a_first_token_that_ends_it_releases_the_reservation() -> None:
    async def story() -> None:
        table = Table()
        table.worker("prefill-0").eos = table.worker("decode-0").eos = (await table.serve()).expected()[0]
        guest = await table.serve()
        assert guest.ids() == guest.expected()[:1]
        assert guest.finish().finish_reason == "stop"
        assert guest.summary.num_output_tokens == 1
        assert [cancel.request_id for cancel in table.worker("decode-0").cancels] == [guest.request.request_id]
        assert not table.worker("prefill-0").cancels
        await table.assert_empty()

    run_virtual(story())


def test_a_first_token_that_ends_one_choice_leaves_the_other_to_decode() -> None:
    async def story() -> None:
        table = Table()
        sampling = SamplingParams(max_tokens=6, seed=3)
        plain = await table.serve(sampling, n=2)
        assert plain.ids(0)[0] not in plain.ids(1)
        for name in ("prefill-0", "decode-0"):
            table.worker(name).eos = TokenId(plain.ids(0)[0])
        guest = await table.serve(sampling, n=2)
        assert guest.ids(0) == plain.ids(0)[:1]
        assert guest.finish(0).finish_reason == "stop"
        assert guest.ids(1) == plain.ids(1)
        assert guest.summary.num_attempts == 1
        await table.assert_empty()

    run_virtual(story())


def test_a_first_token_that_completes_a_stop_string_cancels_both_legs() -> None:
    async def story() -> None:
        table = Table()
        first = chr((await table.serve()).expected()[0])
        guest = await table.serve(stop=(first,))
        assert guest.text() == ""
        assert guest.finish().stop_reason == first
        assert len(table.worker("decode-0").cancels) == len(table.worker("prefill-0").cancels) == 1
        await table.assert_empty()

    run_virtual(story())


def test_a_stop_token_id_is_named() -> None:
    async def story() -> None:
        table = Table()
        token_id = (await table.serve()).expected()[4]
        guest = await table.serve(replace(GREEDY, stop_token_ids=(token_id,)))
        assert guest.finish().stop_reason == token_id
        await table.assert_empty()

    run_virtual(story())


def test_a_caller_resumes_where_it_was() -> None:
    async def story() -> None:
        table = Table()
        sampling = SamplingParams(max_tokens=8, seed=99)
        whole = await table.serve(sampling)
        guest = await table.serve(sampling, resume=whole.expected()[:3])
        assert guest.ids() == whole.expected()[3:]
        assert guest.summary.num_output_tokens == 8
        await table.assert_empty()

    run_virtual(story())


def test_a_caller_who_has_everything_gets_the_end() -> None:
    async def story() -> None:
        for eos, reason in ((None, "length"), (TokenId(ord("c")), "stop")):
            table = Table(prefill=0)
            table.worker("decode-0").eos = eos
            guest = await table.serve(replace(GREEDY, max_tokens=3), resume=words("abc"))
            assert guest.ids() == ()
            assert guest.finish().finish_reason == reason
            assert guest.summary.num_output_tokens == 3
            await table.assert_empty()

    run_virtual(story())


def test_a_promised_length_goes_where_it_fits_though_others_have_more_room() -> None:
    async def story() -> None:
        table = Table(prefill=0, decode=2)
        small, large = table.worker("decode-0"), table.worker("decode-1")
        small.resize(num_blocks=64, max_context=40)
        waiting = [table.seat(replace(GREEDY, max_tokens=30)) for _ in range(3)]
        for guest in waiting:
            await table.finish(guest)
            assert guest.ids() == guest.expected()
        assert (len(small.starts), len(large.starts)) == (0, 3)
        await table.serve(replace(GREEDY, max_tokens=8))
        await table.serve(replace(GREEDY, max_tokens=30), open_ended=True)
        assert len(small.starts) == 2
        await table.assert_empty()

    run_virtual(story())


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["local", "relay"])
def test_a_caller_whose_last_token_was_the_end_of_sequence_gets_the_end(num_prefill: int) -> None:
    async def story() -> None:
        table = Table(prefill=num_prefill)
        table.worker("decode-0").eos = TokenId(ord("c"))
        guest = await table.serve(resume=words("abc"))
        assert guest.ids() == ()
        assert guest.finish().finish_reason == "stop"
        assert guest.summary.num_output_tokens == 3
        await table.assert_empty()

    run_virtual(story())


def test_cached_tokens_are_those_of_the_first_attempt() -> None:
    async def story() -> None:
        table = Table(decode=2)
        table.worker("prefill-0").num_cached = 5
        guest = table.seat()
        await asyncio.sleep(4.5)
        table.worker("prefill-0").num_cached = 9
        table.worker("decode-0").die()
        await table.finish(guest)
        assert guest.summary.num_attempts == 2
        assert guest.summary.num_cached_tokens == 5

    run_virtual(story())


def test_a_session_is_remembered_and_scored() -> None:
    async def story() -> None:
        table = Table(decode=2)
        tenant, session = TenantId("t"), SessionId("s")
        await table.serve(tenant=tenant, session=session)
        await table.sessions.close()
        placement = await table.registry.get_session(SessionKey(tenant, session))
        assert placement is not None
        assert (placement.decode_worker, placement.epoch) == ("decode-0", 1)
        assert placement.num_tokens == len(PROMPT) + 7
        await table.serve(tenant=tenant, session=session)
        await table.sessions.close()
        placement = await table.registry.get_session(SessionKey(tenant, session))
        assert placement is not None
        assert placement.epoch == 2

    run_virtual(story())
