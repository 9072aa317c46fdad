"""The lease protocol as a state machine: a daemon, one replica, a stream between them, and a clock each.

Times are whole ticks. The replica's clock may lose one tick against the daemon's: that is what the margin is
for. A stream keeps order, delays as it likes, and may break, which loses all that is on it. The daemon may
crash and start again: it keeps what is durable, and forgets its subscriptions.

Keys are their seqs: a copy up to seq s holds the keys 1 .. s. An epoch is one generation of one filter: a
drop ends it, and a new filter of the same name begins the next; so does a cut-over, which keeps the keys.
Adds, growth and joined deltas are one kind of change. Not modelled: ending copies that lag, caps, counts.

Each rule can be taken away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# Of a lease, in ticks.
DURATION = 2
NEVER = -99

Message = tuple[str, int, int]
"""Kind, subscription, and a seq or the time that a renewal was asked for."""


@dataclass(frozen=True)
class Rules:
    """What the protocol stands on."""

    margin: bool = True
    """A copy is trusted for less, and waited for longer, than the duration."""
    from_the_asking: bool = True
    """A replica counts from before it asked, not from the grant's arrival."""
    wait_for_acks: bool = True
    """An Add waits for leases at all."""
    only_close_releases: bool = True
    """A stream that breaks releases nothing."""
    registered_first: bool = True
    """What is durable after the cut of an image is sent, since the copy was registered before."""
    grant_behind_deltas: bool = True
    """No grant while a delta waits to be sent."""
    expiry_first: bool = True
    """The daemon takes down an expiry before the grant is on its way."""
    acked_after_applied: bool = True
    """A replica applies first and acknowledges then."""
    resume_is_whole: bool = True
    """A copy that is taken up again is sent all it lacks."""
    startup_wait: bool = True
    """After a start nothing is acknowledged until earlier leases have run out."""
    flag_first: bool = True
    """The flag that a start waits by is durable before the first grant."""
    flag_while_leased: bool = True
    """It is not taken back while a lease may be out."""
    void_first: bool = True
    """On a reset a replica voids its copy before it acknowledges."""
    drop_waits: bool = True
    """A drop is not complete while a lease is out."""
    under_the_name: bool = True
    """Leases of whichever generation of a filter count."""


@dataclass(frozen=True)
class Bounds:
    """How far the search goes."""

    ticks: int = 6
    adds: int = 1
    opens: int = 1
    cuts: int = 0
    crashes: int = 0
    drops: int = 0
    cutovers: int = 0
    on_the_way: int = 2


class Sub(NamedTuple):
    """A subscription as the daemon has it. ``waits``: the newest change that is not sent yet, 0: none."""

    number: int
    epoch: int
    acked: int = 0
    waits: int = 0
    registered: bool = True
    live: bool = True
    expires: int = NEVER
    unrecorded: bool = False
    reset: bool = False


class State(NamedTuple):
    """All there is."""

    now: int = 0
    lost: int = 0
    """Ticks that the replica's clock has lost."""
    epoch: int = 1
    created: int = 1
    """The epoch in which this filter was created."""
    durable: int = 0
    acked: int = 0
    """Adds of this filter that are acknowledged."""
    dropping: bool = False
    flag: int = 0
    flag_queued: bool = False
    wait_until: int = 0
    subs: tuple[Sub, ...] = ()
    opens: int = 0
    cuts: int = 0
    crashes: int = 0
    drops: int = 0
    cutovers: int = 0
    down: tuple[Message, ...] = ()
    up: tuple[Message, ...] = ()
    connected: bool = False
    # The replica: what it trusts, and what its open subscription brings.
    trusted: tuple[int, int, int] = (0, 0, NEVER)
    """Epoch, seq, deadline on its own clock."""
    coming: tuple[int, int, int] = (0, 0, 0)
    """Subscription, epoch, seq; 0: none."""
    owes: Message = ("", 0, 0)
    """What it acknowledged before it did it, where that rule is taken away."""

    @property
    def clock(self) -> int:
        """The replica's."""
        return self.now - self.lost


def wrong(state: State) -> bool:
    """Whether the replica would now say no to a key that is acknowledged."""
    epoch, seq, deadline = state.trusted
    if state.clock >= deadline:
        return False
    return state.acked > (seq if epoch >= state.created else 0)


class Model:
    """The steps that there are from a state."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules, self.bounds = rules, bounds
        self.margin = 1 if rules.margin else 0
        self.longest = DURATION + self.margin

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """What can happen next, each with its name."""
        yield from self._time(state)
        yield from self._daemon(state)
        yield from self._stream(state)
        yield from self._replica(state)

    def _time(self, state: State) -> Iterator[tuple[str, State]]:
        if state.now < self.bounds.ticks:
            yield "tick", state._replace(now=state.now + 1)
            if not state.lost:
                yield "tick, lost by the replica's clock", state._replace(now=state.now + 1, lost=1)

    # -- the daemon

    def _daemon(self, state: State) -> Iterator[tuple[str, State]]:
        rules, bounds = self.rules, self.bounds
        if state.durable < bounds.adds and not state.dropping and state.durable == state.acked:
            seq = state.durable + 1
            subs = tuple(
                sub._replace(waits=seq)
                if sub.registered and sub.live and not sub.reset and sub.epoch == state.epoch
                else sub
                for sub in state.subs
            )
            yield "an add is durable", state._replace(durable=seq, subs=subs)
        if state.acked < state.durable and (not rules.wait_for_acks or self._settled(state, state.durable)):
            yield "the add is acknowledged", state._replace(acked=state.durable)
        if state.cutovers < bounds.cutovers and not state.dropping and state.durable == state.acked:
            after = state._replace(epoch=state.epoch + 1, cutovers=state.cutovers + 1)
            yield "a rebuilt generation takes over", self._reset_all(after)
        if state.drops < bounds.drops and not state.dropping:
            yield "a drop is durable", self._reset_all(state._replace(dropping=True, drops=state.drops + 1))
        if state.dropping and (not rules.drop_waits or self._settled(state, bounds.adds + 1, drop=True)):
            yield (
                "the drop is complete, the name is taken anew",
                _created_anew(state),
            )
        if state.flag_queued:
            yield "the flag is durable", state._replace(flag_queued=False, flag=self.longest)
        leased = any(sub.expires > state.now or sub.unrecorded for sub in state.subs)
        if state.flag and state.now >= state.wait_until and not (leased and rules.flag_while_leased):
            yield "the flag is taken back", state._replace(flag=0)
        for place, sub in enumerate(state.subs):
            if sub.unrecorded:
                later = sub._replace(unrecorded=False, expires=state.now + self.longest)
                yield "an expiry is taken down", _with(state, place, later)
            if not sub.registered:
                yield "a copy is registered", _with(state, place, sub._replace(registered=True))
            if sub.waits and sub.live and len(state.down) < bounds.on_the_way:
                sent = _with(state, place, sub._replace(waits=0))
                yield "a delta is sent", sent._replace(down=(*state.down, ("delta", sub.number, sub.waits)))
        if state.crashes < bounds.crashes:
            yield "the daemon is killed and starts", self._restarted(state)

    def _settled(self, state: State, seq: int, *, drop: bool = False) -> bool:
        if state.now < state.wait_until:
            return False
        by_generation = not self.rules.under_the_name and not drop
        return all(
            sub.acked >= seq or sub.expires <= state.now or (by_generation and sub.epoch != state.epoch)
            for sub in state.subs
        )

    def _reset_all(self, state: State) -> State:
        reset = [sub for sub in state.subs if sub.live and not sub.reset]
        down = state.down + tuple(("reset", sub.number, self.bounds.adds + 1) for sub in reset)
        subs = tuple(sub._replace(reset=True, waits=0) if sub in reset else sub for sub in state.subs)
        return state._replace(down=down, subs=subs)

    def _restarted(self, state: State) -> State:
        if state.dropping:
            # What is durable is done; whoever asked for it may never hear.
            state = _created_anew(state)
        wait = state.now + state.flag if self.rules.startup_wait else 0
        return self._broken(
            state._replace(crashes=state.crashes + 1, subs=(), flag_queued=False, wait_until=wait)
        )

    def _broken(self, state: State) -> State:
        released = {} if self.rules.only_close_releases else {"expires": NEVER}
        subs = tuple(sub._replace(live=False, waits=0, **released) for sub in state.subs)  # type: ignore[arg-type]
        return state._replace(subs=subs, down=(), up=(), connected=False, coming=(0, 0, 0), owes=("", 0, 0))

    # -- the stream

    def _stream(self, state: State) -> Iterator[tuple[str, State]]:
        if state.connected and state.cuts < self.bounds.cuts:
            yield "the stream breaks", self._broken(state._replace(cuts=state.cuts + 1))
        if state.up:
            message = state.up[0]
            for name, after in self._heard(state._replace(up=state.up[1:]), message):
                yield f"the daemon takes {message[0]}{name}", after

    def _heard(self, state: State, message: Message) -> Iterator[tuple[str, State]]:
        kind, number, value = message
        place = next((at for at, sub in enumerate(state.subs) if sub.number == number), None)
        if kind == "close":
            yield "", state._replace(subs=tuple(sub for sub in state.subs if sub.number != number))
        elif place is None:
            yield ", of nobody", state
        elif kind == "ack":
            sub = state.subs[place]
            yield "", _with(state, place, sub._replace(acked=max(sub.acked, value)))
        elif self._may_grant(state, state.subs[place]) and len(state.down) < self.bounds.on_the_way:
            sub = state.subs[place]
            if self.rules.expiry_first:
                sub = sub._replace(expires=state.now + self.longest)
            else:
                sub = sub._replace(unrecorded=True)
            if state.flag < self.longest:
                state = state._replace(flag_queued=True)
            yield ", granted", _with(state, place, sub)._replace(down=(*state.down, ("grant", number, value)))
        else:
            # Put off, until it asks again.
            yield ", in vain", state._replace(flag_queued=state.flag_queued or state.flag < self.longest)

    def _may_grant(self, state: State, sub: Sub) -> bool:
        if sub.reset or not sub.live or (self.rules.flag_first and state.flag < self.longest):
            return False
        return not (self.rules.grant_behind_deltas and sub.waits)

    # -- the replica

    def _replica(self, state: State) -> Iterator[tuple[str, State]]:
        if state.opens < self.bounds.opens and not state.coming[0] and not state.connected:
            yield from self._opened(state._replace(opens=state.opens + 1, connected=True))
        number, _, seq = state.coming
        if number and len(state.up) < self.bounds.on_the_way:
            # Asked with the clock as it is now.
            renewal = ("renew", number, state.clock)
            if seq >= 0 and renewal not in state.up:
                yield "a renewal is asked for", state._replace(up=(*state.up, renewal))
        if state.owes[0]:
            yield (
                "the replica does what it acknowledged",
                self._done(state, state.owes)._replace(owes=("", 0, 0)),
            )
        elif state.down:
            after = state._replace(down=state.down[1:])
            yield f"the replica takes {state.down[0][0]}", self._taken(after, state.down[0])

    def _opened(self, state: State) -> Iterator[tuple[str, State]]:
        if state.dropping:
            return
        epoch, seq, _ = state.trusted
        number = state.opens
        sub = Sub(number, state.epoch, registered=self.rules.registered_first)
        if epoch == state.epoch:
            # It holds this filter already, up to some seq; what it lacks follows.
            lacks = state.durable if self.rules.resume_is_whole and state.durable > seq else 0
            state = state._replace(coming=(number, epoch, seq))
            yield "a copy is taken up again", state._replace(subs=(*state.subs, sub._replace(waits=lacks)))
        else:
            state = state._replace(coming=(number, state.epoch, -1), down=(("image", number, state.durable),))
            yield "a copy is begun", state._replace(subs=(*state.subs, sub))

    def _taken(self, state: State, message: Message) -> State:
        """What a replica does with a message, and what it answers."""
        kind, number, value = message
        if kind == "grant" or number != state.coming[0]:
            return self._done(state, message)
        ack: tuple[Message, ...] = (("ack", number, value),)
        if kind == "reset":
            ack = (*ack, ("close", number, 0))
        early = kind == "reset" and not self.rules.void_first
        early = early or (kind == "delta" and not self.rules.acked_after_applied)
        if early:
            return state._replace(owes=message, up=state.up + ack)
        state = self._done(state, message)
        return state._replace(up=state.up + ack)

    def _done(self, state: State, message: Message) -> State:
        kind, number, value = message
        mine, epoch, seq = state.coming
        if number != mine:
            return state
        if kind == "reset":
            return state._replace(trusted=(0, 0, NEVER), coming=(0, 0, 0))
        if kind in ("image", "delta"):
            held, at, deadline = state.trusted
            if held == epoch and at >= 0:
                # The copy that is trusted and the one that is taken up again are one.
                state = state._replace(trusted=(held, max(at, value), deadline))
            return state._replace(coming=(mine, epoch, max(seq, value)))
        if seq < 0:
            return state
        asked = value if self.rules.from_the_asking else state.clock
        return state._replace(trusted=(epoch, seq, asked + DURATION - self.margin))


def _created_anew(state: State) -> State:
    epoch = state.epoch + 1
    return state._replace(dropping=False, epoch=epoch, created=epoch, durable=0, acked=0)


def _with(state: State, place: int, sub: Sub) -> State:
    return state._replace(subs=(*state.subs[:place], sub, *state.subs[place + 1 :]))
