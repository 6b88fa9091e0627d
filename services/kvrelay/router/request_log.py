"""The one log line of a request."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvrelay.core.errors import Broken, DeadlineExceeded, KvrelayError, Overloaded, Rejected
from kvrelay.core.output import GenerateRequest, Summary

log = logging.getLogger("kvrelay.request")


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
    log.info(
        "request=%s outcome=%s mode=%s prefill=%s decode=%s attempts=%d n=%d prompt_tokens=%d output_tokens=%d "
        "cached_tokens=%d queue_ms=%.1f reserve_ms=%.1f prefill_ms=%.1f first_token_ms=%.1f transfer_unhidden_ms=%.1f "
        "total_ms=%.1f%s",
        request.request_id, ending.outcome, summary.mode, summary.prefill_worker or "-", summary.decode_worker or "-",
        summary.num_attempts, request.n, summary.num_prompt_tokens, summary.num_output_tokens,
        summary.num_cached_tokens, timing.queue, timing.reserve, timing.prefill, timing.first_token,
        timing.transfer_unhidden, total_ms, f" error={ending.error.message!r}" if ending.error else "",
    )
