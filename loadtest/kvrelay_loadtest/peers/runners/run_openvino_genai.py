"""OpenVINO GenAI on a GGUF: its continuous-batching pipeline, stepped by hand."""

from __future__ import annotations

import random
import time
from typing import Any

from lines import WARM_STEPS, serve

VOCAB = 40_000
"""Prompts are random ids below this; every vocabulary of interest is larger."""


class OpenvinoGenai:
    def load(self, model: str, threads: int, max_batch: int) -> dict[str, Any]:
        import numpy
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_seqs = max_batch
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._config = openvino_genai.GenerationConfig
        self._tensor: Any = lambda ids: openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        self._count = 0
        return {"version": openvino_genai.__version__}

    def decode(self, batch: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        source = random.Random(seed)
        handles = [self._add(source, prompt, tokens) for _ in range(batch)]
        begun = [False] * batch
        while not all(begun):
            self._pipeline.step()
            begun = [was or handle.can_read() for was, handle in zip(begun, handles, strict=True)]
        steps = []
        while self._pipeline.has_non_finished_requests():
            began = time.perf_counter()
            self._pipeline.step()
            steps.append(time.perf_counter() - began)
        return {"steps_s": steps[WARM_STEPS:]}

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        began = time.perf_counter()
        handle = self._add(random.Random(seed), tokens, 1)  # a request is dropped with its handle
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        seconds = time.perf_counter() - began
        if not handle.can_read():
            raise RuntimeError("the prompt gave no token")
        return {"seconds": seconds}

    def _add(self, source: random.Random, length: int, max_tokens: int) -> Any:
        self._count += 1
        config = self._config()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = [source.randrange(100, VOCAB) for _ in range(length)]
        return self._pipeline.add_request(self._count, self._tensor(ids), config)


runner = OpenvinoGenai()
serve({"load": runner.load, "decode": runner.decode, "prefill": runner.prefill})
