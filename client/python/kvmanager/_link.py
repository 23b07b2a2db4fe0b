"""A thread that owns a client, for engines whose own threads must never wait for the daemon.

States of a Link, all changed by its thread alone:

    away      no connection; submit() refuses. Tries again after a back-off that doubles, RETRY_S to RETRY_MAX_S.
    attached  jobs run in their order, urgent ones first.
    closed    submit() refuses, the thread ends.

    away -> attached: a connection was made.          attached -> away: the daemon does not answer a ping any more.
    any -> closed: close().

What an operator must know of it, _link_log.py says.
"""

from __future__ import annotations

import collections
import logging
import os
import sys
import threading
import time
from typing import Callable, Mapping, Protocol

from ._lib import StoreSignals
from ._link_log import DECLINED, LinkLog
from .cache import Cache
from .client import Client, connect
from .errors import (
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)

RETRY_S = 0.1
RETRY_MAX_S = 5.0
PING_S = 1.0  # of an idle connection, so that a daemon that died is noticed before it is needed
POLL_S = 0.005  # of calls under way
JOBS_MAX = 4096
CACHES_MAX = 64  # open at once; the least recently used goes
_MS_MAX = 3600000
PENDING_MAX = 64  # calls under way that nobody waits for
_SWITCH_S = 0.00005  # a thread that has Python's lock keeps it for so long while another waits (by default 5 ms)


def share_lock() -> None:
    """For a link beside an engine's threads that poll: its own would wait 5 ms for Python's lock behind each call."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))


def check_setting(key: str, value: object, default: object, staging_mib_max: int) -> None:
    """ValueError where a value of an engine's settings is not of its default's type, or beyond its range: these are
    read in the engine's threads, which must not learn it later."""
    if type(value) is not type(default):
        raise ValueError(f"{key} is {value!r}, must be a {type(default).__name__}")
    most = staging_mib_max if key == "staging_mib" else _MS_MAX if key.endswith("_ms") else None
    if most is not None and not 1 <= value <= most:
        raise ValueError(f"{key} is {value}, must be 1..{most}")


class Job(Protocol):
    """Work for the link's thread. Exactly one of the two is called, once, on that thread."""

    def run(self, session: Session) -> None:
        """May raise kvmanager.Error; then fail() is called as well."""

    def fail(self, error: Error) -> None: ...


class Session:
    """One connection, from its begin to its end. For jobs, on the link's thread."""

    def __init__(self, client: Client, describe: Callable[[object], dict]) -> None:
        self.client = client
        self._describe = describe
        self._caches: collections.OrderedDict[object, Cache] = collections.OrderedDict()
        self._pending: list[tuple[object, Callable[[object, Error | None], None]]] = []
        self.state: dict = {}  # of whoever uses the link: void when the session ends

    def cache(self, key: object) -> Cache:
        """The cache that `describe(key)` gives Client.open_cache's arguments of."""
        cache = self._caches.get(key)
        if cache is None:
            while len(self._caches) >= CACHES_MAX:
                self._caches.popitem(last=False)  # closed, unless a job still uses it
            cache = self._caches[key] = self.client.open_cache(**self._describe(key))
        self._caches.move_to_end(key)
        return cache

    def when_done(self, pending, done: Callable[[object, Error | None], None]) -> None:
        """done(result, None) or done(None, error) once `pending` is answered. At most PENDING_MAX: beyond, it waits for
        the oldest."""
        self._pending.append((pending, done))
        while len(self._pending) > PENDING_MAX:
            self._finish(*self._pending.pop(0))

    def poll(self) -> bool:
        """Finishes what is answered; whether something is still under way."""
        waiting, self._pending = self._pending, []
        for pending, done in waiting:
            try:
                ready = pending.ready()
            except Error:
                ready = True  # wait() says what is wrong
            if ready:
                self._finish(pending, done)
            else:
                self._pending.append((pending, done))
        return bool(self._pending)

    def _finish(self, pending, done) -> None:
        try:
            result = pending.wait()
        except Error as error:
            done(None, error)
        else:
            done(result, None)

    def end(self, error: Error) -> None:
        pending, self._pending = self._pending, []
        for _, done in pending:
            done(None, error)
        self.client.close()


def _token() -> str:
    """What $KVMANAGER_TOKEN_FILE holds, read anew for each connection; empty where there is no such variable."""
    path = os.environ.get("KVMANAGER_TOKEN_FILE", "")
    if not path:
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


class Link:
    """The thread, its connection and its jobs. What is public is for any thread.

    describe: arguments of Client.open_cache for a key. on_attach(session), on_detach(): on the link's thread, before the
    first and after the last job of a session; errors of on_attach end the session. log: the engine's. set_by: what sets
    a field of open_cache in the engine, where its name does not say it: {"page_tokens": "vLLM's --block-size"}."""

    def __init__(
        self,
        address: str,
        name: str,
        describe: Callable[[object], dict],
        on_attach: Callable[[Session], None] = lambda session: None,
        on_detach: Callable[[], None] = lambda: None,
        deadline_ms: int = 10000,
        connect_ms: int = 500,
        log: logging.Logger = logging.getLogger("kvmanager"),
        set_by: Mapping[str, str] | None = None,
    ) -> None:
        self.address = address
        self.detachments = 0
        self.why = "kvmanagerd has not answered yet"  # it is not attached
        self.off = ""  # why the daemon, or the client's library, declines what is asked for
        self._log = log
        self._link_log = LinkLog(address, log, deadline_ms, set_by or {})
        self._broken = False  # the connection, of an error that its client noticed first; the link's thread writes it
        self._name, self._describe = name, describe
        self._on_attach, self._on_detach = on_attach, on_detach
        self._deadline_ms, self._connect_ms = deadline_ms, connect_ms
        self._changed = threading.Condition()
        self._urgent: collections.deque[Job] = collections.deque()
        self._jobs: collections.deque[Job] = collections.deque()
        self.signals = StoreSignals()  # how many they are, for a job that the client's library runs
        self._attached = False
        self._tried = False  # to attach, once
        self._closed = False
        self._busy = False
        self._thread = threading.Thread(target=self._run, name=f"kvmanager {name}", daemon=True)
        self._thread.start()

    @property
    def attached(self) -> bool:
        return self._attached

    @property
    def waiting(self) -> int:
        """Jobs that have not begun, but for urgent ones. A moment's number."""
        return len(self._jobs)

    def refusal(self) -> Error:
        """Why submit() refuses, for the job."""
        with self._changed:
            if self.off:
                return FailedPreconditionError(self.off)
            if self._attached and not self._closed and len(self._urgent) + len(self._jobs) >= JOBS_MAX:
                return ResourceExhaustedError(f"{JOBS_MAX} jobs of the engine wait for the daemon")
        return UnavailableError("the daemon is away")

    def says(self, error: object) -> bool:
        """Whether a line of the link tells of this error of a job, so that none need be written for the job."""
        if not self._attached or isinstance(error, DeadlineExceededError):
            return True
        return isinstance(error, UnavailableError) and self._broken

    def wait(self, attached: bool, timeout_s: float) -> bool:
        """Until it is (not) attached; whether it came to that in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._attached == attached, timeout_s)

    def wait_tried(self, timeout_s: float) -> None:
        """Until it attached for the first time, or could not."""
        with self._changed:
            self._changed.wait_for(lambda: self._tried, timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Until no job waits or runs, and no call is under way; whether it came to that in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._busy or self._urgent or self._jobs), timeout_s)

    def submit(self, job: Job, urgent: bool = False) -> bool:
        """False, and nothing is called, where the daemon is away or JOBS_MAX jobs wait."""
        with self._changed:
            if not self._attached or self._closed or len(self._urgent) + len(self._jobs) >= JOBS_MAX:
                return False
            (self._urgent if urgent else self._jobs).append(job)
            self._signal()
            self._changed.notify_all()
        return True

    def _signal(self) -> None:
        """With `_changed` held."""
        self.signals.urgent, self.signals.waiting = len(self._urgent), len(self._jobs)

    def close(self, timeout_s: float = 10.0) -> None:
        """Jobs that wait fail; the one that runs is waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # The thread.

    def _run(self) -> None:
        retry_s = RETRY_S
        said = False
        while not self._closed:
            try:
                session = self._attach()
            except Exception as error:  # noqa: BLE001: whatever it is, the engine goes on without a daemon
                why = self._link_log.why(error)
                self.off = why if isinstance(error, DECLINED) else ""
                if self.why != why or not said:
                    self._link_log.not_attached(error)
                self.why, said = why, True
                with self._changed:
                    self._tried = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed, retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)
                continue
            self._link_log.attached()
            retry_s, said, self.off, self._broken = RETRY_S, False, "", False
            self._set_attached(True)
            error = self._serve(session)
            self._set_attached(False)
            self._fail_all(error)
            session.end(error)
            self.detachments += 1
            self._on_detach()
            if not self._closed:
                self._link_log.lost(error)

    def _attach(self) -> Session:
        client = connect(
            self.address,
            name=self._name,
            deadline_ms=self._deadline_ms,
            connect_ms=self._connect_ms,
            hello_ms=self._deadline_ms,
            token=_token(),
        )
        session = Session(client, self._describe)
        try:
            self._on_attach(session)
        except BaseException:
            session.end(UnavailableError("attaching failed"))
            raise
        return session

    def _set_attached(self, attached: bool) -> None:
        with self._changed:
            self._attached = attached
            self._tried = True
            self._changed.notify_all()

    def _serve(self, session: Session) -> Error:
        """Runs jobs until the daemon is gone, or the link is closed; returns why."""
        heard = time.monotonic()
        while True:
            busy = session.poll()
            with self._changed:
                if self._busy and not busy:
                    self._busy = False
                    self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._closed or self._urgent or self._jobs, POLL_S if busy else PING_S
                )
                if self._closed:
                    return UnavailableError("the engine closed its link")
                job = self._take(self._urgent or self._jobs)
                self._busy |= job is not None
            if job is not None:
                error = self._run_job(job, session)
                if isinstance(error, DeadlineExceededError):
                    return error  # what it was to write or read in arenas may still be: they go with the connection
                if isinstance(error, UnavailableError):
                    heard = 0.0
            if time.monotonic() - heard >= PING_S:
                try:
                    session.client.ping()
                except Error as error:
                    return error
                heard = time.monotonic()

    def _take(self, jobs: collections.deque[Job]) -> Job | None:
        """With `_changed` held."""
        job = jobs.popleft() if jobs else None
        self._signal()
        return job

    def _run_job(self, job: Job, session: Session) -> Error | None:
        """Why it failed."""
        try:
            job.run(session)
        except Error as error:
            self._broken = isinstance(error, UnavailableError) and not session.client.connected
            job.fail(error)
            return error
        except Exception as error:  # noqa: BLE001: nothing that a job does may end the thread
            self._log.exception("kvmanager: a job of the engine's connector failed")
            failed = Error(f"{type(error).__name__}: {error}")
            job.fail(failed)
            return failed
        return None

    def run_urgent(self, session: Session) -> None:
        """Runs urgent jobs that wait. For a long job, on the link's thread; raises what ends the connection."""
        while True:
            with self._changed:
                job = self._take(self._urgent)
            if job is None:
                return
            error = self._run_job(job, session)
            if isinstance(error, (DeadlineExceededError, UnavailableError)):
                raise error

    def _fail_all(self, error: Error) -> None:
        with self._changed:
            jobs = list(self._urgent) + list(self._jobs)
            self._urgent.clear()
            self._jobs.clear()
            self._signal()
            self._busy = True  # until all have failed
        for job in jobs:
            job.fail(error)
        with self._changed:
            self._busy = False
            self._changed.notify_all()
