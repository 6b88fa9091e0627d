"""Our engine, whole: scheduler, model, sampling. The same operations as the peers, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lines import WARM_STEPS, serve

from kvrelay.core.config import EngineSettings, config_from_dict
from kvrelay.core.progress import NullProgress
from kvrelay.engine.spec import EngineSpec
from kvrelay.model.load import load
from kvrelay_loadtest.engine_load import Yard
from kvrelay_loadtest.weight_bytes import weight_bytes

MAX_TOKENS = 1024
"""Of one decode measurement."""


class Ours:
    def load(self, model: str, threads: int, max_batch: int) -> dict[str, Any]:
        from importlib.metadata import version

        self._settings = EngineSettings(
            kv_memory="2GiB", max_num_seqs=max_batch, growth_tokens=MAX_TOKENS, watermark_fraction=0.0
        )
        settings = config_from_dict({"model": {"path": model}}).model
        loaded = load(Path(model), settings, self._settings, threads=threads, progress=NullProgress())
        self._runner = loaded.runner
        self._spec = EngineSpec(
            loaded.num_blocks, loaded.layout.block_size, loaded.max_context, loaded.eos_token_ids,
            loaded.identity.fingerprint(), loaded.dtype, loaded.num_tokens,
        )  # fmt: skip
        form, megabytes = loaded.weights.form or loaded.dtype, weight_bytes(loaded.weights) / 1e6
        return {"version": version("kvrelay"), "kernels": f"{loaded.kernels}, {megabytes:.0f} MB of {form}"}

    def decode(self, batch: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        yard = self._yard(seed)
        yard.decode(batch, prompt, tokens)
        steps = [yard.step() for _ in range(tokens - 1)]
        return {"steps_s": [step.total_s for step in steps[WARM_STEPS:]]}

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        return {"seconds": self._yard(seed).prefill(tokens)}

    def _yard(self, seed: int) -> Yard:
        return Yard(self._settings, self._spec, self._runner, seed=seed)


runner = Ours()
serve({"load": runner.load, "decode": runner.decode, "prefill": runner.prefill})
