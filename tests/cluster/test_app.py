"""The application builder: typed arguments, and an application without a running Ray."""

from __future__ import annotations

import inspect

import pytest
from pydantic import ValidationError
from ray import serve

from kvrelay.cluster.app import AppArgs, build
from kvrelay.cluster.serve_grpc import GRPC_SERVICES
from kvrelay.core.errors import ConfigError


def test_serve_finds_the_type_of_the_arguments_on_the_signature() -> None:
    (parameter,) = inspect.signature(build).parameters.values()
    assert parameter.annotation is AppArgs


def test_counts_come_from_the_config_unless_given() -> None:
    assert AppArgs().counts() == (1, 1, 1)
    args = AppArgs(config={"cluster": {"prefill": 2, "decode": 3, "routers": 4}})
    assert args.counts() == (4, 2, 3)
    assert AppArgs(config=args.config, prefill=0, decode=5, routers=1).counts() == (1, 0, 5)


def test_an_unknown_argument_is_an_error() -> None:
    with pytest.raises(ValidationError, match="prefil"):
        AppArgs.model_validate({"prefil": 2})


def test_an_unknown_setting_is_an_error_where_it_is_deployed() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        build(AppArgs(config={"engine": {"num_block": 1}}))


@pytest.mark.parametrize("prefill", [0, 2])
def test_the_application_is_built_without_a_running_ray(prefill: int) -> None:
    assert isinstance(build(AppArgs(prefill=prefill, decode=2, worker_gpus=0)), serve.Application)


@pytest.mark.parametrize("path", GRPC_SERVICES)
def test_the_grpc_services_exist(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert callable(getattr(__import__(module, fromlist=[name]), name))
