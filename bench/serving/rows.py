"""Rows of a comparison as a Markdown table: a column for each configuration, figures, and ratios of medians."""

from __future__ import annotations

import statistics
from typing import Callable, Generic, TypeVar

from configurations import Configuration
from intervals import quantile, ratio_of_medians

NONE = "-"
_ERRORS_SHOWN = 300  # characters of one

Figures = TypeVar("Figures")  # what was found under a configuration
Samples = list[float] | None


def tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def milliseconds(seconds: Samples) -> str:
    """p50, p99 (count)."""
    if not seconds:
        return NONE
    return f"{1e3 * statistics.median(seconds):.0f}, {1e3 * quantile(seconds, 0.99):.0f} ({len(seconds)})"


def number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def head(results: dict, whole: bool) -> str:
    """The line above a table of such results.json. whole: of the full scale."""
    facts = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    where = facts["gpu"] or f"a CPU with {facts['cores']} cores, which says nothing of a GPU"
    own = f"the engine's own cache has {results['scale']['engine_cache']} tokens"
    more = ("; engines side by side" if results.get("side_by_side") else "") + ("" if whole else "; not the full scale")
    return f"{where}; {versions}; {results['weights']}; {own}{more}\n\n"


class Rows(Generic[Figures]):
    """columns: in order. paired: samples of two columns were taken one right behind the other."""

    def __init__(self, columns: dict[Configuration, Figures], paired: bool = False) -> None:
        self._columns, self._paired = columns, paired
        self._rows = [["", *(configuration.label for configuration in columns)]]

    def row(self, name: str, of: Callable[[Figures], str]) -> None:
        """Unless no column has it."""
        cells = [of(found) for found in self._columns.values()]
        if any(cell != NONE for cell in cells):
            self._rows.append([name, *cells])

    def ratio(self, name: str, of: Callable[[Figures], Samples], base: Callable[[Figures], Samples]) -> None:
        """Of medians, with its interval; both are of a column."""
        def cell(found: Figures) -> str:
            interval = ratio_of_medians(of(found) or [], base(found) or [], paired=self._paired)
            return NONE if interval is None else str(interval)

        self.row(name, cell)

    def markdown(self) -> str:
        lines = ["| " + " | ".join(row) + " |" for row in self._rows]
        lines.insert(1, "|" + " --- |" * len(self._rows[0]))
        return "\n".join(lines) + "\n"

    def errors(self, of: Callable[[Figures], list[str]]) -> str:
        """What was not measured, as a list behind the table."""
        lines = [f"- {configuration.label}, {error[:_ERRORS_SHOWN]}" for configuration, found in self._columns.items()
                 for error in of(found)]
        return "\nNot measured:\n\n" + "\n".join(lines) + "\n" if lines else ""
