"""What happened to one request, and what it means for the service.

    ttft   scheduled time → first output                 itl   between two pieces of output
    e2el   scheduled time → end                          tpot  (last output − first output) ÷ (tokens − 1)

An objective on `itl` holds for a request if 95 % of its gaps are within it: a reader forgives one stall in twenty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvrelay.core.errors import ConfigError
from kvrelay_loadtest.stats import cumulative, percentile, rate, spread

OBJECTIVES = ("ttft", "itl", "tpot", "e2el")
ITL_SHARE = 95


@dataclass(slots=True)
class Record:
    scheduled_s: float
    """Since the start of the run, like every time here."""
    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    """When each piece of output came."""
    end_s: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    error: str = ""
    """Kind of failure, empty if there was none."""
    turn: int = 0

    @property
    def ttft_ms(self) -> float:
        return (self.pieces_s[0] - self.scheduled_s) * 1e3

    @property
    def e2el_ms(self) -> float:
        return (self.end_s - self.scheduled_s) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(later - earlier) * 1e3 for earlier, later in zip(self.pieces_s, self.pieces_s[1:], strict=False)]

    @property
    def tpot_ms(self) -> float | None:
        """None for a single token."""
        count = max(self.num_output, len(self.pieces_s)) - 1
        return (self.pieces_s[-1] - self.pieces_s[0]) * 1e3 / count if count > 0 else None

    @property
    def is_good(self) -> bool:
        return not self.error and bool(self.pieces_s)


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=500,itl=50` → milliseconds by objective. Raises ConfigError."""
    slo: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        try:
            slo[name] = float(value.removesuffix("ms"))
        except ValueError:
            raise ConfigError(f"--slo: expected NAME=MILLISECONDS, found {part!r}") from None
        if name not in OBJECTIVES or slo[name] <= 0:
            raise ConfigError(f"--slo: {part!r}; objectives: {', '.join(OBJECTIVES)}, in milliseconds above 0")
    return slo


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """A failed request meets nothing."""
    if not record.is_good:
        return False
    gaps = record.gaps_ms
    measured = {
        "ttft": record.ttft_ms,
        "e2el": record.e2el_ms,
        "tpot": record.tpot_ms or 0.0,
        "itl": percentile(gaps, ITL_SHARE) if gaps else 0.0,
    }
    return all(measured[name] <= limit for name, limit in slo.items())


def summarise(
    records: Sequence[Record], *, slo: Mapping[str, float], offered_rps: float, warmup_s: float = 0.0
) -> dict[str, Any]:
    """Of the requests scheduled after the warm-up; they fill the window from its end to the last of their ends."""
    counted = [record for record in records if record.scheduled_s >= warmup_s]
    good = [record for record in counted if record.is_good]
    ends = [record.end_s for record in counted]
    window_s = max(ends) - min(record.scheduled_s for record in counted) if counted else 0.0
    errors: dict[str, int] = {}
    for record in counted:
        if record.error:
            errors[record.error] = errors.get(record.error, 0) + 1
    series = {
        "ttft_ms": [record.ttft_ms for record in good],
        "tpot_ms": [tpot for record in good if (tpot := record.tpot_ms) is not None],
        "itl_ms": [gap for record in good for gap in record.gaps_ms],
        "e2el_ms": [record.e2el_ms for record in good],
    }
    return {
        "requests": len(counted),
        "ok": len(good),
        "errors": errors,
        "window_s": window_s,
        "offered_rps": offered_rps,
        "completed_rps": rate(len(good), window_s),
        "goodput_rps": rate(sum(meets(record, slo) for record in counted), window_s),
        "slo_ms": dict(slo),
        "input_tokens_per_s": rate(sum(record.num_prompt for record in good), window_s),
        "output_tokens_per_s": rate(sum(record.num_output for record in good), window_s),
        "sent_late_ms": spread([(record.sent_s - record.scheduled_s) * 1e3 for record in counted]),
        **{name: spread(values) for name, values in series.items()},
        "cdf": {name: cumulative(values) for name, values in series.items()},
    }


def as_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """For `--save`: everything that was measured."""
    return [asdict(record) for record in records]
