"""The protocol of one request without any I/O: the sync and the async client both drive it.

    request() ─▶ call ─▶ receive(event)* ─▶ ended() ─▶ done
       ▲           └─ error ─▶ pause_after(error) ─▶ wait ─┐   or the error is raised
       └───────────────────────────────────────────────────┘

Before the first token a failed call is simply made again. After it, only what continues exactly there may be made:
the same prompt and seed, with the tokens so far as `resume`; the server goes on at the next index. That works for one
choice; with more, an error after the first token is final. The caller sees `Started` once and no token twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvrelay.client._messages import AskMessage, event_from_pb
from kvrelay.client.events import Delta, Event, Finished, Started, Summary
from kvrelay.client.options import RetryPolicy
from kvrelay.core.clock import Clock
from kvrelay.core.errors import BadRequest, Broken, DeadlineExceeded, KvrelayError, Overloaded, Unavailable
from kvrelay.pb import inference_pb2 as pb
from kvrelay.rpc.status import error_from_call

Metadata = tuple[tuple[str, str | bytes], ...]


class Attempts:
    """How often and how long a request may still be tried."""

    def __init__(
        self, policy: RetryPolicy, timeout_s: float, clock: Clock, dice: Callable[[], float] = random.random
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._dice = dice
        self._timeout_s = timeout_s
        self._deadline = clock.now() + timeout_s
        self.num_failed = 0

    def left_s(self) -> float:
        """Raises DeadlineExceeded when there is nothing left."""
        left = self._deadline - self._clock.now()
        if left <= 0:
            raise DeadlineExceeded(f"not finished within {self._timeout_s:g} s")
        return left

    def pause_after(self, error: KvrelayError) -> float:
        """Seconds to wait before the next attempt. Raises `error` if there must be none."""
        self.num_failed += 1
        if not isinstance(error, Unavailable | Overloaded) or self.num_failed >= self._policy.max_attempts:
            raise error
        pause = min(self._policy.max_pause_s, self._policy.first_pause_s * 2.0 ** (self.num_failed - 1))
        pause *= 1.0 - 0.5 * self._dice()
        if isinstance(error, Overloaded):
            pause = max(pause, error.retry_after_s)
        if pause >= self.left_s():
            raise error
        return pause


class Exchange:
    """One `generate` or `chat`, over as many calls as it takes."""

    def __init__(self, message: AskMessage, attempts: Attempts) -> None:
        self._message = message
        self._attempts = attempts
        self._num_choices = max(1, message.options.n) if message.options.HasField("n") else 1
        self._started: Started | None = None
        self._token_ids: list[int] = []
        """Output so far of the only choice; what a resume sends, with the number of characters of text."""
        self._num_chars = 0
        self._next_index: dict[int, int] = {}
        self._finished: set[int] = set()
        self._summary_seen = False
        self._num_resumes = 0

    @property
    def is_over(self) -> bool:
        """Everything has arrived: what the connection does now is of no interest."""
        return self._summary_seen

    def request(self) -> AskMessage:
        """The message for the next call."""
        if self._started is not None:
            self._message.options.seed = self._started.seed
            del self._message.resume[:]
            self._message.resume.extend(self._token_ids)
            if self._num_choices == 1:
                self._message.resume_chars = self._num_chars
        return self._message

    def receive(self, message: pb.GenerateEvent) -> Event | None:
        """What the caller gets to see of it, if anything. Raises Broken if the server contradicts itself."""
        event = event_from_pb(message)
        match event:
            case Started():
                if self._started is not None:
                    return None
                self._started = event
            case Delta():
                self._count(event)
            case Finished():
                if event.choice in self._finished:
                    return None
                self._finished.add(event.choice)
            case Summary():
                self._summary_seen = True
                return replace(event, num_resumes=self._num_resumes)
        return event

    def ended(self) -> Summary | None:
        """The call is over without an error. Raises Unavailable if something is missing: a proxy cut it short."""
        if self._summary_seen:
            return None
        if len(self._finished) == self._num_choices:
            return self._own_summary()
        raise Unavailable("the stream ended early")

    def pause_after(self, error: KvrelayError) -> float | Summary:
        """Seconds until the next call, or the summary if nothing but it was lost. Raises `error` if it is final."""
        if len(self._finished) == self._num_choices:
            return self._own_summary()
        if self._has_output and self._num_choices > 1:
            raise error
        pause = self._attempts.pause_after(error)
        if self._has_output:
            self._num_resumes += 1
        return pause

    @property
    def _has_output(self) -> bool:
        return bool(self._next_index) or self._num_chars > 0

    def _count(self, delta: Delta) -> None:
        self._num_chars += len(delta.text)
        if not delta.tokens:
            return
        expected = self._next_index.get(delta.choice, 0)
        if delta.first_index != expected:
            raise Broken(f"choice {delta.choice}: token {delta.first_index} came where {expected} was due")
        self._next_index[delta.choice] = expected + len(delta.tokens)
        if self._num_choices == 1:
            self._token_ids.extend(token.token_id for token in delta.tokens)

    def _own_summary(self) -> Summary:
        """From what has been seen, when every choice is finished but the server's own summary got lost."""
        self._summary_seen = True
        num_prompt = self._started.num_prompt_tokens if self._started is not None else 0
        return Summary(num_prompt, sum(self._next_index.values()), num_resumes=self._num_resumes)


def metadata(api_key: str, left_s: float, request_id: str = "") -> Metadata:
    """The deadline travels twice: a proxy in between hides gRPC's own."""
    entries: list[tuple[str, str | bytes]] = [("kvrelay-timeout-ms", str(max(1, int(left_s * 1_000))))]
    for name, value in (("authorization", f"Bearer {api_key}" if api_key else ""), ("x-request-id", request_id)):
        if not value:
            continue
        if not (value.isascii() and value.isprintable()):
            raise BadRequest(f"{name}: printable ASCII only", param=name)
        entries.append((name, value))
    return tuple(entries)


def error_of(failed_call: Any) -> KvrelayError:
    """A sync `grpc.RpcError` or an `AioRpcError`, as the error that the server meant."""
    return error_from_call(failed_call)


def joined_text(events: Iterable[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta) and event.choice == choice)


def target_list(target: str | Sequence[str]) -> tuple[str, ...]:
    targets = (target,) if isinstance(target, str) else tuple(target)
    if not targets or not all(targets):
        raise ValueError("give at least one host:port")
    return targets
