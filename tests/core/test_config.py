"""Settings: one file, clear errors, nothing ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.core.config import Config, config_from_dict, config_to_dict, load_config, parse_bytes
from kvrelay.core.errors import ConfigError


def test_defaults_survive_the_round_trip() -> None:
    assert config_from_dict(config_to_dict(Config())) == Config()


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"engine\.blok_size.*engine\.block_size"):
        config_from_dict({"engine": {"blok_size": 32}})


def test_a_key_like_no_other_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match="known: model, engine"):
        config_from_dict({"zzz": {}})


@pytest.mark.parametrize("value", ["16", True, 1.5, None])
def test_a_number_must_be_a_number(value: object) -> None:
    with pytest.raises(ConfigError, match=r"engine\.block_size.*must be int"):
        config_from_dict({"engine": {"block_size": value}})


def test_a_section_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError, match="engine: expected a mapping"):
        config_from_dict({"engine": 5})


def test_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "kvrelay.yaml"
    path.write_text("placement:\n  redis_url: redis://file:1\n  lease_s: 20\n")
    config = load_config(path, {})
    assert (config.placement.redis_url, config.placement.lease_s) == ("redis://file:1", 20.0)
    assert load_config(path, {"KVRELAY_REDIS_URL": "redis://env:2"}).placement.redis_url == "redis://env:2"


def test_unreadable_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.yaml", {})
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(broken, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1GiB", 1 << 30), ("512MiB", 512 << 20), ("1.5g", 3 << 29), ("100", 100), (" 8 KiB ", 8192), ("7b", 7)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "1XB", "-", "one"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="512MiB"):
        parse_bytes(text)
