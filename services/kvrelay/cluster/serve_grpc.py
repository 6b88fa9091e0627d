"""The public gRPC API on Serve's side: `RouterReplica` inherits the methods that Serve calls by name.

    HAProxy ─▶ Serve's grpc.aio server in the replica ─▶ Generate(request, grpc_context) ─▶ InferenceService

Serve hands the metadata over in `grpc_context`, not the deadline (the SDK sends that as metadata too). It takes code,
details and trailing metadata from it when the method *returns*: `guarded` does that, an exception would lose the
trailers. It cancels the method's task when the client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import _async as reflection_aio

from kvrelay.core.errors import Unauthorised
from kvrelay.pb import inference_pb2 as pb
from kvrelay.router.front import FrontDoor
from kvrelay.router.public_grpc import SERVICE_NAME, CallContext, InferenceService
from kvrelay.rpc.interceptor import guarded

GRPC_SERVICES = (
    "kvrelay.pb.inference_pb2_grpc.add_InferenceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
    "grpc_reflection.v1alpha.reflection_pb2_grpc.add_ServerReflectionServicer_to_server",
)
"""What a Serve cluster must be told to carry (`grpc_options.grpc_servicer_functions`)."""

_REFLECTED = (SERVICE_NAME, health.SERVICE_NAME)
_WATCH_S = 0.5
_LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "ipv6:%5B::ffff:127.", "unix:")
_Handler = Callable[[Any, Any], Any]


class ServeGrpc:
    """Mixin; `_open_grpc` before the first call."""

    def _open_grpc(self, front: FrontDoor, service: InferenceService, *, loopback_only: bool) -> None:
        self._grpc_front = front
        self._loopback_only = loopback_only
        self._generate = self._stream(service.generate, "Generate")
        self._chat = self._stream(service.chat, "Chat")
        self._list_models = self._unary(service.list_models, "ListModels")
        self._tokenize = self._unary(service.tokenize, "Tokenize")
        self._detokenize = self._unary(service.detokenize, "Detokenize")
        self._reflection = reflection_aio.ReflectionServicer(service_names=_REFLECTED)

    async def Generate(self, request: pb.GenerateRequest, grpc_context: Any) -> AsyncIterator[pb.GenerateEvent]:
        async with aclosing(self._generate(request, grpc_context)) as events:
            async for event in events:
                yield event

    async def Chat(self, request: pb.ChatRequest, grpc_context: Any) -> AsyncIterator[pb.GenerateEvent]:
        async with aclosing(self._chat(request, grpc_context)) as events:
            async for event in events:
                yield event

    # After an error there is no response, and Serve wants one: the client sees the status alone.

    async def ListModels(self, request: pb.ListModelsRequest, grpc_context: Any) -> pb.ListModelsResponse:
        return await self._list_models(request, grpc_context) or pb.ListModelsResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: Any) -> pb.TokenizeResponse:
        return await self._tokenize(request, grpc_context) or pb.TokenizeResponse()

    async def Detokenize(self, request: pb.DetokenizeRequest, grpc_context: Any) -> pb.DetokenizeResponse:
        return await self._detokenize(request, grpc_context) or pb.DetokenizeResponse()

    # grpc.health.v1.Health

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        return self._health(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            answer = self._health(request.service)
            if answer != last:
                yield answer
                last = answer
            await asyncio.sleep(_WATCH_S)

    def _health(self, service: str) -> health_pb2.HealthCheckResponse:
        states = health_pb2.HealthCheckResponse
        if service not in ("", SERVICE_NAME):
            return states(status=states.SERVICE_UNKNOWN)
        return states(status=states.SERVING if self._grpc_front.readiness().ready else states.NOT_SERVING)

    # grpc.reflection.v1alpha.ServerReflection: a bidirectional stream by its own standard

    async def ServerReflectionInfo(self, request_stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for answer in self._reflection.ServerReflectionInfo(request_stream, None):
            yield answer

    def _stream(self, handler: _Handler, name: str) -> Callable[[Any, Any], AsyncGenerator[pb.GenerateEvent, None]]:
        async def call(message: Any, context: Any) -> AsyncGenerator[pb.GenerateEvent, None]:
            async with aclosing(handler(message, self._admit(context))) as events:
                async for event in events:
                    yield event

        return guarded(call, name)

    def _unary(self, handler: _Handler, name: str) -> _Handler:
        async def call(message: Any, context: Any) -> Any:
            return await handler(message, self._admit(context))

        return guarded(call, name)

    def _admit(self, context: Any) -> CallContext:
        """Serve's gRPC servers listen on all interfaces; a cluster without keys is for this machine alone."""
        if self._loopback_only and not str(context.peer()).startswith(_LOOPBACK):
            raise Unauthorised("this server answers its own machine only")
        pairs = context.invocation_metadata() or ()
        return CallContext({key.lower(): value for key, value in pairs if isinstance(value, str)})
