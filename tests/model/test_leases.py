"""Every state of the lease protocol within bounds: none says no to what is acknowledged, unless a rule is
taken away."""

from __future__ import annotations

import dataclasses

import pytest

from support.tally import record, rounds

from .leases import Bounds, Model, Rules, State, wrong
from .search import Found, search

PLAIN = Bounds(ticks=4)
BROKEN = Bounds(ticks=3, opens=2, cuts=1)
CRASHING = Bounds(ticks=3, crashes=1)
DROPPING = Bounds(ticks=3, opens=2, drops=1)
CUTTING_OVER = Bounds(ticks=3, opens=2, cutovers=1)
ALL = {
    "plain": PLAIN, "broken": BROKEN, "crash": CRASHING, "drop": DROPPING, "cut-over": CUTTING_OVER,
}  # fmt: skip
# Where the lack of each rule shows.
WHERE = {
    "margin": PLAIN,
    "from_the_asking": PLAIN,
    "wait_for_acks": PLAIN,
    "only_close_releases": BROKEN,
    "registered_first": PLAIN,
    "grant_behind_deltas": PLAIN,
    "expiry_first": PLAIN,
    "acked_after_applied": PLAIN,
    "resume_is_whole": BROKEN,
    "startup_wait": CRASHING,
    "flag_first": CRASHING,
    "flag_while_leased": CRASHING,
    "void_first": DROPPING,
    "drop_waits": DROPPING,
    "under_the_name": CUTTING_OVER,
}


def look(rules: Rules, bounds: Bounds) -> Found[State]:
    return search(State(), Model(rules, bounds).steps, wrong, most=rounds(400_000, 20_000_000))


@pytest.mark.parametrize("bounds", ALL.values(), ids=ALL)
def test_with_every_rule_no_state_is_wrong(bounds: Bounds) -> None:
    """Whatever happens, in whatever order."""
    further = dataclasses.replace(bounds, ticks=bounds.ticks + rounds(0, 1), adds=rounds(1, 2))
    found = look(Rules(), further)
    assert found.trace is None, "\n".join(found.trace)
    assert found.states > 1000
    record("states of the lease protocol, all that are within bounds", found.states, "no wrong no")


@pytest.mark.parametrize("rule", WHERE)
def test_without_a_rule_there_is_a_wrong_no(rule: str) -> None:
    """Each is needed: the search finds what goes wrong without it."""
    found = look(dataclasses.replace(Rules(), **{rule: False}), WHERE[rule])
    assert found.trace is not None, f"nothing goes wrong without {rule}, in {found.states} states"


def test_every_rule_is_taken_away_once() -> None:
    """One that is added to the model is added above."""
    assert set(WHERE) == {field.name for field in dataclasses.fields(Rules)}
