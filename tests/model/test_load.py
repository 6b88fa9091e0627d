"""From a directory to a loaded model: what is read, what is refused and with which words, what identifies it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.core.batch import BlockCopy, Draw, StepPlan
from kvrelay.core.config import EngineSettings, ModelSettings
from kvrelay.core.errors import ConfigError
from kvrelay.core.ids import BlockId, Choice
from kvrelay.model.device import choose_dtype
from kvrelay.model.load import load, plan, served_name
from kvrelay.model.spec import read_spec, spec_from_config
from kvrelay_kernels.dispatch import ops_for
from tests.model.rig import FLOAT32, Sequences, all_logits, load_tiny, make_row, token_ids
from tests.support.tiny import BOS, EOS, VOCAB, write_model_c, write_model_t


def edit_config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


class Counting:
    def __init__(self) -> None:
        self.tasks: list[list[int]] = []
        self.finished = 0

    def start(self, name: str, total: int) -> None:
        self.tasks.append([total, 0])

    def advance(self, n: int) -> None:
        self.tasks[-1][1] += n

    def done(self) -> None:
        self.finished += 1


def test_what_a_worker_gets(tmp_path: Path) -> None:
    directory = write_model_t(tmp_path / "tiny-t", eos_token_ids=(EOS, 261))
    progress = Counting()
    settings = EngineSettings(block_size=8, kv_memory="1MiB")
    model = load(directory, dataclasses.replace(FLOAT32, path=str(directory)), settings, progress=progress)
    assert model.num_blocks == (1 << 20) // (2 * 2 * 2 * 8 * 16 * 4) == model.storage.num_blocks
    assert model.max_context == 256
    assert model.num_tokens == VOCAB
    assert model.eos_token_ids == {EOS, 261}
    assert model.served_name == "tiny-t"
    assert model.capacity.startswith("weights float32; 256 blocks, 2,048 tokens, 8.0 sessions")
    assert progress.tasks == [[2, 2]]
    assert progress.finished == 1


def test_what_load_refuses_is_known_before_weights_are_read(tmp_path: Path) -> None:
    directory = write_model_t(tmp_path / "tiny-t")
    plan(directory, FLOAT32, EngineSettings())
    for model, engine, reason in (
        (dataclasses.replace(FLOAT32, dtype="int4"), EngineSettings(), "int4"),
        (dataclasses.replace(FLOAT32, max_context=10_000), EngineSettings(), "max_context"),
        (FLOAT32, EngineSettings(kv_memory="1KiB"), "kv_memory"),
    ):
        with pytest.raises(ConfigError, match=reason):
            plan(directory, model, engine)
    for file in directory.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        plan(directory, FLOAT32, EngineSettings())


def test_a_small_pool_bounds_the_context(tmp_path: Path) -> None:
    directory = write_model_t(tmp_path)
    assert load(directory, FLOAT32, EngineSettings(num_blocks=9)).max_context == 8 * 16
    shorter = dataclasses.replace(FLOAT32, max_context=100)
    assert load(directory, shorter, EngineSettings(num_blocks=64)).max_context == 100
    with pytest.raises(ConfigError, match="ends at 256"):
        load(directory, dataclasses.replace(FLOAT32, max_context=257), EngineSettings(num_blocks=64))
    with pytest.raises(ConfigError, match="at least"):
        load(directory, FLOAT32, EngineSettings(num_blocks=1))


def test_served_names() -> None:
    where = Path("/cache/SmolLM2-135M-Instruct")
    assert served_name(ModelSettings(), where) == "SmolLM2-135M-Instruct"
    assert served_name(ModelSettings(path="Qwen/Qwen3-0.6B"), Path("/hub/snapshots/abc")) == "Qwen3-0.6B"
    assert served_name(ModelSettings(served_name="mine"), where) == "mine"


def test_sharded_checkpoints_are_the_same_model(tmp_path: Path) -> None:
    prompt = [BOS, *b"shards"]
    one, many = write_model_t(tmp_path / "one"), write_model_t(tmp_path / "many", num_shards=4)
    assert torch.equal(all_logits(one, prompt, [7]), all_logits(many, prompt, [7]))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = write_model_t(tmp_path, num_shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00003"):
        load_tiny(directory)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba is not supported"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"intermediate_size": 64}, "mlp.gate_proj.weight has shape"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    directory = edit_config(write_model_t(tmp_path), **changes)
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        load_tiny(directory)


def test_an_empty_directory_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_tiny(tmp_path)
    directory = write_model_t(tmp_path / "model")
    (directory / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        load_tiny(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        load_tiny(directory)


def test_windows_of_qwen() -> None:
    base = {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 320, "max_position_embeddings": 256, "sliding_window": 32,
    }
    assert spec_from_config(base).windows == (0, 0, 0)
    assert spec_from_config(base | {"use_sliding_window": True, "max_window_layers": 2}).windows == (0, 0, 32)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert spec_from_config(base | {"use_sliding_window": True, "layer_types": types}).windows == (32, 0, 32)


def test_identity_tells_models_apart(tmp_path: Path) -> None:
    def identity(name: str, **changes: Any) -> Any:
        return load_tiny(write_model_t(tmp_path / name, **changes)).identity

    base = identity("base")
    assert identity("again") == base
    assert base.differences(identity("seed", seed=1))[0].startswith("model:")
    rope = base.differences(identity("rope", rope_theta=20000.0))
    assert [difference.split(":")[0] for difference in rope] == ["rope"]
    template = write_model_t(tmp_path / "tokenizer")
    path = template / "tokenizer.json"
    path.write_text(path.read_text().replace("<|user|>", "<|human|>"))
    assert [line.split(":")[0] for line in base.differences(load_tiny(template).identity)] == ["tokenizer"]
    other_blocks = load_tiny(tmp_path / "base", block_size=8).identity
    assert base.differences(other_blocks) == ["block_size: 16 != 8"]


def test_dtype_choice() -> None:
    device = torch.device("cpu")
    assert choose_dtype("float16", device) == "float16"
    assert choose_dtype("auto", device) in ("bfloat16", "float32")
    with pytest.raises(ConfigError, match="int3"):
        choose_dtype("int3", device)


def test_eos_comes_from_the_generation_config_first(tmp_path: Path) -> None:
    directory = write_model_t(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_spec(directory).eos_token_ids == {5, 6}
    (directory / "generation_config.json").unlink()
    assert read_spec(directory).eos_token_ids == {EOS}


def test_a_chain_model_says_its_chain(tmp_path: Path) -> None:
    model = load_tiny(write_model_c(tmp_path / "c", "é語".encode()))
    chain = [*"é語".encode(), EOS]
    assert token_ids(Sequences(model).generate([[BOS, *b"anything"]], len(chain))[0]) == chain
    mapped = load_tiny(write_model_c(tmp_path / "d", {1: 2, 2: 1}, default=9))
    assert token_ids(Sequences(mapped).generate([[1], [7]], 4)[0]) == [2, 1, 2, 1]


def test_a_fork_copies_blocks_before_the_step_computes(tmp_path: Path) -> None:
    """Copy-on-write: one prompt, two choices; the second goes on in a copy of the shared last block."""
    model = load_tiny(write_model_t(tmp_path))
    prompt = [BOS, *b"fork here"]
    expected = token_ids(Sequences(model).generate([prompt], 3)[0])
    draws = (Draw(Choice(0), 0), Draw(Choice(1), 0))
    first = model.runner.run(StepPlan(0, (make_row(prompt, 0, len(prompt), [3], draws=draws),))).rows[0]
    assert [token.token_id for token in first.tokens] == [expected[0]] * 2
    tokens = [*prompt, expected[0]]
    rows = tuple(make_row(tokens, len(prompt), 1, [block], draws=(Draw(Choice(0), 1),)) for block in (3, 4))
    second = model.runner.run(StepPlan(1, rows, (BlockCopy(BlockId(3), BlockId(4)),)))
    assert [row.tokens[0].token_id for row in second.rows] == [expected[1]] * 2
    assert model.runner.run(StepPlan(2, (), (BlockCopy(BlockId(3), BlockId(5)),))).rows == ()


def test_a_poisoned_block_harms_only_its_own_sequence(tmp_path: Path) -> None:
    """KRN-07 from the cache's side: NaN left in a freed block never reaches the sequence that gets it next."""
    model = load_tiny(write_model_t(tmp_path))
    prompt = [BOS, *b"healthy"]
    expected = token_ids(Sequences(model).generate([prompt], 6)[0])
    model.storage.pool.view(torch.float32).fill_(float("nan"))
    assert token_ids(Sequences(model).generate([prompt], 6)[0]) == expected


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_token_of_a_step_can_be_looked_at(tmp_path: Path, dtype: str) -> None:
    """In one native call, and operator by operator (float16); a later chunk sees the tokens before it."""
    directory = write_model_t(tmp_path)
    model = load(directory, dataclasses.replace(FLOAT32, dtype=dtype), EngineSettings(num_blocks=16))
    prompt = [(7 * place) % VOCAB for place in range(21)]
    chunks = [
        model.runner.every_logits(StepPlan(0, (make_row(prompt, begin, end - begin, [1, 2]),)))
        for begin, end in ((0, 14), (14, 21))
    ]
    assert [tuple(logits.shape) for logits in chunks] == [(14, model.spec.vocab), (7, model.spec.vocab)]
    wanted = all_logits(directory, prompt, [21], dtype=dtype)
    assert torch.allclose(torch.cat(chunks), wanted, atol=1e-4 if dtype == "float32" else 0.05)


def test_a_model_says_which_kernels_compute_it(tmp_path: Path) -> None:
    directory = write_model_t(tmp_path)
    half = dataclasses.replace(FLOAT32, dtype="float16")
    assert load(directory, half, EngineSettings(num_blocks=4)).kernels == "cpu"
    assert load(directory, FLOAT32, EngineSettings(num_blocks=4)).kernels == ops_for(torch.device("cpu")).name
