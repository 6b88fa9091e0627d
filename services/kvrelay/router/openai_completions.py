"""POST /v1/completions: raw prompts in, their continuations out.

A text prompt is ordinary text: literals of control tokens in it are not parsed. Who wants control tokens sends ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.core.errors import BadRequest
from kvrelay.core.ids import RequestId, TokenId
from kvrelay.core.output import ChoiceFinished, Delta
from kvrelay.router.front import FrontDoor
from kvrelay.router.limits import check_ids, encode_prompt
from kvrelay.router.openai_call import Call, Json
from kvrelay.router.openai_fields import Fields, well_formed, whole_number, wrong
from kvrelay.router.openai_logprobs import completion_logprobs
from kvrelay.router.openai_options import Options, generate_request, read_options
from kvrelay.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[TokenId, ...]
    text: str


def completions_call(
    front: FrontDoor, body: Json, request_id: RequestId, created: int, session_header: str | None = None
) -> Call:
    """All prompts are checked before any starts. Raises BadRequest or UnknownModel, each naming the field."""
    fields = Fields(body)
    num_top = fields.integer("logprobs")
    options = read_options(front=front, fields=fields, session_header=session_header,
                           logprobs=num_top, logprobs_param="logprobs")  # fmt: skip
    _check_best_of(fields, options)
    echo = fields.boolean("echo") or False
    if echo and num_top is not None:
        raise BadRequest("echo is not supported together with logprobs", param="echo")
    prompts = read_prompts(fields.get("prompt"), front)
    ids = [RequestId(f"{request_id}.{i}" if i else request_id) for i in range(len(prompts))]
    requests = tuple(
        generate_request(front, options, prompt_id, prompt.ids, endpoint="completions")
        for prompt_id, prompt in zip(ids, prompts, strict=True)
    )
    echoes = tuple(prompt.text for prompt in prompts) if echo else ()
    shape = CompletionShape(
        f"cmpl-{request_id}", created, options.model, front.tokenizer, num_top, echoes, options.n
    )
    return Call(requests, shape, options.stream, options.include_usage)


def read_prompts(value: Any, front: FrontDoor) -> list[Prompt]:
    """A string, a list of strings, a list of ids, or a list of lists of ids."""
    if isinstance(value, str):
        return [_text_prompt(value, front, "prompt")]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", "a string, a list of strings, or token ids", value if value != [] else "an empty list")
    if isinstance(value[0], int):
        return [_id_prompt(value, front, "prompt")]
    if len(value) > front.settings.max_prompts:
        raise BadRequest(f"prompt: at most {front.settings.max_prompts} at once, found {len(value)}", param="prompt")
    if isinstance(value[0], str):
        return [_text_prompt(item, front, f"prompt[{i}]") for i, item in enumerate(value)]
    return [_id_prompt(item, front, f"prompt[{i}]") for i, item in enumerate(value)]


def _text_prompt(value: Any, front: FrontDoor, path: str) -> Prompt:
    text = well_formed(value, path)
    return Prompt(encode_prompt(front.tokenizer, text, front.model_card().max_context, param=path), text)


def _id_prompt(value: Any, front: FrontDoor, path: str) -> Prompt:
    if not isinstance(value, list):
        raise wrong(path, "a list of token ids", value)
    ids = [whole_number(item, path) for item in value]
    checked = check_ids(ids, front.tokenizer.vocab_size, param=path)
    return Prompt(checked, front.tokenizer.decode(checked))


def _check_best_of(fields: Fields, options: Options) -> None:
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != options.n:
        raise BadRequest(f"best_of is only supported when it equals n ({options.n})", param="best_of")


@dataclass(frozen=True, slots=True)
class CompletionShape:
    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    num_top: int | None
    echoes: tuple[str, ...] = ()
    """Per prompt, the text that goes before its choices; empty without `echo`."""
    n: int = 1

    def logprobs(self, delta: Delta) -> Json | None:
        return None if self.num_top is None else completion_logprobs(self.tokenizer, delta, self.num_top)

    def piece(self, index: int, text: str, logprobs: Json | None, *, is_first: bool) -> Json:
        if is_first:
            text = self._echo(index) + text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def last_piece(self, index: int, finished: ChoiceFinished, *, is_first: bool) -> Json:
        return self._ended(index, self._echo(index) if is_first else "", None, finished)

    def whole(self, index: int, text: str, logprobs: Json | None, finished: ChoiceFinished) -> Json:
        return self._ended(index, self._echo(index) + text, logprobs, finished)

    def chunk(self, choices: Sequence[Json]) -> Json:
        return self.reply(choices)

    def reply(self, choices: Sequence[Json]) -> Json:
        return {
            "id": self.id, "object": "text_completion", "created": self.created,
            "model": self.model, "choices": choices,
        }  # fmt: skip

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.n] if self.echoes else ""

    def _ended(self, index: int, text: str, logprobs: Json | None, finished: ChoiceFinished) -> Json:
        return {
            "index": index, "text": text, "logprobs": logprobs,
            "finish_reason": finished.finish_reason, "stop_reason": finished.stop_reason,
        }  # fmt: skip
