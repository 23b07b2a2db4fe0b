"""Compiler options for code that uses KJ promises."""

# gcc 12 takes kj::Maybe's empty state for an uninitialised value.
KJ_COPTS = ["-Wno-maybe-uninitialized"]
