"""What the public gRPC API is asked, checked by the same rules as HTTP, as a `GenerateRequest`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.core.errors import BadRequest, DeadlineExceeded, UnknownModel
from kvrelay.core.ids import RequestId, SessionId, TokenId
from kvrelay.core.output import GenerateRequest
from kvrelay.pb import inference_pb2 as pb
from kvrelay.router.front import FrontDoor
from kvrelay.router.limits import check_ids, check_length, encode_prompt, resolve_max_tokens
from kvrelay.router.openai_fields import MAX_NAME_CHARS, MAX_STOP_CHARS, MAX_STOPS
from kvrelay.router.sampling import build_sampling

TIMEOUT_METADATA = "kvrelay-timeout-ms"
SESSION_METADATA = "x-session-id"
LARGE_TEXT_CHARS = 32 << 10
"""From here on a prompt is tokenised on a thread, so that other streams do not wait for it."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_OPTIONAL = (
    "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logprobs", "min_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a transport tells about a call. Serve's proxy hides the deadline, so the metadata carries it too."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """Keys in lower case."""
    deadline_s: float | None = None
    """Seconds left, as the transport sees it."""


def timeout_s(call: CallContext, front: FrontDoor) -> float:
    """The smallest of the call's deadline, its metadata and the router's own limit."""
    limits = [front.settings.deadline_s]
    if call.deadline_s is not None:
        limits.append(call.deadline_s)
    text = call.metadata.get(TIMEOUT_METADATA)
    if text is not None:
        if not (text.isascii() and text.isdigit() and len(text) <= 12):
            raise BadRequest(f"{TIMEOUT_METADATA} is a whole number of milliseconds, found {text[:32]!r}")
        limits.append(int(text) / 1e3)
    if min(limits) <= 0:
        raise DeadlineExceeded("the deadline had passed before the request arrived")
    return min(limits)


def check_model(model: str, front: FrontDoor) -> str:
    """Left empty, it is the one model that is served here."""
    served = front.model_card().served_name
    if model and model != served:
        raise UnknownModel(f"the model {model[:MAX_NAME_CHARS]!r} is not served here; {served!r} is", param="model")
    return served


async def from_generate(message: pb.GenerateRequest, call: CallContext, front: FrontDoor) -> GenerateRequest:
    check_model(message.model, front)
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise BadRequest("prompt: give text or ids", param="prompt")
    if kind == "ids":
        prompt_ids = check_ids(message.ids.ids, front.tokenizer.vocab_size, param="prompt")
    else:
        prompt_ids = await encode_text(message.text, front, param="prompt")
    return _request(message, prompt_ids, call, front, "grpc_generate")


async def from_chat(message: pb.ChatRequest, call: CallContext, front: FrontDoor) -> GenerateRequest:
    check_model(message.model, front)
    messages = [_chat_message(each, f"messages[{i}]") for i, each in enumerate(message.messages)]
    if not messages:
        raise BadRequest("messages: at least one message", param="messages")
    num_chars = 0
    for each in messages:
        check_length(front.tokenizer, each["content"], front.model_card().max_context, param="messages")
        num_chars += len(each["content"])
    ids = await maybe_on_a_thread(num_chars, front.tokenizer.encode_chat, messages)
    return _request(message, tuple(TokenId(token_id) for token_id in ids), call, front, "grpc_chat")


async def encode_text(text: str, front: FrontDoor, *, param: str) -> tuple[TokenId, ...]:
    max_context = front.model_card().max_context

    def encode() -> tuple[TokenId, ...]:
        return encode_prompt(front.tokenizer, text, max_context, param=param)

    ids: tuple[TokenId, ...] = await maybe_on_a_thread(len(text), encode)
    return ids


async def maybe_on_a_thread(size: int, work: Any, *args: Any) -> Any:
    """`size`: characters or tokens. What takes long must not hold up the streams and beats of this loop."""
    return await asyncio.to_thread(work, *args) if size >= LARGE_TEXT_CHARS else work(*args)


def _request(
    message: pb.GenerateRequest | pb.ChatRequest, prompt_ids: tuple[TokenId, ...], call: CallContext, front: FrontDoor,
    endpoint: str,
) -> GenerateRequest:
    options = message.options
    n = options.n if options.HasField("n") else 1
    if not 1 <= n <= front.settings.max_choices:
        raise BadRequest(f"n must be from 1 to {front.settings.max_choices}, found {n}", param="n")
    requested = options.max_tokens if options.HasField("max_tokens") else None
    max_tokens = resolve_max_tokens(len(prompt_ids), requested, front.model_card().max_context)
    vocab_size = front.tokenizer.vocab_size
    given: dict[str, Any] = {name: getattr(options, name) for name in _OPTIONAL if options.HasField(name)}
    sampling = build_sampling(
        max_tokens=max_tokens, vocab_size=vocab_size, logit_bias=dict(options.logit_bias),
        stop_token_ids=tuple(options.stop_token_ids), ignore_eos=options.ignore_eos, **given,
    )
    session = call.metadata.get(SESSION_METADATA) or message.session_id
    return GenerateRequest(
        request_id=RequestId(uuid.uuid4().hex),
        prompt_ids=prompt_ids,
        sampling=sampling,
        n=n,
        stop=_stops(options.stop),
        session=SessionId(_name(session, "session_id")) if session else None,
        priority=options.priority,
        timeout_s=timeout_s(call, front),
        resume=_resume(message, n, max_tokens, vocab_size),
        open_ended=requested is None,
        resume_chars=message.resume_chars if message.HasField("resume_chars") else None,
        endpoint=endpoint,
    )


def _resume(
    message: pb.GenerateRequest | pb.ChatRequest, n: int, max_tokens: int, vocab_size: int
) -> tuple[TokenId, ...]:
    ids = message.resume
    if not ids and not message.resume_chars:
        return ()
    if n != 1:
        raise BadRequest("resume continues one choice; n must be 1", param="resume")
    if not message.options.HasField("seed"):
        raise BadRequest("resume needs the seed that `started` told", param="resume")
    if len(ids) > max_tokens:
        raise BadRequest(f"resume brings {len(ids)} tokens, more than max_tokens {max_tokens}", param="resume")
    return check_ids(ids, vocab_size, param="resume") if ids else ()


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"stop: at most {MAX_STOPS} strings, found {len(stops)}", param="stop")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise BadRequest(f"stop strings have 1 to {MAX_STOP_CHARS} characters, found {len(stop)}", param="stop")
    return tuple(stops)


def _chat_message(message: pb.ChatMessage, param: str) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise BadRequest(f"{param}.role: one of {', '.join(sorted(_ROLES))}, found {message.role[:32]!r}", param=param)
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = _name(message.name, f"{param}.name")
    return fields


def _name(text: str, param: str) -> str:
    if len(text) > MAX_NAME_CHARS:
        raise BadRequest(f"{param} has at most {MAX_NAME_CHARS} characters, found {len(text)}", param=param)
    return text
