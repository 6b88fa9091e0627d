"""A real gRPC server that plays a script: what each call answers, step by step. Remembers what it was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

import grpc

from kvrelay.core.errors import KvrelayError
from kvrelay.pb import common_pb2, inference_pb2_grpc
from kvrelay.pb import inference_pb2 as pb
from kvrelay.rpc.server import bind, new_server


class Hang:
    """Say nothing more; the call ends when the client leaves."""


class Cut:
    """The end of the stream without a word, as a proxy makes it."""


Step = pb.GenerateEvent | KvrelayError | Hang | Cut
Script = Sequence[Step]


def started(seed: int = 7, num_prompt_tokens: int = 3) -> pb.GenerateEvent:
    return pb.GenerateEvent(
        started=pb.StartedEvent(request_id="r1", seed=seed, num_prompt_tokens=num_prompt_tokens, model="demo")
    )


def delta(first_index: int, *ids: int, text: str = "", choice: int = 0) -> pb.GenerateEvent:
    column = common_pb2.TokenColumn(ids=ids)
    shown = text or "".join(f"<{token_id}>" for token_id in ids)
    return pb.GenerateEvent(delta=pb.DeltaEvent(choice=choice, first_index=first_index, text=shown, tokens=column))


def finish(choice: int = 0, reason: str = "stop") -> pb.GenerateEvent:
    return pb.GenerateEvent(finish=pb.FinishEvent(choice=choice, finish_reason=reason, stop_token_id=2))


def summary(num_output_tokens: int = 3) -> pb.GenerateEvent:
    message = pb.SummaryEvent(num_prompt_tokens=3, num_output_tokens=num_output_tokens, mode="relay")
    message.timing_ms.first_token = 12.5
    return pb.GenerateEvent(summary=message)


WHOLE: Script = (started(), delta(0, 10), delta(1, 11, 12), finish(), summary())


class ScriptedServer(inference_pb2_grpc.InferenceServicer):
    """`with ScriptedServer(script, script, ...) as server:` — one script per call; the last one repeats."""

    def __init__(self, *scripts: Script, credentials: grpc.ServerCredentials | None = None) -> None:
        self._scripts = list(scripts) or [WHOLE]
        self._credentials = credentials
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: grpc.aio.Server | None = None
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.left_s: list[float] = []
        self.peers: set[str] = set()
        self.num_open = 0
        self.cancelled = threading.Semaphore(0)
        """Released once per call that the client left."""
        self.port = 0

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        async for message in self._play(request, context):
            yield message

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        async for message in self._play(request, context):
            yield message

    async def Tokenize(self, request: Any, context: Any) -> pb.TokenizeResponse:
        for step in self._next(request, context):
            if isinstance(step, KvrelayError):
                raise step
        return pb.TokenizeResponse(ids=request.text.encode())

    async def Detokenize(self, request: Any, context: Any) -> pb.DetokenizeResponse:
        self._next(request, context)
        return pb.DetokenizeResponse(text=bytes(request.ids).decode())

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        self._next(request, context)
        return pb.ListModelsResponse(models=[pb.Model(id="demo", max_context=128)])

    async def _play(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        self.num_open += 1
        try:
            for step in self._next(request, context):
                if isinstance(step, KvrelayError):
                    raise step
                if isinstance(step, Cut):
                    return
                if isinstance(step, Hang):
                    await asyncio.Event().wait()
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.release()
            raise
        finally:
            self.num_open -= 1

    def _next(self, request: Any, context: Any) -> Script:
        copy = type(request)()
        copy.CopyFrom(request)
        self.requests.append(copy)
        self.metadata.append(dict(context.invocation_metadata()))
        self.left_s.append(context.time_remaining() or 0.0)
        self.peers.add(context.peer())
        return self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]

    async def _start(self) -> None:
        self._server = new_server(public=True)
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        if self._credentials is None:
            self.port = bind(self._server, "127.0.0.1", 0)
        else:
            self.port = self._server.add_secure_port("127.0.0.1:0", self._credentials)
        await self._server.start()

    async def _stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)
