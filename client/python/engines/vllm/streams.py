"""A GPU's streams as threads of the CPU: copies and steps are under way when what began them returns, and nothing but
events orders them. So an order that is missing shows where there is no GPU."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Callable, Iterator

from kvmanager.paged import Fence, PagedCopy

_BUSY_S = 0.03
_COPY_S = 0.001  # of a load, at least: a copy takes its time on a GPU, too


class Stream:
    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def busy(self) -> None:
        self.put(lambda: time.sleep(_BUSY_S))

    def here(self) -> Callable[[], bool]:
        return Event(self).query

    def wait(self) -> None:
        Event(self).synchronize()


class Event:
    """What Fence uses of torch.cuda.Event."""

    def __init__(self, stream: Stream) -> None:
        self._passed = threading.Event()
        stream.put(self._passed.set)

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self._passed.wait()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).put(self._passed.wait)


_local = threading.local()


def current() -> Stream:
    return getattr(_local, "stream", ENGINE)


@contextlib.contextmanager
def _on(stream: Stream) -> Iterator[None]:
    was, _local.stream = current(), stream
    yield
    _local.stream = was


class ThreadedCopy(PagedCopy):
    """PagedCopy with streams of this kind."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._saves, self._loads = Stream(), Stream()

    def here(self) -> Fence:
        return Fence(Event(current()))

    def save(self, layer, indices, k, v, after: Fence) -> Fence:
        with _on(self._saves):
            after.hold()
            self._saves.put(lambda: PagedCopy.save(self, layer, indices, k, v, Fence()))
            return self.saved()

    def load(self, layer, indices, k, v, after: Fence) -> Fence:
        with _on(self._loads):
            after.hold()
            self._loads.put(lambda: time.sleep(_COPY_S))
            self._loads.put(lambda: PagedCopy.load(self, layer, indices, k, v, Fence()))
            return self.loaded()

    def saved(self) -> Fence:
        return Fence(Event(self._saves))

    def loaded(self) -> Fence:
        return Fence(Event(self._loads))


ENGINE = Stream()  # the engine's

__all__ = ["ENGINE", "ThreadedCopy"]
