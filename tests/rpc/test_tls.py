"""Who is of the cluster, and who is not: real handshakes over loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.core.config import SecuritySettings
from kvrelay.core.errors import ConfigError
from kvrelay.pb import inference_pb2 as pb
from kvrelay.pb import inference_pb2_grpc as pb_grpc
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.server import bind, new_server
from kvrelay.rpc.tls import Tls, open_tls
from tests.support.certificates import Authority, have_openssl, put_in_place

pytestmark = pytest.mark.skipif(not have_openssl(), reason="makes its certificates with openssl")


class Counting(pb_grpc.InferenceServicer):
    """Answers with who asks: the common name in the peer's certificate."""

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        (name,) = context.auth_context().get("x509_common_name", [b"nobody"])
        return pb.TokenizeResponse(ids=list(name))


@asynccontextmanager
async def served(tls: Tls | None) -> AsyncIterator[str]:
    server = new_server()
    pb_grpc.add_InferenceServicer_to_server(Counting(), server)
    port = bind(server, "127.0.0.1", 0, tls)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def who_am_i(address: str, tls: Tls | None) -> str:
    """Raises AioRpcError if the two do not get together."""
    async with open_channel(address, tls=tls) as channel:
        answer = await pb_grpc.InferenceStub(channel).Tokenize(pb.TokenizeRequest(), timeout=5)
        return bytes(answer.ids).decode()


async def refused(address: str, tls: Tls | None) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await who_am_i(address, tls)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_each_end_knows_the_other(authority: Authority) -> None:
    async with served(Tls(authority.issue("worker"))) as address:
        assert await who_am_i(address, Tls(authority.issue("router"))) == "router"


async def test_strangers_get_no_answer(authority: Authority, tmp_path: Path) -> None:
    """Neither without a certificate, nor with one of another authority, nor in plain text."""
    member = authority.issue("worker")
    stranger = Authority(tmp_path, "elsewhere").issue("stranger")
    async with served(Tls(member)) as address:
        await refused(address, Tls(stranger))
        await refused(address, None)
        trusting = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        options = (("grpc.ssl_target_name_override", "kvrelay"),)
        async with grpc.aio.secure_channel(address, trusting, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await pb_grpc.InferenceStub(channel).Tokenize(pb.TokenizeRequest(), timeout=5)
    async with served(Tls(stranger)) as address:
        await refused(address, Tls(member))
    async with served(None) as address:
        await refused(address, Tls(member))


async def test_another_name_is_another_cluster(authority: Authority) -> None:
    async with served(Tls(authority.issue("worker", dns="blue"))) as address:
        await refused(address, Tls(authority.issue("router", dns="green")))


async def test_a_rotation_needs_no_restart(authority: Authority, tmp_path: Path) -> None:
    """A server goes over to a new authority: who has done so too gets in, who has not does not."""
    settings = authority.issue("worker")
    server, client = Tls(settings), Tls(authority.issue("router"))
    (tmp_path / "next").mkdir()
    successor = Authority(tmp_path / "next", "ca-2")
    async with served(server) as address:
        assert await who_am_i(address, client) == "router"
        fresh = successor.issue("worker-2")
        put_in_place(fresh, settings)
        assert await who_am_i(address, Tls(successor.issue("router-2"))) == "router-2"
        assert server.generation == 1
        assert await who_am_i(address, server) == "worker-2"


async def test_half_a_rotation_changes_nothing(authority: Authority) -> None:
    settings = authority.issue("worker")
    server = Tls(settings)
    other = authority.issue("other")
    put_in_place(replace(other, certificate=settings.certificate), settings)
    async with served(server) as address:
        assert await who_am_i(address, server) == "worker"
        assert server.generation == 0
        put_in_place(other, settings)
        assert await who_am_i(address, server) == "other"


def test_nothing_set_is_plain_text() -> None:
    assert open_tls(SecuritySettings()) is None


def test_what_cannot_work_is_said_at_the_start(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("a"), authority.issue("b")
    foreign = Authority(tmp_path, "elsewhere")
    for settings, why in (
        (replace(good, key=""), r"needs ca, certificate and key; missing: key"),
        (replace(good, certificate=str(tmp_path / "absent")), r"cannot read .*absent"),
        (replace(good, ca=good.key), r"security\.ca: .* holds no certificates"),
        (replace(good, key=other.key), r"a\.pem and .*b\.key do not belong together"),
        (replace(good, ca=str(foreign.ca)), r"a\.pem does not hold before .*elsewhere\.pem"),
        (replace(good, name="mars"), r"does not hold before .*mars"),
    ):
        with pytest.raises(ConfigError, match=why):
            open_tls(settings)
