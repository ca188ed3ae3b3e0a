"""Messages between the notebook, the server and the ranks: a length, then a pickled tuple ``(kind, *fields)``.

They travel over unnamed socket pairs inherited by fork and exec: no address, no port, nobody else can
connect, so unpickling them is as safe as calling a function of one's own.
"""

import pickle
import socket
import struct

_LENGTH = struct.Struct("!Q")


def pack(*message) -> bytes:
    """The bytes of one message."""
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, *message) -> bool:
    """Send one message; False when the other side is gone."""
    try:
        connection.sendall(pack(*message))
    except OSError:
        return False
    return True


class Reader:
    """Cuts the bytes of a stream back into messages, whatever the pieces they arrive in.

    >>> reader, data = Reader(), pack("result", 7)
    >>> reader.feed(data[:5]), reader.feed(data[5:])
    ([], [('result', 7)])
    """

    def __init__(self):
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple]:
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            body = self._buffer[_LENGTH.size : end]
            del self._buffer[:end]  # first: unpickling can collect garbage, a forgotten World say, which reads too
            messages.append(pickle.loads(body))
        return messages


def receive(connection: socket.socket) -> tuple:
    """Wait for one message. Raises EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray()
    while len(data) < num_bytes:
        piece = connection.recv(min(1 << 20, num_bytes - len(data)))
        if not piece:
            raise EOFError("the other side is gone")
        data += piece
    return data
