"""What a request adds up to: counted once, for the summary, the metrics and the log line alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvrelay.core.ids import Choice
from kvrelay.core.output import GenerateRequest, Summary
from kvrelay.core.placement import Mode, Placement, WorkerRecord
from kvrelay.observe.metrics import RouterMetrics
from kvrelay.router.output_stage import Answer
from kvrelay.router.request_log import Ending, log_request
from kvrelay.router.timing import Moments


class Tally:
    def __init__(
        self, request: GenerateRequest, answers: Sequence[Answer], metrics: RouterMetrics, now: Callable[[], float]
    ) -> None:
        self.moments = Moments(now, now())
        self.num_attempts = 0
        self._request = request
        self._answers = answers
        self._metrics = metrics
        self._now = now
        self._placement: Placement | None = None
        self._mode: Mode | None = None
        self._num_cached: int | None = None
        self._last_emit: dict[Choice, float] = {}
        metrics.request_accepted()

    @property
    def waited_s(self) -> float:
        return self._now() - self.moments.accepted

    @property
    def workers(self) -> list[WorkerRecord]:
        """Of the last placement, the decode worker first."""
        if self._placement is None:
            return []
        return [record for record in (self._placement.decode, self._placement.prefill) if record is not None]

    @property
    def numerics(self) -> str:
        """The arithmetic of the last placement; empty before the first, and where it is no promise."""
        return next((record.numerics for record in self.workers), "")

    def placed(self, placement: Placement) -> None:
        before = self.numerics
        self.num_attempts += 1
        self._placement = placement
        self._mode = self._mode or placement.mode
        if before and self.numerics != before and self._last_emit:
            self._metrics.went_on_inexactly()
        self._metrics.request_placed(placement.mode.value, self.waited_s)

    def moved(self, decode: WorkerRecord) -> None:
        """The choice runs on there: no attempt, and the session's next turn had better go there too."""
        if self._placement is not None:
            self._placement = replace(self._placement, decode=decode)
        self._metrics.request_moved()

    def cached(self, num_tokens: int) -> None:
        """Only the first attempt's count is the client's: a replay finds what the request itself left behind."""
        if self._num_cached is None:
            self._num_cached = min(num_tokens, len(self._request.prompt_ids))

    def tokens(self, choice: Choice, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now, last = self._now(), self._last_emit.get(choice)
        if not self._last_emit:
            self._metrics.first_token(self.waited_s)
        self._metrics.tokens_emitted(num_tokens, None if last is None else now - last)
        self._last_emit[choice] = now

    def replayed(self, reason: str) -> None:
        self._metrics.request_replayed(reason)

    def summary(self) -> Summary:
        placement = self._placement
        prefill = placement.prefill if placement is not None else None
        decode = placement.decode if placement is not None else None
        return Summary(
            num_prompt_tokens=len(self._request.prompt_ids),
            num_output_tokens=sum(answer.log.next_index for answer in self._answers),
            num_cached_tokens=self._num_cached or 0,
            timing=self.moments.breakdown(),
            mode=(self._mode or Mode.LOCAL).value,
            prefill_worker=prefill.worker_id if prefill is not None else "",
            decode_worker=decode.worker_id if decode is not None else "",
            num_attempts=max(1, self.num_attempts),
        )

    def close(self, ending: Ending) -> None:
        summary = self.summary()
        if self.moments.first_token is not None:
            self._metrics.prompt_counted(summary.num_prompt_tokens, summary.num_cached_tokens)
        if self.moments.committed is not None:
            self._metrics.handoff_committed(summary.timing.transfer_unhidden / 1e3)
        self._metrics.request_ended(self._request.endpoint, ending.outcome, self.waited_s)
        log_request(self._request, ending, summary, self.waited_s * 1e3)
