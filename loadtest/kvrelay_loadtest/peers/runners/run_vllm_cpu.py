"""vLLM on the CPU, compiled, bf16: its engine in this process, stepped by hand."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from lines import WARM_STEPS, serve

MAX_CONTEXT = 4352


class VllmCpu:
    def load(self, model: str, threads: int, max_batch: int) -> dict[str, Any]:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        import vllm

        llm = vllm.LLM(
            model, dtype="bfloat16", max_model_len=MAX_CONTEXT, max_num_seqs=max_batch, enable_prefix_caching=False,
            disable_log_stats=True,
        )  # fmt: skip
        self._engine = llm.llm_engine
        self._vocab = llm.get_tokenizer().vocab_size
        self._count = 0
        self._params = vllm.SamplingParams
        return {"version": vllm.__version__}

    def decode(self, batch: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        source = random.Random(seed)
        for _ in range(batch):
            self._add(source, prompt, tokens)
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in self._engine.step()}
        return {"steps_s": self._timed_steps(batch)[WARM_STEPS:]}

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        began = time.perf_counter()
        self._add(random.Random(seed), tokens, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"seconds": time.perf_counter() - began}

    def _timed_steps(self, batch: int) -> list[float]:
        """Of the steps in which every sequence took part."""
        steps = []
        while self._engine.has_unfinished_requests():
            began = time.perf_counter()
            outputs = self._engine.step()
            if len(outputs) == batch:
                steps.append(time.perf_counter() - began)
        return steps

    def _add(self, source: random.Random, length: int, max_tokens: int) -> None:
        self._count += 1
        ids = [source.randrange(100, self._vocab - 1000) for _ in range(length)]
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(self._count), {"prompt_token_ids": ids}, params)


runner = VllmCpu()
serve({"load": runner.load, "decode": runner.decode, "prefill": runner.prefill})
