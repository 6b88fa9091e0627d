from kvrelay.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushFrame(_message.Message):
    __slots__ = ("open", "slab", "heartbeat", "commit")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SLAB_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    open: PushOpen
    slab: PushSlab
    heartbeat: PushHeartbeat
    commit: PushCommit
    def __init__(self, open: _Optional[_Union[PushOpen, _Mapping]] = ..., slab: _Optional[_Union[PushSlab, _Mapping]] = ..., heartbeat: _Optional[_Union[PushHeartbeat, _Mapping]] = ..., commit: _Optional[_Union[PushCommit, _Mapping]] = ...) -> None: ...

class PushOpen(_message.Message):
    __slots__ = ("transfer_id", "request_id", "attempt", "identity", "shard", "sender", "sender_incarnation", "receiver_incarnation", "first_block", "num_blocks", "checksum", "tenant", "handle")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SENDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    request_id: str
    attempt: int
    identity: _common_pb2.KvIdentity
    shard: _common_pb2.KvShard
    sender: str
    sender_incarnation: str
    receiver_incarnation: str
    first_block: int
    num_blocks: int
    checksum: str
    tenant: bytes
    handle: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., identity: _Optional[_Union[_common_pb2.KvIdentity, _Mapping]] = ..., shard: _Optional[_Union[_common_pb2.KvShard, _Mapping]] = ..., sender: _Optional[str] = ..., sender_incarnation: _Optional[str] = ..., receiver_incarnation: _Optional[str] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., checksum: _Optional[str] = ..., tenant: _Optional[bytes] = ..., handle: _Optional[bytes] = ...) -> None: ...

class PushSlab(_message.Message):
    __slots__ = ("seq_no", "first_block", "num_blocks", "layer_begin", "layer_end", "head_begin", "head_end", "checksum", "payload")
    SEQ_NO_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_BEGIN_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    seq_no: int
    first_block: int
    num_blocks: int
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    checksum: int
    payload: bytes
    def __init__(self, seq_no: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_begin: _Optional[int] = ..., head_end: _Optional[int] = ..., checksum: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PushCommit(_message.Message):
    __slots__ = ("num_tokens", "num_slabs", "choices")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLABS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_slabs: int
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceTokens]
    def __init__(self, num_tokens: _Optional[int] = ..., num_slabs: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[ChoiceTokens, _Mapping]]] = ...) -> None: ...

class ChoiceTokens(_message.Message):
    __slots__ = ("choice", "tokens")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    tokens: _common_pb2.TokenColumn
    def __init__(self, choice: _Optional[int] = ..., tokens: _Optional[_Union[_common_pb2.TokenColumn, _Mapping]] = ...) -> None: ...

class PushResult(_message.Message):
    __slots__ = ("committed", "error", "retryable")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    committed: bool
    error: str
    retryable: bool
    def __init__(self, committed: _Optional[bool] = ..., error: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...
