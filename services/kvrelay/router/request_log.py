"""The one log line of a request."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.errors import Broken, DeadlineExceeded, KvrelayError, Overloaded, Rejected
from kvrelay.core.output import GenerateRequest, Summary
from kvrelay.observe.logs import get_logger, log_event

log = get_logger("request")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended. `outcome` is one of a closed set: it is a metric's label."""

    outcome: str
    error: KvrelayError | None = None


CANCELLED = Ending("cancelled")
OK = Ending("ok")


def ending_of(error: KvrelayError) -> Ending:
    table: tuple[tuple[type[KvrelayError], str], ...] = (
        (Rejected, "rejected"), (Overloaded, "overloaded"), (DeadlineExceeded, "deadline"), (Broken, "broken"),
    )
    for kind, outcome in table:
        if isinstance(error, kind):
            return Ending(outcome, error)
    return Ending("unavailable", error)


def log_request(request: GenerateRequest, ending: Ending, summary: Summary, total_ms: float) -> None:
    """Never contains prompt or output."""
    timing = summary.timing
    log_event(
        log,
        "",
        request=request.request_id,
        endpoint=request.endpoint,
        outcome=ending.outcome,
        mode=summary.mode,
        prefill=summary.prefill_worker or None,
        decode=summary.decode_worker or None,
        attempts=summary.num_attempts,
        n=request.n,
        prompt_tokens=summary.num_prompt_tokens,
        output_tokens=summary.num_output_tokens,
        cached_tokens=summary.num_cached_tokens,
        queue_ms=timing.queue,
        reserve_ms=timing.reserve,
        prefill_ms=timing.prefill,
        first_token_ms=timing.first_token,
        unhidden_ms=timing.transfer_unhidden,
        total_ms=total_ms,
        error=ending.error.message if ending.error is not None else None,
    )
