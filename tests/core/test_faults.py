"""Fault rules: what they say, what they strike, and what a mistake in them is told."""

from __future__ import annotations

import pytest

from kvrelay.core.config import Config, FaultSettings, load_faults
from kvrelay.core.errors import ConfigError
from kvrelay.core.faults import Faults, Seam, parse_rules

COMMIT = {"frame": "commit", "transfer": "t1", "worker": "d"}


def faults_of(**rule: object) -> Faults:
    return Faults(parse_rules([{"at": "pipe.send", "do": "drop", **rule}]))


def test_the_nth_message_that_matches_is_struck_and_no_other() -> None:
    faults = faults_of(match={"frame": "commit", "nth": 2})
    assert faults.meet(Seam.PIPE_SEND, {"frame": "slab"}) is None
    struck = [faults.meet(Seam.PIPE_SEND, COMMIT) is not None for _ in range(3)]
    assert struck == [False, True, False]


def test_times_bounds_a_rule_and_the_seam_must_be_its_own() -> None:
    faults = faults_of(times=1)
    assert faults.meet(Seam.PIPE_RECEIVE, COMMIT) is None
    assert [faults.meet(Seam.PIPE_SEND, COMMIT) is not None for _ in range(2)] == [True, False]


def test_a_seed_makes_luck_repeatable() -> None:
    def run() -> list[bool]:
        faults = faults_of(probability=0.5, seed=7)
        return [faults.meet(Seam.PIPE_SEND, COMMIT) is not None for _ in range(20)]

    assert run() == run()
    assert 0 < sum(run()) < 20


def test_one_message_may_carry_several_events() -> None:
    faults = Faults(parse_rules([{"at": "link.down", "do": "drop", "match": {"event": "committed"}}]))
    facts = {"side": "writer", "event": frozenset({"tokens", "committed"})}
    assert faults.meet(Seam.LINK_DOWN, facts) is not None


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"at": "pipe.sent", "do": "drop"}, "did you mean `pipe.send`"),
        ({"at": "pipe.send", "do": "dropp"}, "did you mean `drop`"),
        ({"at": "pipe.send", "do": "drop", "probabilty": 1}, "did you mean `probability`"),
        ({"at": "pipe.send", "do": "drop", "probability": 2}, "from 0 to 1"),
        ({"at": "pipe.send", "do": "drop", "match": {"frame": "comit"}}, "did you mean `commit`"),
        ({"at": "registry", "do": "corrupt"}, "cut or stall it"),
        ("drop", "expected `at:`"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_the_way_out(rule: object, words: str) -> None:
    with pytest.raises(ConfigError, match="rule 1") as caught:
        parse_rules([rule])
    assert words in str(caught.value)


def test_without_a_file_there_is_nothing_to_ask() -> None:
    assert load_faults(Config()) is None
    with pytest.raises(ConfigError, match="cannot read"):
        load_faults(Config(faults=FaultSettings("/nowhere/rules.yaml")))
