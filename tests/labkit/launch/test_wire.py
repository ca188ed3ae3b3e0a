"""Messages and open files over a socket pair."""

import os
import pickle
import socket
import sys

from labkit.launch.wire import Connection


def test_reading_while_a_message_is_unpickled_loses_nothing(monkeypatch):
    """Unpickling can collect garbage, a forgotten World among it, whose end reads from the same server."""

    local, peer = map(Connection, socket.socketpair())

    class ReadsAgain:
        reader, inner = peer, []

        def __reduce__(self):
            return _read_again, ()

    monkeypatch.setattr(sys, "reads_again", ReadsAgain, raising=False)
    local.send("first", ReadsAgain())
    local.send("second", 2)
    assert (peer.arrived(), ReadsAgain.inner) == ([("first", None)], [("second", 2)])


def _read_again() -> None:
    sys.reads_again.inner += sys.reads_again.reader._cut(b"")  # pyright: ignore[reportAttributeAccessIssue]


def test_messages_come_whole_whatever_the_pieces_they_arrive_in():
    local, end = socket.socketpair()
    peer = Connection(end)
    body = pickle.dumps(("result", 7))
    data = len(body).to_bytes(8, "big") + body
    local.sendall(data[:5])
    assert peer.arrived() == []
    local.sendall(data[5:] + data)
    assert peer.arrived() == [("result", 7)] * 2
    assert peer.arrived() == [] and peer.is_open
    local.close()
    assert peer.arrived() == [] and not peer.is_open


def test_open_files_travel_in_order_however_many(tmp_path):
    local, peer = map(Connection, socket.socketpair())
    sent = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(384)]  # three for 128 ranks
    local.send("fork", 128, descriptors=sent)
    messages = []
    while not messages:
        messages = peer.arrived()
    assert messages == [("fork", 128)]
    assert [os.fstat(file).st_ino for file in peer.descriptors] == [os.fstat(file).st_ino for file in sent]
    for file in sent + peer.descriptors:
        os.close(file)
