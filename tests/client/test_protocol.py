"""The protocol without a network: how long, how often, and what a resume sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.client._channels import MAX_CHANNELS_PER_TARGET, MAX_STREAMS_PER_CHANNEL, ChannelPool
from kvrelay.client._messages import generate_request
from kvrelay.client._protocol import Attempts, Exchange
from kvrelay.client.events import Delta, Event, Finished, Started, Summary
from kvrelay.client.options import RetryPolicy
from kvrelay.core.clock import FakeClock
from kvrelay.core.errors import Broken, DeadlineExceeded, KvrelayError, NoRoom, Unavailable
from kvrelay.rpc.limits import PUBLIC_MIN_PING_INTERVAL_MS, channel_options
from tests.client.scripted import delta, finish, started, summary


def attempts(clock: FakeClock, *, timeout_s: float = 600.0, max_attempts: int = 5) -> Attempts:
    policy = RetryPolicy(max_attempts=max_attempts, first_pause_s=0.1, max_pause_s=1.0)
    return Attempts(policy, timeout_s, clock, dice=lambda: 0.0)


def test_pauses_double_up_to_the_longest() -> None:
    tries = attempts(FakeClock(), max_attempts=8)
    pauses = [tries.pause_after(Unavailable("gone")) for _ in range(7)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])
    with pytest.raises(Unavailable):
        tries.pause_after(Unavailable("gone"))


def test_a_longer_wish_of_the_server_wins() -> None:
    assert attempts(FakeClock()).pause_after(NoRoom("full", retry_after_s=7.0)) == 7.0


def test_no_pause_beyond_the_deadline() -> None:
    clock = FakeClock()
    tries = attempts(clock, timeout_s=10.0)
    with pytest.raises(NoRoom):
        tries.pause_after(NoRoom("full", retry_after_s=10.0))
    clock.advance(9.0)
    assert tries.left_s() == pytest.approx(1.0)
    clock.advance(1.0)
    with pytest.raises(DeadlineExceeded, match="10 s"):
        tries.left_s()


def test_our_bugs_are_final() -> None:
    with pytest.raises(Broken):
        attempts(FakeClock()).pause_after(Broken("bug"))


@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=12), st.lists(st.integers(0, 15), max_size=6))
def test_wherever_it_breaks_no_token_is_lost_or_repeated(ids: list[int], cuts: list[int]) -> None:
    """A server that continues at `resume`, cut at arbitrary places, gives the tokens of an undisturbed one."""
    exchange = Exchange(generate_request("x", {}), attempts(FakeClock(), max_attempts=50))
    seen: list[Event] = []
    left = iter(cuts)
    while not exchange.is_over:
        have = len(exchange.request().resume)
        assert list(exchange.request().resume) == ids[:have]
        deltas = [delta(index, ids[index]) for index in range(have, len(ids))]
        answer = [started(), *deltas, finish(), summary(len(ids))]
        stop = next(left, len(answer))
        seen += [event for message in answer[:stop] if (event := exchange.receive(message)) is not None]
        if stop < len(answer):
            outcome = _pause(exchange)
            seen += [outcome] if isinstance(outcome, Summary) else []
    assert [token.token_id for event in seen if isinstance(event, Delta) for token in event.tokens] == ids
    assert [type(event) for event in seen].count(Started) == 1
    assert [type(event) for event in seen].count(Finished) == 1
    assert isinstance(seen[-1], Summary)
    assert seen[-1].num_output_tokens == len(ids)


def _pause(exchange: Exchange) -> float | Summary:
    try:
        ended = exchange.ended()
    except KvrelayError as error:
        return exchange.pause_after(error)
    assert ended is not None
    return ended


def test_streams_spread_over_connections() -> None:
    opened: list[str] = []

    def open_channel(target: str) -> str:
        opened.append(target)
        return f"{target}/{len(opened)}"

    pool: ChannelPool[str] = ChannelPool(("a", "b"), open_channel)
    leases = [pool.lease(0) for _ in range(2 * MAX_STREAMS_PER_CHANNEL + 1)]
    channels = [lease.__enter__() for lease in leases]
    assert len(set(channels)) == 3
    for lease in leases:
        lease.__exit__(None, None, None)
    with pool.lease(1) as channel:
        assert channel.startswith("b/")
    with pool.lease(0):
        assert opened.count("a") == 3, "connections are kept"
    assert len(pool.close()) == 4
    with pytest.raises(RuntimeError, match="closed"), pool.lease(0):
        pass


def test_connections_are_bounded() -> None:
    pool: ChannelPool[object] = ChannelPool(("a",), lambda target: object())
    leases = [pool.lease(0) for _ in range(MAX_STREAMS_PER_CHANNEL * MAX_CHANNELS_PER_TARGET + 10)]
    assert len({id(lease.__enter__()) for lease in leases}) == MAX_CHANNELS_PER_TARGET


def test_the_server_allows_our_keepalive() -> None:
    """GRP-02: a stock server allows one ping in five minutes without calls, so there are none then."""
    options = dict(channel_options(public=True))
    assert int(options["grpc.keepalive_time_ms"]) >= PUBLIC_MIN_PING_INTERVAL_MS
    assert options["grpc.keepalive_permit_without_calls"] == 0
