"""Every supported family against transformers, in float32: the same logits whole and in chunks, the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay_kernels.dispatch import CPU, REFERENCE, Ops, best_native
from tests.model.rig import Sequences, all_logits, load_tiny, token_ids
from tests.support.tiny import BOS, write_model_t

PROMPT = [BOS, *b"The baton is the KV cache; the first leg is prefill, the rest is decode. Ready, set, go?"]
CHUNKS = [1, 16, 5, 31, 3, len(PROMPT) - 56]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-tied": {"family": "llama", "tied": True},
    "llama-bias": {"family": "llama", "attention_bias": True},
    "mistral": {"family": "mistral", "sliding_window": 20},
    "mistral-wide": {"family": "mistral", "sliding_window": None},
    "qwen2": {"family": "qwen2", "tied": True},
    "qwen2-window": {"family": "qwen2", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {"family": "qwen3"},
    "group-1": {"family": "llama", "hidden": 48, "num_heads": 3, "num_kv_heads": 3},
    "group-3": {"family": "llama", "hidden": 72, "num_heads": 9, "num_kv_heads": 3},
    "group-7": {"family": "qwen2", "num_heads": 7, "num_kv_heads": 1},
    "qwen3-group-7": {"family": "qwen3", "hidden": 56, "num_heads": 14, "num_kv_heads": 2},
    "rope-linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope-llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "rope-yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "rope-yarn-5": {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 5000.0, "factor": 2.0, "original_max_position_embeddings": 128,
            "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.6, "truncate": False,
        },
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_t(tmp_path_factory.mktemp("model"), **FAMILIES[request.param])


def transformers_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


SETS = [CPU, REFERENCE, *filter(None, [best_native()])]


@pytest.mark.parametrize("ops", SETS, ids=lambda ops: ops.name)
def test_logits_equal_transformers_whole_and_in_chunks(model: Path, ops: Ops) -> None:
    with torch.inference_mode():
        expected = transformers_model(model)(torch.tensor([PROMPT])).logits[0]
    assert sum(CHUNKS) == len(PROMPT)
    for chunks in ([len(PROMPT)], CHUNKS):
        torch.testing.assert_close(all_logits(model, PROMPT, chunks, ops=ops), expected, atol=1e-4, rtol=0)


def test_greedy_tokens_equal_transformers(model: Path) -> None:
    prompt = PROMPT[:40]
    expected = transformers_model(model).generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )[0, len(prompt) :]
    loaded = load_tiny(model)
    for chunk in (1 << 30, 7):
        assert token_ids(Sequences(loaded).generate([prompt], 24, chunk=chunk)[0]) == expected.tolist()


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    directory = write_model_t(tmp_path)
    exact = all_logits(directory, PROMPT, [len(PROMPT)])
    rounded = all_logits(directory, PROMPT, [len(PROMPT)], dtype="bfloat16")
    assert float((exact - rounded).abs().mean()) < 0.05


@pytest.mark.parametrize("block_size", [1, 16])
def test_neighbours_change_nothing(tmp_path: Path, block_size: int) -> None:
    """SCH-05, KVC-01: a sequence alone and among others of other lengths, at every block boundary."""
    loaded = load_tiny(write_model_t(tmp_path), block_size=block_size, num_blocks=64 * 16 // block_size)
    prompts = [PROMPT[:length] for length in (1, 15, 16, 17, 31, 32, 33)]
    alone = [token_ids(Sequences(loaded).generate([prompt], 8)[0]) for prompt in prompts]
    together = [token_ids(results) for results in Sequences(loaded).generate(prompts, 8)]
    chunked = [token_ids(results) for results in Sequences(loaded).generate(prompts, 8, chunk=5)]
    assert alone == together == chunked
