"""Everything that can go wrong, as one tree.

    KvrelayError
    ├── Rejected               the request is at fault, now and on every retry
    │   ├── BadRequest             400
    │   ├── Unauthorised           401
    │   ├── UnknownModel           404
    │   ├── TooLarge               413
    │   └── WrongContentType       415
    ├── Overloaded             429, try again after `retry_after_s`
    │   ├── NoRoom                 no KV blocks or no queue place
    │   └── QuotaExceeded          this tenant's share is used up
    ├── Unavailable            503, a worker or a transfer was lost and no replay was possible
    ├── DeadlineExceeded       504
    └── Broken                 500, our bug

Mapped once to gRPC in `rpc/status.py` and once to HTTP in `router/http_errors.py`.
"""

from __future__ import annotations


class KvrelayError(Exception):
    """`message` is written for the user who gets it; `param` names the request field at fault, if one is."""

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class Rejected(KvrelayError):
    code = "invalid_request"


class BadRequest(Rejected):
    """Malformed, out of range, or more than the context or the pool can ever hold."""


class Unauthorised(Rejected):
    code = "invalid_api_key"


class UnknownModel(Rejected):
    code = "model_not_found"


class TooLarge(Rejected):
    code = "request_too_large"


class WrongContentType(Rejected):
    code = "unsupported_content_type"


class Overloaded(KvrelayError):
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class NoRoom(Overloaded):
    code = "no_room"


class QuotaExceeded(Overloaded):
    code = "rate_limit_exceeded"


class Unavailable(KvrelayError):
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(KvrelayError):
    code = "deadline_exceeded"


class Broken(KvrelayError):
    """An invariant of ours does not hold."""


class ConfigError(Exception):
    """A setting, a model or a machine that cannot work. Raised at start only, so it is no part of the request tree."""
