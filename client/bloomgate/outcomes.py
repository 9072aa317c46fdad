"""What the authority said after hits, added up per filter and told to the daemon.

Counts are sent at most once in ``report_interval``, by a call that nobody waits for. There is no thread and
no timer: the next guarded call sends what is due, flushing and closing send the rest. What could not be sent
is put back.
"""

from __future__ import annotations

import asyncio
import os
import threading

from bloomgate import methods
from bloomgate.calls import FilterCalls
from bloomgate.options import ClientOptions
from bloomgate.transport import AsyncTransport, Transport

Counts = tuple[int, int, int]
NONE: Counts = (0, 0, 0)


class _Tally:
    """Outcomes that are not reported yet: found, not found, false no. Any thread may count."""

    def __init__(self, calls: FilterCalls, options: ClientOptions) -> None:
        self._calls = calls
        self._timeout = options.report_timeout
        self._clock = options.clock
        self._interval = options.report_interval
        self._due = self._clock() + self._interval
        self._forget()

    def _forget(self) -> None:
        self._changed = threading.Condition()
        self._counts = NONE
        self._in_flight = 0
        self._pid = os.getpid()

    def _leave_to_parent(self) -> None:
        """What stood here when this process was forked is the parent's to report."""
        if self._pid != os.getpid():
            self._forget()

    def add(self, counts: Counts) -> None:
        """Count outcomes, or put back what could not be reported."""
        self._leave_to_parent()
        with self._changed:
            found, not_found, false_no = self._counts
            self._counts = (found + counts[0], not_found + counts[1], false_no + counts[2])

    def _take(self, *, if_due: bool) -> Counts:
        """Take what is there; with ``if_due``, nothing before its time."""
        self._leave_to_parent()
        if self._counts == NONE or (if_due and self._clock() < self._due):
            return NONE
        with self._changed:
            counts, self._counts = self._counts, NONE
            self._due = self._clock() + self._interval
        return counts


class Outcomes(_Tally):
    """One filter's outcomes in a blocking client."""

    def __init__(self, calls: FilterCalls, transport: Transport, options: ClientOptions) -> None:
        super().__init__(calls, options)
        self._transport = transport

    def report_due(self) -> None:
        """Send what is due, without waiting. Never raises."""
        self._send(self._take(if_due=True))

    def flush(self) -> None:
        """Send what is left and wait for the answers, ``report_timeout`` at most. Never raises."""
        self._send(self._take(if_due=False))
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight == 0, self._timeout)

    def _send(self, counts: Counts) -> None:
        if counts == NONE:
            return
        with self._changed:
            self._in_flight += 1

        def done(error: Exception | None) -> None:
            if error is not None:
                self.add(counts)
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

        try:
            request = self._calls.outcomes_request(*counts)
            self._transport.begin(methods.REPORT_OUTCOMES, request, self._timeout, done)
        except Exception as error:
            done(error)


class AsyncOutcomes(_Tally):
    """One filter's outcomes in an asyncio client."""

    def __init__(self, calls: FilterCalls, transport: AsyncTransport, options: ClientOptions) -> None:
        super().__init__(calls, options)
        self._transport = transport
        # The loop holds its tasks weakly.
        self._reports: set[asyncio.Task[None]] = set()

    def report_due(self) -> None:
        """Send what is due, without waiting. Never raises."""
        self._send(self._take(if_due=True))

    async def flush(self) -> None:
        """Send what is left and wait for the answers, ``report_timeout`` at most. Never raises."""
        self._send(self._take(if_due=False))
        loop = asyncio.get_running_loop()
        reports = [report for report in self._reports if report.get_loop() is loop]
        if reports:
            await asyncio.wait(reports, timeout=self._timeout)

    def _send(self, counts: Counts) -> None:
        if counts != NONE:
            report = asyncio.create_task(self._report(counts))
            self._reports.add(report)
            report.add_done_callback(self._reports.discard)

    async def _report(self, counts: Counts) -> None:
        try:
            request = self._calls.outcomes_request(*counts)
            await self._transport.unary(methods.REPORT_OUTCOMES, request, self._timeout)
        except Exception:
            self.add(counts)
        except BaseException:
            self.add(counts)
            raise
