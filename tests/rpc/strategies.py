"""Any word of core that can go on the wire."""

from __future__ import annotations

from hypothesis import strategies as st

from kvrelay.core import events as ev
from kvrelay.core.handoff import ChoiceTokens, Commit, Handoff, KvIdentity, KvShard, PushOpen, Receiver, Slab
from kvrelay.core.placement import Load, Role, WorkerRecord
from kvrelay.core.request import MAX_SEED, MIN_SEED, Leg, Migrate, SamplingParams, Start

u32 = st.integers(0, 2**32 - 1)
small = st.integers(0, 1000)
text = st.text(max_size=8)
name = st.text(min_size=1, max_size=8)
f32 = st.floats(width=32, allow_nan=False)
f64 = st.floats(allow_nan=False)
token_ids = st.lists(u32, max_size=6).map(tuple)


def tops(width: int) -> st.SearchStrategy[tuple[tuple[int, float], ...]]:
    return st.lists(st.tuples(u32, f32), min_size=width, max_size=width).map(tuple)


@st.composite
def columns(draw: st.DrawFn, min_size: int = 0, max_size: int = 4) -> tuple[ev.Token, ...]:
    """Logprobs for all or none, one width of tops."""
    with_logprobs = draw(st.booleans())
    width = draw(st.integers(0, 3)) if with_logprobs else 0
    token = st.builds(ev.Token, u32, f32 if with_logprobs else st.none(), tops(width))
    return tuple(draw(st.lists(token, min_size=min_size, max_size=max_size)))


sampling = st.builds(
    SamplingParams,
    max_tokens=u32,
    temperature=f64,
    top_p=f64,
    top_k=u32,
    min_p=f64,
    seed=st.integers(MIN_SEED, MAX_SEED),
    repetition_penalty=f64,
    presence_penalty=f64,
    frequency_penalty=f64,
    logit_bias=st.lists(st.tuples(u32, f32), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=token_ids,
    ignore_eos=st.booleans(),
    min_tokens=u32,
)
identity = st.builds(
    KvIdentity,
    model=text,
    rope=text,
    tokenizer=text,
    num_layers=u32,
    num_kv_heads=u32,
    head_dim=u32,
    block_size=u32,
    protocol=u32,
)
shard = st.builds(
    KvShard, layer_begin=u32, layer_end=u32, head_begin=u32, head_end=u32, dtype=text, order=text
)
receiver = st.builds(
    Receiver, worker_id=text, incarnation=text, address=text, shard=shard, handle=st.binary(max_size=48)
)
load = st.builds(
    Load,
    **{field: u32 for field in Load.__dataclass_fields__ if field.startswith("num_")},
    waiting_tokens=u32,
    prefill_tokens_per_s=f32,
    step_ms=f32,
    engine_age_ms=f32,
    draining=st.booleans(),
)
record = st.builds(
    WorkerRecord,
    worker_id=text,
    incarnation=text,
    role=st.sampled_from(Role),
    address=text,
    push_address=text,
    model=text,
    identity=identity,
    shard=shard,
    num_blocks=u32,
    max_context=u32,
    pid=u32,
)


@st.composite
def starts(draw: st.DrawFn) -> Start:
    leg = draw(st.sampled_from(Leg))
    transfer_id = None if leg is Leg.LOCAL else draw(name)
    tokens = draw(st.lists(u32, min_size=1, max_size=6))
    receivers = tuple(draw(st.lists(receiver, min_size=1, max_size=2)))
    return Start(
        request_id=draw(name),
        attempt=draw(u32),
        choices=tuple(draw(st.lists(u32, min_size=1, max_size=3))),
        token_ids=tuple(tokens),
        num_prompt=draw(st.integers(1, len(tokens))),
        sampling=draw(sampling),
        leg=leg,
        transfer_id=transfer_id,
        handoff=Handoff(transfer_id, receivers, draw(u32)) if leg is Leg.SEND else None,
        cache_salt=draw(st.binary(max_size=8)),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        replay=draw(st.booleans()),
        timeout_ms=draw(u32),
    )


key = st.builds(ev.SeqKey, request_id=text, choice=u32, attempt=u32)
migrate = st.builds(
    Migrate, key, to_attempt=u32, num_tokens=u32,
    handoff=st.builds(Handoff, text, st.lists(receiver, max_size=2).map(tuple), u32),
)
event = st.one_of(
    st.builds(ev.Reserved, key, u32),
    st.builds(ev.Refused, key, st.sampled_from(ev.RefuseReason), text, u32),
    st.builds(ev.FirstToken, key, u32, columns(1, 1).map(lambda tokens: tokens[0]), u32, f32, f32, f32),
    st.builds(ev.Tokens, key, u32, columns()),
    st.builds(ev.Committed, key, u32, columns()),
    st.builds(ev.Finished, key, st.sampled_from(ev.FinishReason)),
    st.builds(ev.Failed, key, st.sampled_from(ev.FailReason), text),
    st.builds(ev.Leaving, key),
    st.builds(ev.Stayed, key, text, text),
)
frame = st.one_of(
    st.builds(
        PushOpen,
        transfer_id=text,
        request_id=text,
        attempt=u32,
        identity=identity,
        shard=shard,
        sender=text,
        sender_incarnation=text,
        receiver_incarnation=text,
        first_block=u32,
        num_blocks=u32,
        checksum=text,
        tenant=st.binary(max_size=16),
        handle=st.binary(max_size=48),
    ),
    st.builds(
        Slab,
        seq_no=u32,
        first_block=u32,
        num_blocks=u32,
        layer_begin=u32,
        layer_end=u32,
        head_begin=u32,
        head_end=u32,
        checksum=st.integers(0, 2**64 - 1),
        payload=st.binary(max_size=32),
    ),
    st.builds(Commit, u32, u32, st.lists(st.builds(ChoiceTokens, u32, columns()), max_size=2).map(tuple)),
)
