"""llama.cpp on a GGUF through its low-level bindings: batches of sequences, greedy.

Its AMX kernels end the process with an illegal instruction on some virtual machines. So a process of its own tries
first; if that one dies, llama.cpp gets its option against them (`use_extra_bufts`), and `kernels` says so.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from typing import Any

from lines import WARM_STEPS, serve

MAX_PROMPT = 4096
CONTEXT_PER_SEQUENCE = 512
VOCAB = 40_000
PROBE, PROBE_S = "--probe", 120.0


class LlamaCpp:
    def load(self, model: str, threads: int, max_batch: int) -> dict[str, Any]:
        survives = _survives(model, threads)
        kernels = self.open(model, threads, max_batch, extra_buffers=survives)
        without = "" if survives else ", without AMX and repacked weights: this build crashes with them here"
        return {"version": self._lib.__version__, "kernels": f"{kernels}{without}"}

    def open(self, model: str, threads: int, max_batch: int, *, extra_buffers: bool) -> str:
        """Returns the instructions it was built for."""
        import llama_cpp
        import numpy

        self._lib = llama_cpp
        self._numpy = numpy
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max(max_batch * CONTEXT_PER_SEQUENCE, MAX_PROMPT)
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = max_batch
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = extra_buffers
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), model_params)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        return _instructions(llama_cpp.llama_print_system_info())

    def decode(self, batch: int, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
        source = random.Random(seed)
        self._forget()
        last = [self._prompt(sequence, [source.randrange(100, VOCAB) for _ in range(prompt)])
                for sequence in range(batch)]  # fmt: skip
        steps = []
        for position in range(prompt, prompt + tokens - 1):
            began = time.perf_counter()
            last = self._run([(token, position, sequence, True) for sequence, token in enumerate(last)])
            steps.append(time.perf_counter() - began)
        return {"steps_s": steps[WARM_STEPS:]}

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        source = random.Random(seed)
        self._forget()
        ids = [source.randrange(100, VOCAB) for _ in range(tokens)]
        began = time.perf_counter()
        self._prompt(0, ids)
        return {"seconds": time.perf_counter() - began}

    def _forget(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _prompt(self, sequence: int, ids: list[int]) -> int:
        drawn: list[int] = []
        for begin in range(0, len(ids), 512):
            chunk = list(enumerate(ids))[begin : begin + 512]
            drawn = self._run([(token, at, sequence, at == len(ids) - 1) for at, token in chunk])
        return drawn[-1]

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, wants logits) in; the greedy tokens of those that want them out."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wants) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wants
            batch.seq_id[i][0] = sequence
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [self._greedy(i) for i, entry in enumerate(entries) if entry[3]]

    def _greedy(self, row: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(self._numpy.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())


def _instructions(info: bytes) -> str:
    """Of "CPU : SSE3 = 1 | AVX2 = 1 | LLAMAFILE = 0 | …", those that are in use and tell builds apart."""
    parts = [part.split("=") for part in info.decode().partition(":")[2].split("|") if "=" in part]
    used = [name.strip() for name, value in parts if value.strip() == "1"]
    return " ".join(name for name in used if name.startswith(("AVX512", "AMX", "REPACK", "OPENMP"))) or " ".join(used)


def _survives(model: str, threads: int) -> bool:
    """Whether a prompt and a step of two sequences can be computed with everything switched on."""
    command = [sys.executable, __file__, PROBE, model, str(threads)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=PROBE_S, check=False)
    return done.returncode >= 0  # below 0: ended by a signal


def _probe(model: str, threads: int) -> None:
    runner = LlamaCpp()
    runner.open(model, threads, 2, extra_buffers=True)
    runner.decode(2, 64, 3, 0)


runner = LlamaCpp()
if sys.argv[1:2] == [PROBE]:
    _probe(sys.argv[2], int(sys.argv[3]))
    sys.exit(0)
serve({"load": runner.load, "decode": runner.decode, "prefill": runner.prefill})
