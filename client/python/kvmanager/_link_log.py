"""What a link (_link.py) says to an operator, through the engine's logger: each thing once.

That the daemon is lost or not there, and that it declines what the engine asks for (OFF). Links of one process to one daemon say each of
these once together.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Mapping

from .errors import (
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnimplementedError,
)

DECLINED = (InvalidArgumentError, FailedPreconditionError, NotFoundError, PermissionDeniedError, UnimplementedError)
_NOTICED_S = 2.0  # beyond a call's deadline, in which links of one process notice that they have lost the daemon
_GOES_ON = "Requests go on without it. Start kvmanagerd if it does not run: this engine attaches by itself"
_AWAY = "away"
_said: dict[str, str] = {}  # why a daemon at an address is not attached, as it was last said
_lost: dict[str, float] = {}  # when it was last said that the daemon at an address is lost
_lock = threading.Lock()  # of both


class LinkLog:
    """Of one link, and its thread's. deadline_ms: of the link's calls. set_by: as Link has it."""

    def __init__(self, address: str, log: logging.Logger, deadline_ms: int, set_by: Mapping[str, str]) -> None:
        self._address, self._log, self._set_by = address, log, set_by
        self._notice_s = deadline_ms / 1000 + _NOTICED_S
        self._attached_at = 0.0
        self._lost_one = False  # since it was last attached

    def why(self, error: Exception) -> str:
        """For an operator: without advice to who calls the client, and in the engine's terms."""
        if not isinstance(error, Error):
            return f"{type(error).__name__}: {error}"
        by = self._set_by.get(error.field)
        advice = f"; {error.advice}" if isinstance(error, UnimplementedError) else ""
        return error.message.removesuffix("; Reconnect()") + (f" ({error.field} is {by})" if by else "") + advice

    def attached(self) -> None:
        """Says nothing. What is wrong from now on is said anew."""
        with _lock:
            _said.pop(self._address, None)
        self._attached_at, self._lost_one = time.monotonic(), False

    def lost(self, error: Exception) -> None:
        """Unless another link of the process said it of the same daemon. Each notices in its own time."""
        self._lost_one, now = True, time.monotonic()
        with _lock:
            said = _lost.get(self._address, 0.0)
            if said > self._attached_at and now - said < self._notice_s:
                return
            _lost[self._address] = now
        why = "" if isinstance(error, UnavailableError) else f": {self.why(error)}"  # of a broken connection there is no more to say
        self._log.warning("%s", f"kvmanager: lost kvmanagerd at {self._address}{why}. {_GOES_ON}")

    def not_attached(self, error: Exception) -> None:
        why = self.why(error)
        if isinstance(error, DECLINED):
            text = f"kvmanager: OFF, because {why}. Requests are served without it (kvmanagerd at {self._address})"
            self._say(text, logging.ERROR, text)
        elif isinstance(error, (UnavailableError, DeadlineExceededError)):
            if self._lost_one:  # which was said
                return
            what = why if self._address in why else f"no kvmanagerd at {self._address}: {why}"
            self._say(_AWAY, logging.WARNING, f"kvmanager: {what}. {_GOES_ON}")
        else:
            text = f"kvmanager: cannot attach to kvmanagerd at {self._address}: {why}. Requests go on without it"
            self._say(text, logging.WARNING, text)

    def _say(self, what: str, level: int, text: str) -> None:
        """Unless it is the last that was said of this daemon."""
        with _lock:
            if _said.get(self._address) == what:
                return
            _said[self._address] = what
        self._log.log(level, "%s", text)
