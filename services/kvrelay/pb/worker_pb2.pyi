from kvrelay.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Leg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_UNSPECIFIED: _ClassVar[Leg]
    LEG_LOCAL: _ClassVar[Leg]
    LEG_RECEIVE: _ClassVar[Leg]
    LEG_SEND: _ClassVar[Leg]
LEG_UNSPECIFIED: Leg
LEG_LOCAL: Leg
LEG_RECEIVE: Leg
LEG_SEND: Leg

class RouterMessage(_message.Message):
    __slots__ = ("hello", "start", "cancel", "beat", "migrate")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    start: Start
    cancel: Cancel
    beat: RouterBeat
    migrate: Migrate
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., beat: _Optional[_Union[RouterBeat, _Mapping]] = ..., migrate: _Optional[_Union[Migrate, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "protocol")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    protocol: int
    def __init__(self, router_id: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class RouterBeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Start(_message.Message):
    __slots__ = ("request_id", "attempt", "choices", "token_ids", "num_prompt", "sampling", "leg", "transfer_id", "receivers", "num_cached_tokens", "cache_salt", "priority", "replay", "timeout_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt: int
    sampling: _common_pb2.Sampling
    leg: Leg
    transfer_id: str
    receivers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Receiver]
    num_cached_tokens: int
    cache_salt: bytes
    priority: int
    replay: bool
    timeout_ms: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., leg: _Optional[_Union[Leg, str]] = ..., transfer_id: _Optional[str] = ..., receivers: _Optional[_Iterable[_Union[_common_pb2.Receiver, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., replay: _Optional[bool] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt", "choices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class Migrate(_message.Message):
    __slots__ = ("request_id", "choice", "attempt", "to_attempt", "num_tokens", "transfer_id", "receivers", "num_cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TO_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    attempt: int
    to_attempt: int
    num_tokens: int
    transfer_id: str
    receivers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Receiver]
    num_cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., attempt: _Optional[int] = ..., to_attempt: _Optional[int] = ..., num_tokens: _Optional[int] = ..., transfer_id: _Optional[str] = ..., receivers: _Optional[_Iterable[_Union[_common_pb2.Receiver, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("welcome", "events", "beat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    events: Events
    beat: Load
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., events: _Optional[_Union[Events, _Mapping]] = ..., beat: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "address", "push_address", "model", "identity", "shard", "num_blocks", "max_context", "pid", "load", "numerics")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PUSH_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: str
    address: str
    push_address: str
    model: str
    identity: _common_pb2.KvIdentity
    shard: _common_pb2.KvShard
    num_blocks: int
    max_context: int
    pid: int
    load: Load
    numerics: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., push_address: _Optional[str] = ..., model: _Optional[str] = ..., identity: _Optional[_Union[_common_pb2.KvIdentity, _Mapping]] = ..., shard: _Optional[_Union[_common_pb2.KvShard, _Mapping]] = ..., num_blocks: _Optional[int] = ..., max_context: _Optional[int] = ..., pid: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., numerics: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_blocks", "num_free", "num_cached", "num_held", "num_draining", "num_running", "num_waiting", "num_reserved", "num_sending", "waiting_tokens", "prefill_tokens_per_s", "step_ms", "engine_age_ms", "draining")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_SENDING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_draining: int
    num_running: int
    num_waiting: int
    num_reserved: int
    num_sending: int
    waiting_tokens: int
    prefill_tokens_per_s: float
    step_ms: float
    engine_age_ms: float
    draining: bool
    def __init__(self, num_blocks: _Optional[int] = ..., num_free: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_held: _Optional[int] = ..., num_draining: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_reserved: _Optional[int] = ..., num_sending: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_ms: _Optional[float] = ..., engine_age_ms: _Optional[float] = ..., draining: _Optional[bool] = ...) -> None: ...

class Events(_message.Message):
    __slots__ = ("events", "load")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    load: Load
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("request_id", "choice", "attempt", "reserved", "refused", "first_token", "tokens", "committed", "finished", "failed", "leaving", "stayed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STAYED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    attempt: int
    reserved: Reserved
    refused: Refused
    first_token: FirstToken
    tokens: Tokens
    committed: Committed
    finished: Finished
    failed: Failed
    leaving: Leaving
    stayed: Stayed
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., attempt: _Optional[int] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., stayed: _Optional[_Union[Stayed, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("num_cached_tokens", "receivers")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    receivers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Receiver]
    def __init__(self, num_cached_tokens: _Optional[int] = ..., receivers: _Optional[_Iterable[_Union[_common_pb2.Receiver, _Mapping]]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "message", "retry_after_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    retry_after_ms: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("index", "token", "num_cached_tokens", "queue_ms", "prefill_ms", "overlap_ms")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_MS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token: _common_pb2.TokenColumn
    num_cached_tokens: int
    queue_ms: float
    prefill_ms: float
    overlap_ms: float
    def __init__(self, index: _Optional[int] = ..., token: _Optional[_Union[_common_pb2.TokenColumn, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., overlap_ms: _Optional[float] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("first_index", "tokens")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    tokens: _common_pb2.TokenColumn
    def __init__(self, first_index: _Optional[int] = ..., tokens: _Optional[_Union[_common_pb2.TokenColumn, _Mapping]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("first_index", "tokens")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    tokens: _common_pb2.TokenColumn
    def __init__(self, first_index: _Optional[int] = ..., tokens: _Optional[_Union[_common_pb2.TokenColumn, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stayed(_message.Message):
    __slots__ = ("transfer_id", "message")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    message: str
    def __init__(self, transfer_id: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
