"""Where weights come from: safetensors files, or the one GGUF that a prepared directory points at."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvrelay.core.errors import ConfigError
from kvrelay.model.gguf_checkpoint import GgufCheckpoint
from kvrelay.model.gguf_file import StoredTensor
from kvrelay.model.obtain import GGUF_INDEX, GGUF_LINK
from kvrelay.model.spec import read_json
from kvrelay_kernels.linear.quantised import QuantisedWeight


class Checkpoint(Protocol):
    """Every tensor of a model by its safetensors name, read when asked for."""

    @property
    def types(self) -> list[str]:
        """Formats of matrices that are not floats, the most frequent first."""
        ...

    def read(self, name: str) -> Tensor | QuantisedWeight:
        """Raises ConfigError for a name that is not there."""
        ...

    def is_coded(self, name: str) -> bool:
        """Whether `read` gives codes. False for a name that is not there."""
        ...


def open_checkpoint(directory: Path) -> AbstractContextManager[Checkpoint]:
    files = weight_files(directory)
    if files == [directory / GGUF_LINK]:
        index = msgspec.json.decode((directory / GGUF_INDEX).read_bytes(), type=dict[str, StoredTensor])
        return GgufCheckpoint(files[0], index)
    return SafetensorsCheckpoint(directory, files)


def weight_files(directory: Path) -> list[Path]:
    """The files of a checkpoint, in name order. Raises ConfigError if there are none or one is missing."""
    if (directory / GGUF_INDEX).exists():
        return [_linked(directory / GGUF_LINK)]
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        names = [path.name for path in sorted(directory.glob("*.safetensors"))]
    if not names:
        raise ConfigError(f"{directory} holds no *.safetensors; nor a *.gguf")
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise ConfigError(f"{directory} lacks {', '.join(missing)}, which its index names")
    return [directory / name for name in names]


def _linked(link: Path) -> Path:
    if not link.exists():
        raise ConfigError(f"{link.readlink()} has been moved or deleted; give --model its new place")
    return link


class SafetensorsCheckpoint:
    def __init__(self, directory: Path, files: list[Path]) -> None:
        self._directory = directory
        self._paths = files
        self._open = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> SafetensorsCheckpoint:
        for path in self._paths:
            try:
                file = self._open.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"cannot read {path}: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self, name: str) -> Tensor:
        if name not in self._files:
            raise ConfigError(f"{self._directory}: the checkpoint has no tensor {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    @property
    def types(self) -> list[str]:
        return []

    def is_coded(self, name: str) -> bool:
        return False
