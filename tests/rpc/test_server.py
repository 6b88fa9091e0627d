"""Real calls over loopback: what a handler raises is what the caller catches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.core import errors
from kvrelay.pb import inference_pb2 as pb
from kvrelay.pb import inference_pb2_grpc as pb_grpc
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.health import Health
from kvrelay.rpc.server import bind, new_server
from kvrelay.rpc.status import error_from_call


class Moody(pb_grpc.InferenceServicer):
    """Fails as the model name says."""

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        raise ZeroDivisionError("secret")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        if request.model == "abort":
            await context.abort(grpc.StatusCode.ABORTED, "as told")
        if request.model:
            raise errors.UnknownModel(f"no model {request.model}", param="model")
        return pb.TokenizeResponse(ids=[len(request.text)])

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        yield pb.GenerateEvent(delta=pb.DeltaEvent(text="one"))
        raise errors.NoRoom("full", retry_after_s=3.0)


@pytest.fixture
async def stub() -> AsyncIterator[pb_grpc.InferenceStub]:
    server = new_server(public=True)
    pb_grpc.add_InferenceServicer_to_server(Moody(), server)
    health = Health(server, ["kvrelay.v1.Inference"])
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    await health.set_serving(True)
    channel = open_channel(f"127.0.0.1:{port}")
    stub = pb_grpc.InferenceStub(channel)
    stub.channel = channel
    stub.port = port
    yield stub
    await channel.close()
    await server.stop(0)


async def test_an_error_arrives_as_itself(stub: pb_grpc.InferenceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(pb.TokenizeRequest(model="x"), timeout=5)
    error = error_from_call(caught.value)
    assert type(error) is errors.UnknownModel
    assert (error.message, error.param) == ("no model x", "model")


async def test_a_bug_tells_nothing_and_the_server_lives_on(
    stub: pb_grpc.InferenceStub, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListModels(pb.ListModelsRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()
    assert "ListModels" in caplog.text
    assert (await stub.Tokenize(pb.TokenizeRequest(text="abc"), timeout=5)).ids == [3]


async def test_a_stream_ends_with_its_error_after_what_it_said(stub: pb_grpc.InferenceStub) -> None:
    call = stub.Generate(pb.GenerateRequest(), timeout=5)
    assert (await call.read()).delta.text == "one"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = error_from_call(caught.value)
    assert type(error) is errors.NoRoom
    assert error.retry_after_s == 3.0


async def test_abort_passes_through(stub: pb_grpc.InferenceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(pb.TokenizeRequest(model="abort"), timeout=5)
    assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_a_message_over_the_limit_names_sizes(stub: pb_grpc.InferenceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(pb.TokenizeRequest(text="x" * (9 << 20)), timeout=5)
    error = error_from_call(caught.value)
    assert type(error) is errors.TooLarge
    assert str(8 << 20) in error.message


async def test_health_says_serving(stub: pb_grpc.InferenceStub) -> None:
    health = health_pb2_grpc.HealthStub(stub.channel)
    for name in ("", "kvrelay.v1.Inference"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_taken_port_is_an_error(stub: pb_grpc.InferenceStub) -> None:
    with pytest.raises(OSError, match="cannot listen"):
        bind(new_server(), "127.0.0.1", stub.port)
