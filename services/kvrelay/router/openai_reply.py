"""The answer in one piece: collect all choices, then write them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.core.output import ChoiceFinished, Delta, Output, Summary
from kvrelay.router.openai_call import Call, Json, usage
from kvrelay.router.openai_logprobs import join_logprobs
from kvrelay.router.openai_outputs import Outputs


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    finished: ChoiceFinished | None = None


async def whole_reply(call: Call, outputs: Outputs) -> Json:
    """Raises the KvrelayError that ended any of the prompts."""
    choices = [_Choice() for _ in range(len(call.requests) * call.requests[0].n)]
    summaries: list[Summary] = []
    while (items := await outputs.take()) is not None:
        for prompt, output in items:
            _collect(call, choices, summaries, prompt, output)
    reply = call.shape.reply([_write(call, index, choice) for index, choice in enumerate(choices)])
    return {**reply, "usage": usage(summaries)}


def _collect(call: Call, choices: list[_Choice], summaries: list[Summary], prompt: int, output: Output) -> None:
    if isinstance(output, Delta):
        choice = choices[call.index(prompt, output.choice)]
        choice.texts.append(output.text)
        logprobs = call.shape.logprobs(output)
        if logprobs is not None:
            choice.logprobs.append(logprobs)
    elif isinstance(output, ChoiceFinished):
        choices[call.index(prompt, output.choice)].finished = output
    elif isinstance(output, Summary):
        summaries.append(output)


def _write(call: Call, index: int, choice: _Choice) -> Json:
    assert choice.finished is not None, "the coordinator ends every choice before its summary"
    empty = call.shape.logprobs(Delta(choice.finished.choice, 0, "", ()))
    logprobs = join_logprobs(choice.logprobs) if choice.logprobs else empty
    return call.shape.whole(index, "".join(choice.texts), logprobs, choice.finished)
