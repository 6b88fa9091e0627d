"""Python values to protobuf and back. Values that cannot be sent are BadRequest and name their field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kvrelay.client.events import Delta, Event, Finished, ModelInfo, Started, Summary
from kvrelay.client.options import Conversation, Options
from kvrelay.core.errors import BadRequest
from kvrelay.core.output import Timing
from kvrelay.pb import inference_pb2 as pb
from kvrelay.rpc.tokens import tokens_from_pb

T = TypeVar("T")
AskMessage = pb.GenerateRequest | pb.ChatRequest
_CALL_OPTIONS = frozenset({"timeout_s", "request_id"})
_MESSAGE_OPTIONS = frozenset({"model", "session_id"})


def generate_request(prompt: str | Sequence[int], options: Options) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    if isinstance(prompt, str):
        _checked("prompt", lambda: setattr(message, "text", prompt))
    else:
        message.ids.SetInParent()
        _checked("prompt", lambda: message.ids.ids.extend(prompt))
    _fill(message, options)
    return message


def chat_request(conversation: Conversation, options: Options) -> pb.ChatRequest:
    if isinstance(conversation, str):
        conversation = [{"role": "user", "content": conversation}]
    message = pb.ChatRequest()
    for place, entry in enumerate(conversation):
        message.messages.append(_checked(f"messages[{place}]", partial(_chat_message, entry)))
    _fill(message, options)
    return message


def tokenize_request(text: str, model: str, add_special_tokens: bool) -> pb.TokenizeRequest:
    return _checked(
        "text", lambda: pb.TokenizeRequest(model=model, text=text, no_special_tokens=not add_special_tokens)
    )


def detokenize_request(ids: Sequence[int], model: str) -> pb.DetokenizeRequest:
    return _checked("ids", lambda: pb.DetokenizeRequest(model=model, ids=ids))


def event_from_pb(message: pb.GenerateEvent) -> Event | None:
    """None for a kind that this version does not know."""
    match message.WhichOneof("kind"):
        case "started":
            started = message.started
            return Started(started.request_id, started.seed, started.num_prompt_tokens, started.model)
        case "delta":
            delta = message.delta
            return Delta(delta.text, delta.choice, delta.first_index, tokens_from_pb(delta.tokens))
        case "finish":
            return _finished(message.finish)
        case "summary":
            return _summary(message.summary)
    return None


def models_from_pb(message: pb.ListModelsResponse) -> list[ModelInfo]:
    return [ModelInfo(model.id, model.max_context) for model in message.models]


def _finished(finish: pb.FinishEvent) -> Finished:
    stop: str | int | None = finish.stop_string or None
    if finish.HasField("stop_token_id"):
        stop = finish.stop_token_id
    return Finished(finish.finish_reason, finish.choice, stop)


def _summary(summary: pb.SummaryEvent) -> Summary:
    ms = summary.timing_ms
    timing = Timing(ms.queue, ms.reserve, ms.prefill, ms.first_token, ms.transfer_hidden, ms.transfer_unhidden)
    return Summary(
        summary.num_prompt_tokens, summary.num_output_tokens, summary.num_cached_tokens, timing, summary.mode,
        max(1, summary.num_attempts),
    )


def _chat_message(entry: Any) -> pb.ChatMessage:
    if not isinstance(entry, Mapping):
        raise TypeError(f'expected something like {{"role": "user", "content": "Hello"}}, found {type(entry).__name__}')
    return pb.ChatMessage(**entry)


def _fill(message: AskMessage, options: Options) -> None:
    for name, value in options.items():
        if value is None or name in _CALL_OPTIONS:
            continue
        target = message if name in _MESSAGE_OPTIONS else message.options
        _checked(name, partial(_set, target, name, value))


def _set(target: Any, name: str, value: Any) -> None:
    if name not in target.DESCRIPTOR.fields_by_name:
        raise TypeError(f"unknown option {name!r}")
    if name == "logit_bias":
        target.logit_bias.update(value)
    elif name == "stop" and isinstance(value, str):
        target.stop.append(value)
    elif name in ("stop", "stop_token_ids"):
        getattr(target, name).extend(value)
    else:
        setattr(target, name, value)


def _checked(name: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{name}: {error}", param=name) from error
