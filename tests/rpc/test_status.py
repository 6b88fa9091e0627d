"""One table, both ways, with and without the trailer."""

from __future__ import annotations

import grpc
import pytest

from kvrelay.core import errors
from kvrelay.rpc.limits import channel_options, server_options
from kvrelay.rpc.status import ERROR_TRAILER, STATUS, error_from_status, set_status


class Context:
    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, bytes], ...]) -> None:
        self.trailer = trailing_metadata


def there_and_back(error: errors.KvrelayError) -> errors.KvrelayError:
    context = Context()
    set_status(context, error)
    return error_from_status(context.code, context.details, context.trailer)


def every_error() -> list[errors.KvrelayError]:
    kinds = [errors.KvrelayError]
    for kind in kinds:  # the tree of core; a package above may refine a leaf for itself
        kinds.extend(child for child in kind.__subclasses__() if child.__module__ == errors.__name__)
    return [
        kind("why", retry_after_s=2.5) if issubclass(kind, errors.Overloaded | errors.Unavailable) else kind("why")
        for kind in kinds
    ]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_every_error_comes_back_as_itself(error: errors.KvrelayError) -> None:
    back = there_and_back(error)
    assert type(error) in STATUS
    assert type(back) in (type(error), *{errors.Rejected: [errors.BadRequest]}.get(type(error), []), errors.Broken)
    assert (back.message, back.code, back.param) == (error.message, error.code, error.param)
    assert getattr(back, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_leaves_of_the_tree_keep_their_kind() -> None:
    for error in every_error():
        if not type(error).__subclasses__() and type(error) is not errors.Broken:
            assert type(there_and_back(error)) is type(error)


def test_param_and_a_code_of_its_own_travel() -> None:
    back = there_and_back(errors.BadRequest("too long", param="prompt", code="context_length_exceeded"))
    assert isinstance(back, errors.BadRequest)
    assert (back.param, back.code) == ("prompt", "context_length_exceeded")


def test_a_long_message_is_cut_to_what_headers_can_carry() -> None:
    context = Context()
    set_status(context, errors.BadRequest("x" * 100_000))
    assert len(context.details) + len(context.trailer[0][1]) < 4_000


@pytest.mark.parametrize(
    ("status", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", errors.Unavailable),
        (grpc.StatusCode.UNKNOWN, "Received http2 header with status: 500", errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 8)", errors.TooLarge),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", errors.Overloaded),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", errors.Broken),
    ],
)
def test_answers_without_our_trailer(status: grpc.StatusCode, details: str, kind: type[errors.KvrelayError]) -> None:
    error = error_from_status(status, details)
    assert type(error) is kind
    assert error.message == details


def test_a_garbled_trailer_is_no_trailer() -> None:
    error = error_from_status(grpc.StatusCode.INVALID_ARGUMENT, "no", [(ERROR_TRAILER, b"\xff\xff")])
    assert type(error) is errors.BadRequest


def test_no_message_size_is_unlimited() -> None:
    for options in (channel_options(), channel_options(public=True), server_options(), server_options(public=True)):
        sizes = [value for name, value in options if name.endswith("message_length")]
        assert len(sizes) == 2
        assert all(isinstance(size, int) and size > 0 for size in sizes)
    with pytest.raises(ValueError, match="never unlimited"):
        server_options(public=True, max_message_bytes=-1)


def test_servers_allow_the_pings_of_our_channels() -> None:
    for public in (False, True):
        ping = dict(channel_options(public=public))["grpc.keepalive_time_ms"]
        allowed = dict(server_options(public=public))["grpc.http2.min_recv_ping_interval_without_data_ms"]
        assert int(allowed) < int(ping)
