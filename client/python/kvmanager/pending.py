"""Calls under way."""

from __future__ import annotations

from ctypes import byref, c_int, c_uint64, c_void_p
from typing import Any, Callable, Generic, TypeVar

from ._lib import Handle, check, lib
from .errors import Error, FailedPreconditionError

Result = TypeVar("Result")


class Pending(Handle, Generic[Result]):
    """A call under way: it goes on while others are made. Closing it, or letting it go, cancels it."""

    __slots__ = ("_finish", "_keep", "_result", "_error")

    def __init__(self, address: int | None, finish: Callable[[Any, Any], Result], keep: object = None) -> None:
        super().__init__(address)
        self._finish: Callable[[Any, Any], Result] | None = finish
        self._keep = keep  # arguments that the call still writes, and the client
        self._result: Any = None
        self._error: Error | None = None

    def ready(self) -> bool:
        """Whether wait() would not block."""
        if self._finish is None:
            return True
        ready = c_int()
        check(lib.kvm_ready(self._object, byref(ready)))
        return ready.value != 0

    def wait(self) -> Result:
        """The call's result, or its error; the same when it is asked again."""
        if self._finish is not None:
            values, made = (c_uint64 * 3)(), c_void_p()
            try:
                check(lib.kvm_wait(self._object, values, byref(made)))
            except FailedPreconditionError:  # perhaps of another thread: its own may still wait
                raise
            except Error as error:
                self._error = error
            else:
                self._result = self._finish(values, made.value)
            self._finish = self._keep = None
        if self._error is not None:
            raise self._error
        result: Result = self._result
        return result
