"""The public gRPC methods as Serve calls them: by name, with a context that takes the status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from kvrelay.cluster.serve_grpc import ServeGrpc
from kvrelay.pb import inference_pb2 as pb
from kvrelay.router.fakes import FakeFront
from kvrelay.router.front import Readiness
from kvrelay.router.public_grpc import InferenceService
from kvrelay.text.tokenizer import Tokenizer
from tests.support.tiny import write_tokenizer


class FakeContext:
    """`ray.serve.grpc_util.RayServegRPCContext`, as far as it is used."""

    def __init__(self, peer: str = "ipv4:127.0.0.1:4711", **metadata: str) -> None:
        self._peer = peer
        self._metadata = list(metadata.items())
        self.status: grpc.StatusCode | None = None
        self.details = ""
        self.trailers: dict[str, Any] = {}

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.status = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, pairs: Any) -> None:
        self.trailers = dict(pairs)


@pytest.fixture
def front(tmp_path: Path) -> FakeFront:
    return FakeFront(Tokenizer.from_directory(write_tokenizer(tmp_path)))


@pytest.fixture
def replica(front: FakeFront) -> ServeGrpc:
    served = ServeGrpc()
    served._open_grpc(front, InferenceService(front), loopback_only=True)
    return served


async def test_a_stream_ends_with_a_summary(replica: ServeGrpc) -> None:
    context = FakeContext()
    request = pb.GenerateRequest(text="abc", options=pb.Options(max_tokens=2))
    kinds = [event.WhichOneof("kind") async for event in replica.Generate(request, grpc_context=context)]
    assert kinds[0] == "started"
    assert kinds[-1] == "summary"
    assert context.status is None


async def test_an_error_of_a_stream_is_a_status_with_its_trailer(replica: ServeGrpc) -> None:
    context = FakeContext()
    request = pb.GenerateRequest(text="abc", model="another")
    assert [event async for event in replica.Generate(request, grpc_context=context)] == []
    assert context.status is grpc.StatusCode.NOT_FOUND
    assert "kvrelay-error-bin" in context.trailers


async def test_an_error_of_a_unary_call_still_returns_a_message(replica: ServeGrpc) -> None:
    context = FakeContext()
    answer = await replica.Tokenize(pb.TokenizeRequest(text="abc", model="another"), grpc_context=context)
    assert answer == pb.TokenizeResponse()
    assert context.status is grpc.StatusCode.NOT_FOUND


async def test_leaving_the_stream_leaves_the_front_door(replica: ServeGrpc, front: FakeFront) -> None:
    events = replica.Generate(pb.GenerateRequest(text="abcdef"), grpc_context=FakeContext())
    await anext(events)
    assert front.num_open == 1
    await events.aclose()  # type: ignore[attr-defined]  # it is a generator, as Serve knows too
    assert front.num_open == 0


@pytest.mark.parametrize(
    ("peer", "is_welcome"),
    [
        ("ipv4:127.0.0.1:1", True),
        ("ipv6:[::1]:1", True),
        ("ipv6:%5B::1%5D:1", True),
        ("ipv6:[::ffff:127.0.0.1]:1", True),
        ("ipv4:192.0.2.7:1", False),
        ("ipv6:[2001:db8::1]:1", False),
    ],
)
async def test_without_keys_only_this_machine_is_answered(replica: ServeGrpc, peer: str, is_welcome: bool) -> None:
    context = FakeContext(peer)
    await replica.ListModels(pb.ListModelsRequest(), grpc_context=context)
    assert (context.status is None) is is_welcome
    if not is_welcome:
        assert context.status is grpc.StatusCode.UNAUTHENTICATED


async def test_health_follows_readiness(replica: ServeGrpc, front: FakeFront) -> None:
    states = health_pb2.HealthCheckResponse
    assert (await replica.Check(health_pb2.HealthCheckRequest())).status == states.SERVING
    watch = replica.Watch(health_pb2.HealthCheckRequest(service="kvrelay.v1.Inference"))
    assert (await anext(watch)).status == states.SERVING
    front.state = Readiness(False, "no worker is attached")
    assert (await anext(watch)).status == states.NOT_SERVING
    assert (await replica.Check(health_pb2.HealthCheckRequest(service="x"))).status == states.SERVICE_UNKNOWN
