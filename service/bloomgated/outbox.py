"""What the holder of copies is sent, in order: one outbox a stream.

Order holds per subscription: its image, then deltas by seq, and a grant behind every delta there is. Parts of
images go out while there is nothing else to send, so that the image of one copy never delays the deltas and
grants of another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from bloomgate.errors import Overloaded
from bloomgate.filters import Growth

# What a stream may leave unread; one that asks on and on and does not listen ends.
MOST_UNSENT = 20_000


class End(Enum):
    """Why a subscription has ended."""

    DROPPED = "dropped"
    REPLACED = "replaced"
    LAGGED = "lagged"
    REVOKED = "revoked"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Opened:
    """A subscription begins, with an image of so many bytes, or with none: the holder's copy is good."""

    open: int
    subscription: int
    journal_id: bytes
    filter_id: int
    generation: int
    image_bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """No subscription, for ``error``; not to be asked for again for ``retry_after`` seconds."""

    open: int
    error: Exception
    retry_after: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next part of an image."""

    subscription: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Delta:
    """What to apply, digests in parts, or a body that begins; the copy is up to ``last_seq`` then."""

    subscription: int
    first_seq: int
    last_seq: int
    change: Sequence[bytes] | Growth


@dataclass(frozen=True, slots=True)
class Reset:
    """The subscription has ended: its holder voids the copy, then acknowledges ``seq``."""

    subscription: int
    seq: int
    end: End
    retry_after: float


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to the renewal ``nonce``: these subscriptions' copies may be trusted for longer.

    Counts up to the number ``counts_id`` are counted.
    """

    nonce: int
    subscriptions: tuple[int, ...]
    counts_id: int


Message = Opened | Refused | Chunk | Delta | Reset | Grant


class Imaged(Protocol):
    """A subscription whose image is being sent."""

    id: int

    def next_chunk(self) -> bytes | None:
        """The next part of the image; None behind the last."""


class Outbox:
    """What one stream is to be sent. Used on the event loop."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._images: deque[Imaged] = deque()
        self._woken = asyncio.Event()
        self.ended: Exception | None = None
        """Why it is sent nothing more."""

    def put(self, message: Message) -> None:
        """Send ``message`` behind all that was put before."""
        if len(self._messages) >= MOST_UNSENT:
            self._messages.clear()
            self.end(Overloaded(0.0, f"{MOST_UNSENT} messages of this stream were not read"))
        if self.ended is None:
            self._messages.append(message)
            self._woken.set()

    def put_image(self, subscription: Imaged) -> None:
        """Send the parts of a subscription's image, while there is nothing else to send."""
        self._images.append(subscription)
        self._woken.set()

    def end(self, error: Exception) -> None:
        """Send what was put, then nothing more."""
        self.ended = self.ended or error
        self._woken.set()

    async def next(self) -> Message | None:
        """The next message; None at the end."""
        while True:
            if self._messages:
                return self._messages.popleft()
            if self.ended is not None:
                return None
            while self._images:
                subscription = self._images.popleft()
                data = subscription.next_chunk()
                if data is not None:
                    # The images of several copies take turns.
                    self._images.append(subscription)
                    return Chunk(subscription.id, data)
            self._woken.clear()
            await self._woken.wait()
