"""Who owns which sequence, for as long as somebody waits for it."""

from __future__ import annotations

from kvrelay.core.ids import Attempt, RequestId
from kvrelay.worker.ledger import Admission, Ledger
from tests.worker.support import key, local_start


def test_every_choice_has_the_owner_of_its_start() -> None:
    ledger: Ledger[str] = Ledger()
    assert ledger.admit(local_start("r", choices=(0, 1)), "a") is Admission.NEW
    assert (ledger.owner(key("r")), ledger.owner(key("r", 1)), ledger.owner(key("r", 2))) == ("a", "a", None)
    assert ledger.choices("a", RequestId("r"), Attempt(0)) == [0, 1]
    assert ledger.choices("b", RequestId("r"), Attempt(0)) == []


def test_a_replay_may_start_choice_by_choice_under_one_attempt() -> None:
    ledger: Ledger[str] = Ledger()
    assert ledger.admit(local_start("r", attempt=1, choices=(0,)), "a") is Admission.NEW
    assert ledger.admit(local_start("r", attempt=1, choices=(1,)), "a") is Admission.NEW
    assert ledger.admit(local_start("r", attempt=1, choices=(1,)), "a") is Admission.DUPLICATE
    assert ledger.admit(local_start("r", attempt=0, choices=(1, 2)), "a") is Admission.STALE
    assert ledger.num_open == 2


async def test_empty_is_when_the_last_one_is_closed_or_forgotten() -> None:
    ledger: Ledger[str] = Ledger()
    ledger.admit(local_start("one"), "a")
    ledger.admit(local_start("two"), "b")
    ledger.close(key("one"))
    assert ledger.num_open == 1
    assert ledger.forget("b") == [key("two")]
    await ledger.wait_empty()
    ledger.close(key("two"))
    assert ledger.num_open == 0
