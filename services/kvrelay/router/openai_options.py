"""What chat and completions have in common, from model name to stream options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.core.errors import BadRequest, UnknownModel
from kvrelay.core.ids import RequestId, SessionId, TokenId
from kvrelay.core.output import GenerateRequest
from kvrelay.router.front import FrontDoor
from kvrelay.router.limits import resolve_max_tokens
from kvrelay.router.openai_fields import MAX_NAME_CHARS, Fields, well_formed
from kvrelay.router.sampling import build_sampling

MAX_PRIORITY = 2**31 - 1
_UNSUPPORTED = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "prompt_logprobs",
    "functions", "function_call", "suffix", "audio",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    n: int
    max_tokens: int | None
    max_tokens_param: str
    sampling: Mapping[str, Any]
    """Keyword arguments of `build_sampling`, all but the resolved `max_tokens`."""
    stop: tuple[str, ...]
    session: SessionId | None
    priority: int
    stream: bool
    include_usage: bool


def read_options(
    fields: Fields, front: FrontDoor, session_header: str | None, *, logprobs: int | None, logprobs_param: str
) -> Options:
    """Raises BadRequest or UnknownModel; nothing has started by then."""
    model = _model(fields, front)
    _refuse_unsupported(fields)
    stream = fields.boolean("stream") or False
    max_tokens_param = "max_tokens" if fields.get("max_completion_tokens") is None else "max_completion_tokens"
    return Options(
        model=model,
        n=_with_default(fields.count("n", 1, front.settings.max_choices), 1),
        max_tokens=fields.integer(max_tokens_param),
        max_tokens_param=max_tokens_param,
        sampling=_sampling(fields, front, logprobs, logprobs_param),
        stop=fields.stops(),
        session=_session(fields, session_header),
        priority=_with_default(fields.count("priority", -MAX_PRIORITY, MAX_PRIORITY), 0),
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )


def generate_request(
    front: FrontDoor, options: Options, request_id: RequestId, prompt_ids: tuple[TokenId, ...], *, endpoint: str
) -> GenerateRequest:
    max_tokens = resolve_max_tokens(
        len(prompt_ids), options.max_tokens, front.model_card().max_context, param=options.max_tokens_param
    )
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=build_sampling(max_tokens=max_tokens, **options.sampling),
        n=options.n,
        stop=options.stop,
        session=options.session,
        priority=options.priority,
        timeout_s=front.settings.deadline_s,
        open_ended=options.max_tokens is None,
        endpoint=endpoint,
    )


def _with_default(value: int | None, default: int) -> int:
    return default if value is None else value


def _model(fields: Fields, front: FrontDoor) -> str:
    """Left out, it is the one model that is served here."""
    served = front.model_card().served_name
    model = fields.text("model")
    if model is not None and model != served:
        raise UnknownModel(f"the model {model[:MAX_NAME_CHARS]!r} is not served here; {served!r} is", param="model")
    return served


def _refuse_unsupported(fields: Fields) -> None:
    for name in _UNSUPPORTED:
        if fields.get(name) is not None:
            raise _not_supported(name)
    if fields.get("tools") not in (None, []):
        raise _not_supported("tools")
    if fields.get("tool_choice") not in (None, "none"):
        raise _not_supported("tool_choice")
    response_format = fields.object("response_format")
    if response_format is not None and response_format.get("type") != "text":
        raise BadRequest("response_format: only {\"type\": \"text\"} is supported yet", param="response_format")


def _not_supported(name: str) -> BadRequest:
    return BadRequest(f"{name} is not supported yet", param=name, code="unsupported_parameter")


def _sampling(fields: Fields, front: FrontDoor, logprobs: int | None, logprobs_param: str) -> dict[str, Any]:
    return {
        "vocab_size": front.tokenizer.vocab_size,
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "top_k": fields.integer("top_k"),
        "min_p": fields.number("min_p"),
        "seed": fields.integer("seed"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "logit_bias": fields.logit_bias(),
        "stop_token_ids": fields.integers("stop_token_ids"),
        "ignore_eos": fields.boolean("ignore_eos") or False,
        "min_tokens": fields.integer("min_tokens"),
        "logprobs": logprobs,
        "logprobs_param": logprobs_param,
    }


def _session(fields: Fields, header: str | None) -> SessionId | None:
    """Header, then `session_id`, then `user`."""
    session_id = fields.text("session_id", MAX_NAME_CHARS)
    user = fields.text("user", MAX_NAME_CHARS)
    if header and len(well_formed(header, "x-session-id")) > MAX_NAME_CHARS:
        raise BadRequest(f"x-session-id may have {MAX_NAME_CHARS} characters", param="x-session-id")
    session = header or session_id or user
    return SessionId(session) if session else None


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
    return Fields(options, "stream_options").boolean("include_usage") or False
