"""The public gRPC API: the same requests as over HTTP, in front of any `FrontDoor`.

    transport (grpc.aio or Serve's) ─CallContext─▶ InferenceService ─GenerateRequest─▶ FrontDoor.generate
                                                        └─ KvrelayError out: the transport sets the status

A client that leaves cancels the handler; leaving its generator cancels the request on every worker.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from kvrelay.core.output import ChoiceFinished, Delta, GenerateRequest, Output, Started, Summary
from kvrelay.pb import inference_pb2 as pb
from kvrelay.pb import inference_pb2_grpc
from kvrelay.router.front import FrontDoor
from kvrelay.router.grpc_requests import CallContext, check_model, from_chat, from_generate, maybe_on_a_thread
from kvrelay.router.limits import check_ids, check_length
from kvrelay.rpc.tokens import tokens_to_pb

SERVICE_NAME = "kvrelay.v1.Inference"

__all__ = ["SERVICE_NAME", "CallContext", "InferenceService"]


class InferenceService:
    """Transport-neutral: plain messages in and out, KvrelayErrors raised."""

    def __init__(self, front: FrontDoor) -> None:
        self._front = front

    async def generate(self, message: pb.GenerateRequest, call: CallContext) -> AsyncGenerator[pb.GenerateEvent, None]:
        await self._front.until_known()
        request = await from_generate(message, call, self._front)
        async with aclosing(self._events(request)) as events:
            async for event in events:
                yield event

    async def chat(self, message: pb.ChatRequest, call: CallContext) -> AsyncGenerator[pb.GenerateEvent, None]:
        await self._front.until_known()
        request = await from_chat(message, call, self._front)
        async with aclosing(self._events(request)) as events:
            async for event in events:
                yield event

    async def list_models(self, _: pb.ListModelsRequest, call: CallContext) -> pb.ListModelsResponse:
        card = self._front.model_card()
        return pb.ListModelsResponse(models=[pb.Model(id=card.served_name, max_context=card.max_context)])

    async def tokenize(self, message: pb.TokenizeRequest, call: CallContext) -> pb.TokenizeResponse:
        check_model(message.model, self._front)
        tokenizer = self._front.tokenizer
        check_length(tokenizer, message.text, self._front.model_card().max_context, param="text")
        encode = partial(tokenizer.encode, message.text, add_bos=not message.no_special_tokens)
        return pb.TokenizeResponse(ids=await maybe_on_a_thread(len(message.text), encode))

    async def detokenize(self, message: pb.DetokenizeRequest, call: CallContext) -> pb.DetokenizeResponse:
        check_model(message.model, self._front)
        tokenizer = self._front.tokenizer
        ids = check_ids(message.ids, tokenizer.vocab_size, param="ids") if message.ids else ()
        return pb.DetokenizeResponse(text=await maybe_on_a_thread(len(ids), tokenizer.decode, ids))

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """The server needs `rpc.interceptor.ErrorInterceptor`; `rpc.server.new_server` has it."""
        inference_pb2_grpc.add_InferenceServicer_to_server(_Servicer(self), server)  # type: ignore[no-untyped-call]

    async def _events(self, request: GenerateRequest) -> AsyncGenerator[pb.GenerateEvent, None]:
        served_name = self._front.model_card().served_name
        outputs = self._front.generate(request)
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                yield event_to_pb(output, served_name)


def event_to_pb(output: Output, served_name: str) -> pb.GenerateEvent:
    match output:
        case Started():
            started = pb.StartedEvent(
                request_id=output.request_id, seed=output.seed, num_prompt_tokens=output.num_prompt_tokens,
                model=served_name,
            )
            return pb.GenerateEvent(started=started)
        case Delta():
            delta = pb.DeltaEvent(
                choice=output.choice, first_index=output.first_index, text=output.text,
                tokens=tokens_to_pb(output.tokens),
            )
            return pb.GenerateEvent(delta=delta)
        case ChoiceFinished():
            return pb.GenerateEvent(finish=_finish_to_pb(output))
        case Summary():
            return pb.GenerateEvent(summary=_summary_to_pb(output))


def _finish_to_pb(output: ChoiceFinished) -> pb.FinishEvent:
    finish = pb.FinishEvent(choice=output.choice, finish_reason=output.finish_reason)
    if isinstance(output.stop_reason, str):
        finish.stop_string = output.stop_reason
    elif output.stop_reason is not None:
        finish.stop_token_id = output.stop_reason
    return finish


def _summary_to_pb(output: Summary) -> pb.SummaryEvent:
    timing = output.timing
    return pb.SummaryEvent(
        num_prompt_tokens=output.num_prompt_tokens,
        num_output_tokens=output.num_output_tokens,
        num_cached_tokens=output.num_cached_tokens,
        timing_ms=pb.TimingMs(
            queue=timing.queue, reserve=timing.reserve, prefill=timing.prefill, first_token=timing.first_token,
            transfer_hidden=timing.transfer_hidden, transfer_unhidden=timing.transfer_unhidden,
        ),
        mode=output.mode,
        num_attempts=output.num_attempts,
    )


class _Servicer(inference_pb2_grpc.InferenceServicer):
    """grpc.aio's side. Errors are the interceptor's business."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncGenerator[pb.GenerateEvent, None]:
        async with aclosing(self._service.generate(request, _call(context))) as events:
            async for event in events:
                yield event

    async def Chat(self, request: pb.ChatRequest, context: Any) -> AsyncGenerator[pb.GenerateEvent, None]:
        async with aclosing(self._service.chat(request, _call(context))) as events:
            async for event in events:
                yield event

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return await self._service.list_models(request, _call(context))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return await self._service.tokenize(request, _call(context))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return await self._service.detokenize(request, _call(context))


def _call(context: Any) -> CallContext:
    metadata = {key.lower(): value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return CallContext(metadata, context.time_remaining())
