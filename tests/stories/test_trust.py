"""A relay between processes that know each other: mTLS on every connection, and nobody else gets in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvrelay.core.config import Config
from kvrelay.pb.transfer_pb2_grpc import KvTransferStub
from kvrelay.pb.worker_pb2_grpc import WorkerStub
from kvrelay.rpc.channel import open_channel
from tests.stories.house import house
from tests.support.certificates import Authority, have_openssl
from tests.support.tiny import write_model_t
from tests.worker.cluster import CONFIG

pytestmark = pytest.mark.skipif(not have_openssl(), reason="makes its certificates with openssl")

PROMPT = [256, *b"The baton goes from hand to hand, and only between hands that know each other."]


def settings(authority: Authority) -> Config:
    placement = replace(CONFIG.placement, always_relay=True)
    return replace(CONFIG, placement=placement, security=authority.issue("member"))


@pytest.fixture(scope="module")
def model_t(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_t(tmp_path_factory.mktemp("trust") / "t")


async def test_a_relay_over_tls_says_what_one_in_plain_text_says(model_t: Path, tmp_path: Path) -> None:
    async with house(model_t, "mixed") as plain:
        expected, _ = await plain.greedy(PROMPT, 0)
    authority = Authority(tmp_path)
    async with house(model_t, "prefill", "decode", config=settings(authority)) as guarded:
        for number in range(2):
            answer, summary = await guarded.greedy(PROMPT, number)
            assert (answer, summary.mode, summary.num_attempts) == (expected, "relay", 1)
            authority.issue("member")  # the second answer comes with new certificates on the way


async def test_no_port_of_a_worker_speaks_plain_text(model_t: Path, tmp_path: Path) -> None:
    async with house(model_t, "mixed", config=settings(Authority(tmp_path))) as guarded:
        record = guarded.workers[0].record
        for address in (record.address, record.push_address):
            async with open_channel(address) as channel:
                for call in (WorkerStub(channel).Attach(timeout=10), KvTransferStub(channel).Push(timeout=10)):
                    assert await call.code() is grpc.StatusCode.UNAVAILABLE
