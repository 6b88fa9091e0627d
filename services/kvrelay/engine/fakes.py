"""The engine's neighbours without tensors and without a network, for tests of whoever uses an engine.

`FakeRunner` keeps a make-believe KV cache: the entry of a token is a digest of all tokens up to it, computed from the
entry before it *as found in the block table*. A block that was shared, copied, evicted, received or freed wrongly
gives a wrong digest, and so wrong tokens: output that equals `expected_output` proves the bookkeeping of every block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.core.batch import Draw, Row, RowResult, StepPlan, StepResult
from kvrelay.core.events import Event, Token
from kvrelay.core.handoff import Commit
from kvrelay.core.ids import BlockId, Choice, SeqKey, TokenId, TransferId
from kvrelay.core.placement import Load
from kvrelay.core.ports import EngineInbox, Expected, Outgoing
from kvrelay.core.request import SamplingParams

_MASK = (1 << 64) - 1


def _mix(*words: int) -> int:
    """64 well-stirred bits of some integers (the finaliser of SplitMix64, chained)."""
    state = 0
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def digests(tokens: Sequence[TokenId]) -> list[int]:
    """The make-believe KV of each token."""
    out: list[int] = []
    for token in tokens:
        out.append(_mix(out[-1] if out else 0, token))
    return out


@dataclass(slots=True)
class FakeModel:
    """A pure function from what was said so far to the next token. Penalties make it depend on where the prompt ends,
    as they do in a true one, and every log probability tells after which tokens it was drawn."""

    vocab_size: int = 256
    eos_token_ids: frozenset[int] = frozenset()

    def draw(self, digest: int, num_prompt: int, sampling: SamplingParams, draw: Draw) -> Token:
        luck = 0 if sampling.is_greedy else _mix(sampling.seed, draw.choice, draw.index)
        if sampling.frequency_penalty or sampling.presence_penalty:
            luck = _mix(luck, num_prompt)
        eos = frozenset[int]() if sampling.ignore_eos else self.eos_token_ids
        barred = eos | set(sampling.stop_token_ids) if draw.index < sampling.min_tokens else frozenset[int]()
        chosen = _mix(digest, luck) % self.vocab_size
        while chosen in barred:
            chosen = (chosen + 1) % self.vocab_size
        token_id = TokenId(chosen)
        if sampling.logprobs is None:
            return Token(token_id)
        logprob = -(_mix(digest, token_id) % 64) / 8
        top = tuple((TokenId((token_id + i) % self.vocab_size), logprob - i) for i in range(sampling.logprobs))
        return Token(token_id, logprob, top)

    def continue_from(
        self, token_ids: Sequence[TokenId], num_prompt: int, sampling: SamplingParams, choice: Choice, *, limit: int
    ) -> list[TokenId]:
        """The output a correct engine gives, from `token_ids` to the end; `limit`: longest sequence in tokens."""
        drawn = self.drawn_from(token_ids, num_prompt, sampling, choice, limit=limit)
        return [*token_ids[num_prompt:], *(token.token_id for token in drawn)]

    def drawn_from(
        self, token_ids: Sequence[TokenId], num_prompt: int, sampling: SamplingParams, choice: Choice, *, limit: int
    ) -> list[Token]:
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.eos_token_ids)
        drawn, digest, num_tokens = list[Token](), digests(token_ids)[-1], len(token_ids)
        while True:
            index = num_tokens - num_prompt
            drawn.append(token := self.draw(digest, num_prompt, sampling, Draw(choice, index)))
            num_tokens += 1
            digest = _mix(digest, token.token_id)
            is_stop = token.token_id in stops and index >= sampling.min_tokens
            if is_stop or index + 1 >= sampling.max_tokens or num_tokens >= limit:
                return drawn


class FakeRunner:
    """`Runner` over a dictionary. Raises if a row reads KV that nobody has written."""

    def __init__(
        self, block_size: int = 16, vocab_size: int = 256, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self.block_size = block_size
        self.model = FakeModel(vocab_size, eos_token_ids)
        self.kv: dict[tuple[BlockId, int], int] = {}
        """Digest by block and slot."""
        self.nan_keys: set[SeqKey] = set()
        """Rows of these keys have no distribution."""
        self.error: Exception | None = None
        """Raised by the next step."""
        self.before_step: Callable[[StepPlan], None] | None = None
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.before_step is not None:
            self.before_step(plan)
        if self.error is not None:
            raise self.error
        for copy in plan.copies:
            for slot in range(self.block_size):
                if (copy.source, slot) in self.kv:
                    self.kv[copy.target, slot] = self.kv[copy.source, slot]
        return StepResult(tuple(self._row(row) for row in plan.rows))

    def _row(self, row: Row) -> RowResult:
        digest = self._read(row, row.num_computed - 1) if row.num_computed else 0
        for position in range(row.num_computed, row.num_computed + row.num_scheduled):
            digest = _mix(digest, row.token_ids[position])
            self.kv[row.block_table[position // self.block_size], position % self.block_size] = digest
        if row.key in self.nan_keys:
            return RowResult((), "the logits of this row are not numbers")
        return RowResult(tuple(self.model.draw(digest, row.num_prompt, row.sampling, draw) for draw in row.draws))

    def _read(self, row: Row, position: int) -> int:
        return self.kv[row.block_table[position // self.block_size], position % self.block_size]

    def write(self, blocks: Sequence[BlockId], first_block: int, token_ids: Sequence[TokenId]) -> None:
        """What a transfer of `token_ids` from block `first_block` on leaves in `blocks`."""
        for position, digest in enumerate(digests(token_ids)):
            place = position // self.block_size - first_block
            if place >= 0:
                self.kv[blocks[place], position % self.block_size] = digest


@dataclass(slots=True)
class FakeTransfer:
    """`TransferPort` that writes down what it was asked, and plays the other side when told to."""

    expected: dict[TransferId, Expected] = field(default_factory=dict)
    """Open reservations: from `expect` until `end_push`."""
    closed: set[TransferId] = field(default_factory=set)
    outgoing: dict[TransferId, Outgoing] = field(default_factory=dict)
    """Open sends: from `send` until `end_send`."""
    progressed: dict[TransferId, list[int]] = field(default_factory=dict)
    commits: dict[TransferId, Commit] = field(default_factory=dict)
    aborted: set[TransferId] = field(default_factory=set)

    def expect(self, expected: Expected) -> None:
        self.expected[expected.transfer_id] = expected

    def close(self, transfer_id: TransferId) -> None:
        self.closed.add(transfer_id)

    def send(self, outgoing: Outgoing) -> None:
        self.outgoing[outgoing.handoff.transfer_id] = outgoing

    def progress(self, transfer_id: TransferId, num_computed: int) -> None:
        self.progressed.setdefault(transfer_id, []).append(num_computed)

    def finish(self, transfer_id: TransferId, commit: Commit) -> None:
        self.commits[transfer_id] = commit

    def abort_send(self, transfer_id: TransferId) -> None:
        self.aborted.add(transfer_id)

    def land(
        self,
        inbox: EngineInbox,
        runner: FakeRunner,
        transfer_id: TransferId,
        token_ids: Sequence[TokenId],
        commit: Commit,
    ) -> list[bool]:
        """Write the KV of `token_ids` into the reserved blocks and report it. The reply appears in the list."""
        expected = self.expected[transfer_id]
        runner.write(expected.blocks, expected.first_block, token_ids)
        replies: list[bool] = []
        inbox.landed(transfer_id, commit, replies.append)
        return replies

    def end_push(self, inbox: EngineInbox, transfer_id: TransferId, error: str = "") -> None:
        del self.expected[transfer_id]
        inbox.push_ended(transfer_id, error)

    def end_send(self, inbox: EngineInbox, transfer_id: TransferId, error: str = "") -> None:
        del self.outgoing[transfer_id]
        inbox.send_ended(transfer_id, error)


class RecordingOutbox:
    """`EngineOutbox` that keeps everything it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.loads: list[Load] = []
        self.num_calls = 0
        self.death: BaseException | None = None

    def on_step(self, events: Sequence[Event], load: Load) -> None:
        self.num_calls += 1
        self.events.extend(events)
        self.loads.append(load)

    def on_death(self, error: BaseException) -> None:
        self.death = error

    def take(self) -> list[Event]:
        """The events since the last `take`."""
        events, self.events = self.events, []
        return events
