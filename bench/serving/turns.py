"""Engines that are measured side by side take turns: one works, the others wait with nothing to do.

Turns belongs to the benchmark, Turn to an engine's process; a Unix socket is between the two. The engine sends "?" when it wants
the next turn, is answered "!" when it has it, and sends "." when it is done. All engines that are left want one before the next
round of turns begins, and their order in a round is drawn, so that what changes on the machine meets all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import random
import socket
import threading
from typing import AsyncIterator


class Turns:
    """Of `count` engines, each of which connects to `path` or is said to have left. Public methods are for any thread."""

    def __init__(self, path: pathlib.Path, count: int, seed: int = 0) -> None:
        self.path = path
        self._source = random.Random(seed)
        self._changed = threading.Condition()
        self._left = count  # engines that have not left
        self._want: list[object] = []  # since the round began
        self._round: list[object] = []  # turns to come; the first has it
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(count)
        threading.Thread(target=self._accept, daemon=True).start()

    def leave(self) -> None:
        """An engine has ended, connected or not: nobody waits for it any more. Once for each."""
        with self._changed:
            self._left -= 1
            self._begin_round()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                engine, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(engine,), daemon=True).start()

    def _serve(self, engine: socket.socket) -> None:
        with engine, contextlib.suppress(OSError):
            while engine.recv(1) == b"?":
                with self._turn():
                    engine.sendall(b"!")
                    engine.recv(1)  # b".", or nothing: it has ended

    @contextlib.contextmanager
    def _turn(self):
        me = object()
        with self._changed:
            self._want.append(me)
            self._begin_round()
            self._changed.wait_for(lambda: self._round and self._round[0] is me)
        try:
            yield
        finally:
            with self._changed:
                self._round.pop(0)
                self._begin_round()

    def _begin_round(self) -> None:
        if not self._round and self._want and len(self._want) >= self._left:
            self._round, self._want = self._want, []
            self._source.shuffle(self._round)
        self._changed.notify_all()


class Turn:
    """An engine's; path: of its Turns, empty: it has every turn."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @contextlib.asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        if not self._path:
            yield
            return
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(self._path)
        reader, writer = self._streams
        writer.write(b"?")
        if await reader.read(1) != b"!":
            raise ConnectionError("the benchmark that gives turns has ended")
        try:
            yield
        finally:
            writer.write(b".")
            await writer.drain()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
