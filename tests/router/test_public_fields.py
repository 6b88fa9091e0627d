"""No public request says anything about a transfer: what workers are told there, the router alone decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from google.protobuf.descriptor import Descriptor

from kvrelay.pb import inference_pb2 as pb
from kvrelay.pb import worker_pb2
from kvrelay.router.http import build_app
from tests.router.test_sockets import CONFIG, Build, House, house

__all__ = ["house"]

RELAY = replace(CONFIG, placement=replace(CONFIG.placement, always_relay=True))
EVIL = "evil"
RECEIVER = {"worker_id": EVIL, "incarnation": EVIL, "address": f"{EVIL}:1", "handle": EVIL}
FIELDS: dict[str, Any] = {
    "transfer_id": EVIL, "transferId": EVIL, "receivers": [RECEIVER], "handle": EVIL, "leg": 3, "handoff": RECEIVER,
    "cache_salt": EVIL, "tenant": EVIL, "attempt": 7, "replay": True, "num_cached_tokens": 4096,
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": EVIL}, "extra_body": {"transfer_id": EVIL},
}  # fmt: skip
TRANSFER_WORDS = {"transfer_id", "receivers", "receiver", "handle", "handoff", "leg", "cache_salt", "tenant", "attempt",
                  "replay", "num_cached_tokens", "address", "incarnation"}  # fmt: skip


def told(home: House) -> list[worker_pb2.Start]:
    """What the workers heard since last asked."""
    starts = [start for worker in home.workers for start in worker.starts]
    for worker in home.workers:
        worker.starts.clear()
    return starts


def without_names(start: worker_pb2.Start) -> worker_pb2.Start:
    """What every request gets afresh: its id, the transfer's, the seed and what is left of its time."""
    plain = worker_pb2.Start()
    plain.CopyFrom(start)
    for name in ("request_id", "transfer_id", "timeout_ms"):
        plain.ClearField(name)
    plain.sampling.ClearField("seed")
    return plain


def assert_same(plain: list[worker_pb2.Start], given: list[worker_pb2.Start]) -> None:
    assert len(plain) == len(given) == 2, "a receiver's and a sender's"
    assert [without_names(start) for start in given] == [without_names(start) for start in plain]
    assert not any(EVIL.encode() in start.SerializeToString() for start in given)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_over_http(house: Build, path: str) -> None:
    home = await house(config=RELAY)
    prompt: dict[str, Any] = {"prompt": "hello"} if "chat" not in path else {
        "messages": [{"role": "user", "content": "hello"}]
    }
    transport = httpx.ASGITransport(app=build_app(home.router))
    async with httpx.AsyncClient(transport=transport, base_url="http://kvrelay") as http:
        told(home)
        heard = []
        for extra, headers in (({}, {}), (FIELDS, {f"x-{name.replace('_', '-')}": EVIL for name in FIELDS})):
            body = {"model": home.router.model_card().served_name, "max_tokens": 4, **prompt, **extra}
            answer = await http.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            heard.append(told(home))
    assert_same(*heard)


async def test_over_grpc(house: Build) -> None:
    """A message of another schema, with fields of ours that the public one does not have, is only longer."""
    home = await house(config=RELAY)
    plain = pb.GenerateRequest(ids=pb.TokenIds(ids=[1, 2, 3]), options=pb.Options(max_tokens=4))
    known = {field.number for field in pb.GenerateRequest.DESCRIPTOR.fields}
    start = worker_pb2.Start(transfer_id=EVIL, receivers=[{"address": EVIL}]).SerializeToString()
    unknown = b"".join(
        bytes(((number << 3 | 2) & 0x7F | 0x80, number >> 4)) + bytes((len(start),)) + start
        for number in range(16, 64)
        if number not in known
    )
    stuffed = pb.GenerateRequest.FromString(plain.SerializeToString() + unknown)
    assert EVIL.encode() in stuffed.SerializeToString()
    told(home)
    heard = []
    metadata = tuple((f"x-{name.replace('_', '-')}".lower(), EVIL) for name in FIELDS)
    for message, extra in ((plain, ()), (stuffed, metadata)):
        assert [event async for event in home.stub.Generate(message, metadata=extra)]
        heard.append(told(home))
    assert_same(*heard)


def test_the_public_schema_has_no_word_for_it() -> None:
    service = pb.DESCRIPTOR.services_by_name["Inference"]
    asked = {name for method in service.methods for name in _field_names(method.input_type, set())}
    assert "max_tokens" in asked
    assert not asked & TRANSFER_WORDS


def _field_names(message: Descriptor, seen: set[str]) -> Iterator[str]:
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield field.name
        if field.message_type is not None:
            yield from _field_names(field.message_type, seen)
