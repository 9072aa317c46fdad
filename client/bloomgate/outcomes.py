"""What the authority said after hits, added up per filter and told to the daemon.

Counts are sent at most once in ``report_interval``, by a call that nobody waits for. There is no thread and
no timer: the next guarded call sends what is due, flushing and closing send the rest. What the daemon says it
did not take is put back; what it may have counted is not sent again, lest it be counted twice, and neither is
what it will never take. That is lost, and counted as ``bloomgate_client_outcomes_lost_total``.
"""

from __future__ import annotations

import asyncio
import threading

from bloomgate.calls import FilterCalls
from bloomgate.errors import NotServing, Overloaded
from bloomgate.options import ClientOptions
from bloomgate.processes import OfProcess
from bloomgate.transport import REPORT_OUTCOMES, AsyncTransport, Transport

Counts = tuple[int, int, int]
NONE: Counts = (0, 0, 0)

# With these the daemon says that it did nothing and may do it later.
_NOT_TAKEN = (Overloaded, NotServing)


class _Held:
    """What one process holds. A forked child begins with none: what stood here is its parent's to report."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.counts = NONE
        self.in_flight = 0
        # A loop holds its tasks weakly.
        self.reports: set[asyncio.Task[None]] = set()


class _Tally:
    """Outcomes that are not reported yet: found, not found, false no. Any thread may count."""

    def __init__(self, calls: FilterCalls, options: ClientOptions) -> None:
        self._calls = calls
        self._timeout = options.report_timeout
        self._clock = options.clock
        self._interval = options.report_interval
        self._due = self._clock() + self._interval
        self._of_process = OfProcess(_Held)

    def add(self, counts: Counts) -> None:
        """Count outcomes, or put back what was not taken."""
        held = self._of_process.get()
        with held.changed:
            found, not_found, false_no = held.counts
            held.counts = (found + counts[0], not_found + counts[1], false_no + counts[2])

    def _take(self, held: _Held, *, if_due: bool) -> Counts:
        """Take what is there; with ``if_due``, nothing before its time."""
        if held.counts == NONE or (if_due and self._clock() < self._due):
            return NONE
        with held.changed:
            counts, held.counts = held.counts, NONE
            self._due = self._clock() + self._interval
        return counts

    def _failed(self, error: BaseException, counts: Counts) -> None:
        if isinstance(error, _NOT_TAKEN):
            self.add(counts)
        else:
            self._calls.count_lost_outcomes(sum(counts))


class Outcomes(_Tally):
    """One filter's outcomes in a blocking client."""

    def __init__(self, calls: FilterCalls, transport: Transport, options: ClientOptions) -> None:
        super().__init__(calls, options)
        self._transport = transport

    def report_due(self) -> None:
        """Send what is due, without waiting. Never raises."""
        self._send(if_due=True)

    def report_rest(self) -> None:
        """Send what is left, without waiting. Never raises."""
        self._send(if_due=False)

    def wait(self, timeout: float) -> None:
        """Wait for the answers to what was sent, ``timeout`` seconds at most."""
        held = self._of_process.get()
        with held.changed:
            held.changed.wait_for(lambda: held.in_flight == 0, max(0.0, timeout))

    def flush(self) -> None:
        """Send what is left and wait for the answers, ``report_timeout`` at most. Never raises."""
        self.report_rest()
        self.wait(self._timeout)

    def _send(self, *, if_due: bool) -> None:
        held = self._of_process.get()
        counts = self._take(held, if_due=if_due)
        if counts == NONE:
            return
        with held.changed:
            held.in_flight += 1

        def done(error: Exception | None) -> None:
            if error is not None:
                self._failed(error, counts)
            with held.changed:
                held.in_flight -= 1
                held.changed.notify_all()

        try:
            request = self._calls.outcomes_request(*counts)
            self._transport.begin(REPORT_OUTCOMES, request, self._timeout, done)
        except Exception as error:
            done(error)


class AsyncOutcomes(_Tally):
    """One filter's outcomes in an asyncio client."""

    def __init__(self, calls: FilterCalls, transport: AsyncTransport, options: ClientOptions) -> None:
        super().__init__(calls, options)
        self._transport = transport

    def report_due(self) -> None:
        """Send what is due, without waiting. Never raises."""
        self._send(if_due=True)

    def report_rest(self) -> None:
        """Send what is left, without waiting. Never raises."""
        self._send(if_due=False)

    def under_way(self) -> list[asyncio.Task[None]]:
        """The reports of the running loop that are not answered."""
        held, loop = self._of_process.get(), asyncio.get_running_loop()
        with held.changed:
            return [report for report in held.reports if report.get_loop() is loop]

    async def flush(self) -> None:
        """Send what is left and wait for the answers, ``report_timeout`` at most. Never raises."""
        self.report_rest()
        reports = self.under_way()
        if reports:
            await asyncio.wait(reports, timeout=self._timeout)

    def _send(self, *, if_due: bool) -> None:
        held = self._of_process.get()
        counts = self._take(held, if_due=if_due)
        if counts == NONE:
            return
        report = asyncio.create_task(self._report(counts))
        with held.changed:
            held.reports.add(report)

        def done(report: asyncio.Task[None]) -> None:
            with held.changed:
                held.reports.discard(report)
            # Here, since a task that is cancelled before it begins runs no code of its own.
            if report.cancelled():
                self._failed(asyncio.CancelledError(), counts)
            elif (error := report.exception()) is not None:
                self._failed(error, counts)

        report.add_done_callback(done)

    async def _report(self, counts: Counts) -> None:
        request = self._calls.outcomes_request(*counts)
        await self._transport.unary(REPORT_OUTCOMES, request, self._timeout)
