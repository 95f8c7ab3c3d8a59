"""Lifeline: each rank learns at once that another rank is gone, and which.

A socket joins every two ranks, which the kernel closes when a process dies, in whatever way. A rank that ends with an
error sends its text first; a rank that closes its session says so. One that lives but does nothing is for the
collectives' timeout.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from pstar_sim.errors import RankLost

log = logging.getLogger("executor")

Address = dict[str, str | int]
CONNECT_S = 30.0
WORD_S = 2.0  # how long a broken collective waits for a message that explains it
MOST_BYTES = 1 << 16


class Lifeline:
    """One rank's sockets: the caller sends `address` to the others, then calls `connect`.

    on_loss(error): called once, from another thread, when a rank is lost.
    lost: that error.
    """

    def __init__(self, rank: int, ranks: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rank = rank
        self.ranks = ranks
        self.lost: RankLost | None = None
        self.on_loss: Callable[[RankLost], None] | None = None
        self._clock = clock
        self._words: dict[int, str] = {}  # rank -> its own message about its end
        self._ended = threading.Event()
        self._heard = threading.Event()
        self._peers: dict[int, socket.socket] = {}
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("", 0), backlog=ranks)
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> Address:
        host = socket.gethostname()
        try:
            reachable = socket.gethostbyname(host)
        except OSError:
            reachable = "127.0.0.1"
        port = self._listener.getsockname()[1]
        return {"host": host, "address": reachable, "port": port, "pid": os.getpid(), "token": self._token}

    def connect(self, addresses: Sequence[Address]) -> None:
        """An unreachable host is warned of, and its ranks are not watched.

        addresses: of all ranks, in order.
        """
        here = socket.gethostname()
        for r, row in enumerate(addresses):
            self._names[r] = f"rank {r} (process {row['pid']} on {row['host']})"
        for r in range(self.rank):  # a rank connects to the ranks before it; the ranks behind it connect to it
            row = addresses[r]
            target = "127.0.0.1" if row["host"] == here else str(row["address"])
            try:
                peer = socket.create_connection((target, int(row["port"])), timeout=CONNECT_S)
                peer.sendall(f"{row['token']} {self.rank:8d}".encode())
                self._peers[r] = peer
            except OSError as error:
                log.warning("%s at %s cannot be watched: %s", self._names[r], target, error)
        self._listener.settimeout(CONNECT_S)
        due = self.ranks - 1 - self.rank
        while due:
            try:
                peer, _ = self._listener.accept()
                peer.settimeout(CONNECT_S)
                word = _read(peer, len(self._token) + 9).split()
            except OSError as error:
                log.warning("%d ranks cannot be watched: %s", due, error)
                break
            if len(word) == 2 and secrets.compare_digest(word[0], self._token):
                self._peers[int(word[1])] = peer
                due -= 1
            else:
                peer.close()
        self._listener.close()
        self._thread = threading.Thread(target=self._watch, name="executor-lifeline", daemon=True)
        self._thread.start()

    # -- this rank's end ----------------------------------------------------------------------------------------------

    def fail(self, what: str) -> None:
        """This rank ends with an error."""
        self._say({"failed": what})

    def leave(self, what: str) -> None:
        """This rank has ended in order: stop watching the others."""
        self._say({"left": what})
        self._ended.set()
        for peer in self._peers.values():
            _shut(peer)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(WORD_S)

    def _say(self, word: dict[str, str]) -> None:
        with self._lock:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):  # that rank is gone itself and needs no message
                    peer.sendall((json.dumps(word) + "\n").encode())

    # -- the others' --------------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> BaseException:
        """For a collective that broke: the loss of a rank, if a message explains it."""
        self._heard.wait(WORD_S)
        if self.lost is not None:
            return self.lost
        who = self.departure()
        if who is not None:
            return RankLost(f"{who}, and this is rank {self.rank}, which still needs that rank")
        return RankLost(f"an exchange with the other ranks broke, and none of them gave a reason: {error}")

    def departure(self) -> str | None:
        """The rank that has ended in order, and how."""
        rows = sorted(self._words.items())
        return f"{self._names[rows[0][0]]} {rows[0][1]}" if rows else None

    def _watch(self) -> None:
        waiting = selectors.DefaultSelector()
        unread = dict.fromkeys(self._peers, b"")
        for number, peer in self._peers.items():
            peer.settimeout(None)
            waiting.register(peer, selectors.EVENT_READ, number)
        while waiting.get_map() and not self._ended.is_set():
            for key, _ in waiting.select(1.0):
                r: int = key.data
                try:
                    data = self._peers[r].recv(MOST_BYTES)
                except OSError:
                    data = b""
                if self._ended.is_set():
                    break
                if not data:
                    waiting.unregister(self._peers[r])
                    if r not in self._words:
                        self._lose(f"{self._names[r]} died: it ended without a word (killed, or out of memory)")
                    continue
                unread[r] += data
                while b"\n" in unread[r]:
                    line, unread[r] = unread[r].split(b"\n", 1)
                    word = json.loads(line)
                    if "failed" in word:
                        self._words[r] = "failed"
                        self._lose(f"{self._names[r]} failed: {word['failed']}")
                    else:
                        self._words[r] = word["left"]
                        self._heard.set()
        waiting.close()
        for peer in self._peers.values():
            peer.close()

    def _lose(self, text: str) -> None:
        if self.lost is None:
            self.lost = RankLost(f"{text}; this is rank {self.rank}, which cannot continue without that rank")
            self._heard.set()
            if self.on_loss is not None:
                self.on_loss(self.lost)


def _read(peer: socket.socket, size: int) -> str:
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            break
        data += more
    return data.decode(errors="replace")


def _shut(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side has closed it already
        peer.shutdown(socket.SHUT_RDWR)
