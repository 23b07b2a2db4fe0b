"""What calls raise: a class per kind of error, each with the field that is wrong, its value and its bound.

    try:
        cache.step(...)
    except kvmanager.UnavailableError:
        client.reconnect()
"""

from __future__ import annotations

import json
import operator
from typing import Any


class Error(Exception):
    """An error of the client or the daemon. `field`, `value` and `bound` are strings, empty where there is none."""

    code = 2
    name = "UNKNOWN"
    advice = ""  # what to do, where the message does not say

    def __init__(self, message: str, field: str = "", value: str = "", bound: str = "") -> None:
        super().__init__(message, field, value, bound)
        self.message = message
        self.field = field
        self.value = value
        self.bound = bound

    def __str__(self) -> str:
        return f"{self.name}: {self.message}" + (f" ({self.advice})" if self.advice else "")


class CancelledError(Error):
    """The call was cancelled before it was answered."""

    code, name = 1, "CANCELLED"


class InvalidArgumentError(Error, ValueError):
    """This request is wrong; nothing has changed."""

    code, name = 3, "INVALID_ARGUMENT"


class DeadlineExceededError(Error):
    """No answer within the deadline: the call was cancelled, and the connection lives."""

    code, name = 4, "DEADLINE_EXCEEDED"
    advice = "a step may have been made: look at info().tokens, then retry"


class NotFoundError(Error):
    """What was named is not there."""

    code, name = 5, "NOT_FOUND"


class AlreadyExistsError(Error):
    """What was to be made is there."""

    code, name = 6, "ALREADY_EXISTS"


class PermissionDeniedError(Error):
    """The daemon does not allow it."""

    code, name = 7, "PERMISSION_DENIED"


class ResourceExhaustedError(Error):
    """Memory or a limit; the message names the limit, and what the tenant has."""

    code, name = 8, "RESOURCE_EXHAUSTED"
    advice = "close sequences, or retry later"


class FailedPreconditionError(Error):
    """A handle of an earlier connection, another thread, a forked child, a closed handle, a draining daemon."""

    code, name = 9, "FAILED_PRECONDITION"


class AbortedError(Error):
    """Given up because of something else that happened."""

    code, name = 10, "ABORTED"


class OutOfRangeError(Error):
    """Beyond what is there."""

    code, name = 11, "OUT_OF_RANGE"


class UnimplementedError(Error):
    """The daemon does not have this call."""

    code, name = 12, "UNIMPLEMENTED"
    advice = "install client and daemon of one version"


class InternalError(Error):
    """Something answered what it should not."""

    code, name = 13, "INTERNAL"
    advice = "report it, with the daemon's log"


class UnavailableError(Error):
    """The daemon is gone, and every lease with it; or it cannot be reached; or, the connection living, it drains, or a
    peer cannot be reached."""

    code, name = 14, "UNAVAILABLE"
    advice = "retry; if client.connected is False, reconnect(), then open caches and create sequences again"


class DataLossError(Error):
    """Bytes did not match their checksum."""

    code, name = 15, "DATA_LOSS"
    advice = "compute it anew"


class UnauthenticatedError(Error):
    """Who asks is not known."""

    code, name = 16, "UNAUTHENTICATED"


_BY_CODE = {kind.code: kind for kind in Error.__subclasses__()}


def from_text(text: bytes) -> Error:
    """The error in the text that the C interface left."""
    return from_fields(json.loads(text))


def from_fields(fields: dict[str, Any]) -> Error:
    kind = _BY_CODE.get(fields["code"], Error)
    return kind(fields["message"], fields["field"], fields["value"], fields["bound"])


def invalid(field: str, value: object, bound: str) -> InvalidArgumentError:
    """InvalidArgumentError with the message "<field> is <value>, must be <bound>"."""
    return InvalidArgumentError(f"{field} is {value}, must be {bound}", field, str(value), bound)


def integer(field: str, value: Any, least: int = 0, most: int = 2**64 - 1) -> int:
    """`value`, which is to go to C, where what does not fit would be cut. InvalidArgumentError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid(field, repr(value), f"an integer of {least}..{most}") from None
    if not least <= number <= most:
        raise invalid(field, number, f"{least}..{most}")
    return number


def data(field: str, value: object) -> bytes:
    """`value`, which is to be bytes or like them. InvalidArgumentError."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise invalid(field, repr(value), "bytes")
    return bytes(value)


def encoded(field: str, value: Any) -> bytes:
    """`value`, which is to be a string that has a UTF-8 form. InvalidArgumentError."""
    try:
        return bytes(value.encode())
    except (AttributeError, UnicodeEncodeError):
        raise invalid(field, ascii(value), "a string") from None
