"""Sends messages between the notebook, the server and the ranks: a length, then a pickled tuple
``(kind, *fields)``.

They go through unnamed socket pairs that are inherited through fork and exec: nobody else can
connect, so unpickling them is as safe as calling a function of one's own.
"""

import contextlib
import pickle
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

_LENGTH = struct.Struct("!Q")
_MAX_DESCRIPTORS = 250  # Linux passes at most 253 at once
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS)


class Connection:
    """One end of a socket pair: any thread may send, one at a time may read.

    >>> local, peer = map(Connection, socket.socketpair())
    >>> local.send("result", 7)
    >>> peer.arrived()
    [('result', 7)]
    """

    def __init__(self, end: socket.socket):
        self.socket = end
        self.is_open = True
        self.descriptors: list[int] = []  # received, and not yet taken from here
        self._buffer = bytearray()
        self._sending = threading.RLock()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, *message, descriptors: Sequence[int] = ()) -> None:
        """Send one message, and ahead of it open files for another process; nothing if that is
        gone.
        """
        body = pickle.dumps(message, protocol=5)
        with contextlib.suppress(OSError), self._sending:
            for first in range(0, len(descriptors), _MAX_DESCRIPTORS):
                batch = descriptors[first : first + _MAX_DESCRIPTORS]
                # They need at least one byte to go with: send an empty message.
                socket.send_fds(self.socket, [_LENGTH.pack(0)], batch)
            self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def arrived(self, flags: int = socket.MSG_DONTWAIT) -> list[tuple]:
        """Return the messages that have come in. Clear `is_open` when the other side is gone."""
        try:
            # socket.recv_fds ignores the flags.
            data, carried, _, _ = self.socket.recvmsg(1 << 18, _ANCILLARY_BYTES, flags)
        except BlockingIOError:
            return []
        except OSError:  # it was killed before it had read all that was sent to it
            data = b""
            carried = []
        self.is_open = bool(data)
        for _, _, descriptors in carried:
            self.descriptors += memoryview(descriptors).cast("i")
        return self._cut(data)

    def messages(self) -> Iterator[tuple]:
        """Yield messages as they come, until the other side is gone."""
        while self.is_open:
            yield from self.arrived(flags=0)

    def close(self) -> None:
        """Close the connection for the other side too, even if a fork of this process holds it
        open.
        """
        self.is_open = False
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _cut(self, data: bytes) -> list[tuple]:
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            body = self._buffer[_LENGTH.size : end]
            # Before unpickling, which can collect garbage: a forgotten World, which reads here too.
            del self._buffer[:end]
            if body:
                messages.append(pickle.loads(body))
        return messages
