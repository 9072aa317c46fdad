"""A TCP proxy on the loopback that counts connections, and can delay, swallow or cut what passes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Proxy:
    """Stands before HOST:PORT; ``address`` is its own. Closes with the context."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.swallows = False
        """Whether bytes are taken and go nowhere, as where a machine is gone without a word."""
        self.delay = 0.0
        """Seconds that each piece of what passes is held up."""
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                self._open.append(near)
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    # Nobody is there: so be it for whoever comes by here, too.
                    near.close()
                    continue
                self._open.append(far)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.delay:
                    time.sleep(self.delay)
                if not self.swallows:
                    sink.sendall(data)
            if not self.swallows:
                sink.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections; new ones are taken."""
        cut, self._open = self._open, []
        for each in cut:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
