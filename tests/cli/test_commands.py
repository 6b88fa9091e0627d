"""The command line without a cluster: help, and errors that say what to do."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvrelay.cli import doctor, settings
from kvrelay.cli.main import app, main
from kvrelay.core.config import Config, config_to_dict
from kvrelay.core.errors import ConfigError

COMMANDS = ("up", "down", "ps", "drain", "serve", "router", "worker", "chat", "doctor", "version")
runner = CliRunner()


@pytest.fixture(autouse=True)
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVRELAY_REDIS_URL", raising=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    overview = runner.invoke(app, ["--help"])
    assert command in overview.output
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["worker", "--help"], ["router", "--help"]])
def test_help_loads_neither_torch_nor_ray(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom kvrelay.cli.main import app\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'redis') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, *arguments]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["ps", "down"])
def test_without_a_cluster_ps_and_down_say_how_to_start_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvrelay", command])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "no local cluster is running; start one with: kvrelay up" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--metrics-port"])
def test_up_refuses_a_taken_port_and_names_the_flag(flag: str) -> None:
    free = {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0}
    with socket.socket() as taken, socket.socket() as one, socket.socket() as two:
        for item in (taken, one, two):
            item.bind(("127.0.0.1", 0))
        taken.listen()
        others = iter([one.getsockname()[1], two.getsockname()[1]])
        ports = {name: taken.getsockname()[1] if name == flag else next(others) for name in free}
        one.close()
        two.close()
        arguments = [word for name, port in ports.items() for word in (name, str(port))]
        result = runner.invoke(app, ["up", "--model", "/nonexistent", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "is taken" in str(result.exception)
    assert flag in str(result.exception)


def test_up_twice_says_that_it_runs_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.cluster.state.read_states", lambda: [SimpleNamespace(http_port=8000)])
    result = runner.invoke(app, ["up", "--detach"])
    assert isinstance(result.exception, ConfigError)
    assert "kvrelay down" in str(result.exception)


def test_up_refuses_rays_ports() -> None:
    result = runner.invoke(app, ["up", "--http-port", "12000"])
    assert isinstance(result.exception, ConfigError)
    assert "Ray keeps" in str(result.exception)


def free_port_flags() -> list[str]:
    """Ports that `up` accepts, for commands that are refused before they listen on them."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    return ["--http-port", str(ports[0]), "--grpc-port", str(ports[1]), "--metrics-port", "0"]


def test_up_refuses_a_model_it_cannot_compute_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    result = runner.invoke(app, ["up", "--model", str(tmp_path), *free_port_flags()])
    assert isinstance(result.exception, ConfigError)
    assert "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM" in str(result.exception)


def test_up_and_doctor_want_the_redis_they_are_given() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"redis://:secret@127.0.0.1:{silent.getsockname()[1]}/0"
        result = runner.invoke(app, ["up", "--redis-url", url, *free_port_flags()])
    assert isinstance(result.exception, ConfigError)
    assert "does not answer" in str(result.exception)
    assert "--redis-url" in str(result.exception)
    assert "secret" not in str(result.exception)


def test_a_router_wants_to_know_where_the_workers_are() -> None:
    result = runner.invoke(app, ["router"])
    assert isinstance(result.exception, ConfigError)
    assert "--workers" in str(result.exception)
    assert "--redis-url" in str(result.exception)


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_worker_finds_its_port_taken_before_it_loads_a_model(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = ["worker", "--model", "/nonexistent", flag, str(taken.getsockname()[1])]
        result = runner.invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert f"choose with {flag}" in str(result.exception)


@pytest.mark.parametrize("command", ["up", "worker", "router", "serve", "chat", "drain", "ps", "down"])
def test_help_shows_how_it_is_used(command: str) -> None:
    shown = runner.invoke(app, [command, "--help"]).output
    assert f"kvrelay {command}" in shown.partition("Examples")[2]


def test_once_and_detach_exclude_each_other() -> None:
    result = runner.invoke(app, ["up", "--once", "hello", "--detach"])
    assert result.exit_code == 2


def test_an_unknown_setting_in_the_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "kvrelay.yaml").write_text("router:\n  http_prt: 1\n")
    result = runner.invoke(app, ["up", "--config", str(tmp_path / "kvrelay.yaml")])
    assert "did you mean `router.http_port`" in str(result.exception)


def test_serve_wants_a_redis_that_all_can_reach() -> None:
    result = runner.invoke(app, ["serve"])
    assert "--redis-url" in str(result.exception)


def test_drain_wants_to_know_where_the_worker_is_registered() -> None:
    result = runner.invoke(app, ["drain", "decode-1"])
    assert "--redis-url" in str(result.exception)


def test_flags_win_over_the_file_and_zero_is_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "kvrelay.yaml"
    path.write_text("cluster:\n  prefill: 3\n  decode: 4\nrouter:\n  http_port: 8100\n")
    config = settings.cluster_config(path, prefill=0, kv_memory="2GiB", metrics_port=0)
    assert (config.cluster.prefill, config.cluster.decode) == (0, 4)
    assert (config.router.http_port, config.router.metrics_port) == (8100, 0)
    assert config.engine.kv_memory == "2GiB"
    assert settings.cluster_config(None).router.metrics_port == 9400


def test_no_flag_at_all_is_the_default_config() -> None:
    expected = config_to_dict(Config())
    expected["router"]["metrics_port"] = 9400
    assert config_to_dict(settings.cluster_config(None)) == expected


def test_doctor_fails_when_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = doctor.Finding("port", "failed", "port 8000 is taken; choose another with --http-port")
    monkeypatch.setattr(doctor, "CHECKS", (lambda _: [bad],))
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "--http-port" in result.output


def test_doctor_passes_with_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda _: [doctor.Finding("haproxy", "warning", "none")],))
    assert runner.invoke(app, ["doctor"]).exit_code == 0


@pytest.mark.parametrize("check", [doctor.check_python, doctor.check_packages, doctor.check_memory, doctor.check_files])
def test_this_machine_passes(check: object) -> None:
    assert callable(check)
    assert all(finding.level in ("ok", "warning") for finding in check(Config()))


def test_version_names_both() -> None:
    assert runner.invoke(app, ["version"]).output.startswith("kvrelay 0.")


def test_json_is_the_only_output_of_ps_json(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"http": "http://127.0.0.1:8000", "grpc": "127.0.0.1:9000", "metrics": "", "redis": "", "processes": []}
    monkeypatch.setattr("kvrelay.cluster.state.find_live_state", lambda port: None)
    monkeypatch.setattr("kvrelay.cli.ps.describe", lambda state: report)
    assert json.loads(runner.invoke(app, ["ps", "--json"]).output) == report
