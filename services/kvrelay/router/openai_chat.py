"""POST /v1/chat/completions: messages in, an assistant's turn out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.core.errors import BadRequest
from kvrelay.core.ids import RequestId, TokenId
from kvrelay.core.output import ChoiceFinished, Delta
from kvrelay.router.front import FrontDoor
from kvrelay.router.limits import check_length
from kvrelay.router.openai_call import Call, Json
from kvrelay.router.openai_fields import MAX_NAME_CHARS, Fields, well_formed, wrong
from kvrelay.router.openai_logprobs import chat_logprobs
from kvrelay.router.openai_options import generate_request, read_options
from kvrelay.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
"""A fixed list: templates write the role between control tokens."""
_PASSED_ON = ("tool_calls", "tool_call_id", "reasoning_content")


def chat_call(
    front: FrontDoor, body: Json, request_id: RequestId, created: int, session_header: str | None = None
) -> Call:
    """Raises BadRequest or UnknownModel, each naming the field."""
    fields = Fields(body)
    num_top = _num_top(fields)
    options = read_options(front=front, fields=fields, session_header=session_header,
                           logprobs=num_top, logprobs_param="top_logprobs")  # fmt: skip
    messages = read_messages(fields.get("messages"))
    prompt_ids = _prompt_ids(front, messages)
    request = generate_request(front, options, request_id, prompt_ids, endpoint="chat")
    shape = ChatShape(f"chatcmpl-{request_id}", created, options.model, front.tokenizer, num_top)
    return Call((request,), shape, options.stream, options.include_usage)


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: text parts joined, keys that no template knows left out."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a list of at least one message", value)
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(path, "an object", value)
    fields = Fields(value, path)
    role = fields.text("role")
    if role not in ROLES:
        raise wrong(fields.path("role"), f"one of {', '.join(ROLES)}", role)
    message: dict[str, Any] = {"role": role, "content": _content(fields, role)}
    name = fields.text("name", MAX_NAME_CHARS)
    if name is not None:
        message["name"] = name
    for key in _PASSED_ON:
        item = fields.get(key)
        if item is not None:
            _check_strings(item, fields.path(key))
            message[key] = item
    return message


def _content(fields: Fields, role: str) -> str:
    value = fields.get("content")
    if isinstance(value, list):
        return "".join(_part(part, f"{fields.path('content')}[{i}]") for i, part in enumerate(value))
    if value is None and role == "assistant":
        return ""
    return well_formed(value, fields.path("content"))


def _part(value: Any, path: str) -> str:
    if not isinstance(value, dict):
        raise wrong(path, "an object with a type", value)
    if value.get("type") != "text":
        raise BadRequest(f"{path}: only parts of type text are supported by this model", param=path)
    return well_formed(value.get("text"), f"{path}.text")


def _check_strings(value: Any, path: str) -> None:
    if isinstance(value, str):
        well_formed(value, path)
    elif isinstance(value, list):
        for item in value:
            _check_strings(item, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            well_formed(key, path)
            _check_strings(item, path)


def _prompt_ids(front: FrontDoor, messages: list[dict[str, Any]]) -> tuple[TokenId, ...]:
    max_context = front.model_card().max_context
    for text in _texts(messages):
        check_length(front.tokenizer, text, max_context, param="messages")
    return tuple(TokenId(token_id) for token_id in front.tokenizer.encode_chat(messages))


def _texts(messages: list[dict[str, Any]]) -> Iterator[str]:
    return (message["content"] for message in messages)


def _num_top(fields: Fields) -> int | None:
    """None: no logprobs. The range is checked with the other sampling fields."""
    logprobs = fields.boolean("logprobs") or False
    top = fields.integer("top_logprobs")
    if top and not logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (top or 0) if logprobs else None


@dataclass(frozen=True, slots=True)
class ChatShape:
    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    num_top: int | None

    def logprobs(self, delta: Delta) -> Json | None:
        return None if self.num_top is None else chat_logprobs(self.tokenizer, delta, self.num_top)

    def piece(self, index: int, text: str, logprobs: Json | None, *, is_first: bool) -> Json:
        delta: Json = {"role": "assistant", "content": text} if is_first else {"content": text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def last_piece(self, index: int, finished: ChoiceFinished, *, is_first: bool) -> Json:
        delta: Json = {"role": "assistant", "content": ""} if is_first else {}
        return {
            "index": index, "delta": delta, "logprobs": None,
            "finish_reason": finished.finish_reason, "stop_reason": finished.stop_reason,
        }  # fmt: skip

    def whole(self, index: int, text: str, logprobs: Json | None, finished: ChoiceFinished) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index, "message": message, "logprobs": logprobs,
            "finish_reason": finished.finish_reason, "stop_reason": finished.stop_reason,
        }  # fmt: skip

    def chunk(self, choices: Sequence[Json]) -> Json:
        return self._object("chat.completion.chunk", choices)

    def reply(self, choices: Sequence[Json]) -> Json:
        return self._object("chat.completion", choices)

    def _object(self, kind: str, choices: Sequence[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
