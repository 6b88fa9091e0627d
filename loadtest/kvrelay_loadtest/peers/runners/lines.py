"""The runner's side of the protocol: one JSON object per line, in on stdin, out on stdout.

    {"op": "load", ...}     → {"ok": true, "version": "...", "kernels": "..."}
    {"op": "decode", "batch", "prompt", "tokens", "seed"}  → {"ok": true, "steps_s": [...]}   steps that decode only
    {"op": "prefill", "tokens", "seed"}                    → {"ok": true, "seconds": ...}     prompt in, first token out
    {"op": "quit"}

Standard library only: it runs in the peer's own environment. Whatever a library prints goes to stderr. A runner that
cannot go on ends with a traceback; the driver reports its last line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

WARM_STEPS = 4
"""Decode steps after the prompts that are not reported."""


def serve(handlers: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Until `quit` or the end of stdin."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        call = json.loads(line)
        name = call.pop("op")
        if name == "quit":
            break
        replies.write(json.dumps({"ok": True, **handlers[name](**call)}) + "\n")
        replies.flush()
