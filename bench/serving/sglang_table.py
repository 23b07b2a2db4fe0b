"""The table of a comparison of SGLang's servers: rows of figures, and of their ratios to computing and to SGLang's files."""

from __future__ import annotations

import statistics

from configurations import Configuration
from rows import NONE, Rows, milliseconds, number, tokens
from sglang_summary import Figures
from sglang_workload import COLD, DISK, RESTART, STORAGE

ALONE, FILES = "alone", "files"
SGLANG = {ALONE: "SGLang alone", FILES: "SGLang's files"}
_WAYS = {STORAGE: "from the storage", DISK: "files on the disk", RESTART: "after a restart"}


def _equal(found: Figures, name: str) -> str:
    return f"{found.equal[name][0]} of {found.equal[name][1]}" if name in found.equal else NONE


class Table:
    """columns: in order. bytes_of_token: of K and V, raw. limit_gb_s: of one large copy to the device."""

    def __init__(self, columns: dict[Configuration, Figures], lengths: tuple[int, ...], bytes_of_token: int,
                 limit_gb_s: float) -> None:
        self._lengths, self._token, self._limit_gb_s = lengths, bytes_of_token, limit_gb_s
        self._rows = Rows(columns)
        named = {configuration.name: found for configuration, found in columns.items()}
        self._alone, self._files = named.get(ALONE), named.get(FILES)

    def markdown(self) -> str:
        """Once."""
        for length in self._lengths:
            self._length(length)
        return self._rows.markdown() + self._rows.errors(lambda found: found.errors)

    def _length(self, length: int) -> None:
        rows, size, cold = self._rows, tokens(length), f"{length} {COLD}"
        rows.row(f"{size} cold: TTFT, ms", lambda found: milliseconds(found.first_s.get(cold)))
        self._over_alone(cold, cold)
        rows.row(f"{size} cold again: ids as computed", lambda found: _equal(found, cold))
        rows.row(f"{size} resident behind cold: TTFT, ms", lambda found: milliseconds(found.resident_s.get(cold)))
        rows.row(f"{size} pages stored", lambda found: self._stored(found, length))
        for way, text in _WAYS.items():
            self._found(f"{size} {text}", f"{length} {way}", cold)

    def _found(self, title: str, name: str, cold: str) -> None:
        rows = self._rows
        rows.row(f"{title}: TTFT, ms", lambda found: milliseconds(found.first_s.get(name)))
        rows.ratio("... over cold in the same column", lambda found: found.first_s.get(name),
                   lambda found: found.first_s.get(cold))
        self._over_alone(name, cold)
        self._over_files(lambda found: found.first_s, name)
        rows.row(f"{title}: resident behind it, TTFT, ms", lambda found: milliseconds(found.resident_s.get(name)))
        rows.row(f"{title}, less resident: TTFT, ms", lambda found: milliseconds(found.extra_s.get(name)))
        self._over_files(lambda found: found.extra_s, name)
        rows.row(f"{title}, less resident: GB/s of raw K and V (one large copy: {self._limit_gb_s:.1f})",
                 lambda found: self._brought(found, name))
        rows.row(f"{title}: hits", lambda found: number(found.hits.get(name), ".1%"))
        rows.row(f"{title}: ids as computed", lambda found: _equal(found, name))

    def _over_alone(self, name: str, cold: str) -> None:
        """A row of ratios to SGLang alone, which computes."""
        alone = self._alone
        if alone is not None:
            self._rows.ratio(f"... over cold, {SGLANG[ALONE]}", lambda found: found.first_s.get(name),
                             lambda found: None if found is alone else alone.first_s.get(cold))

    def _over_files(self, samples, name: str) -> None:
        """A row of ratios to what SGLang's files take, from the page cache. samples(figures): by name."""
        files, base = self._files, f"{name.split()[0]} {STORAGE}"
        if files is not None:
            self._rows.ratio(f"... over {SGLANG[FILES]}", lambda found: samples(found).get(name),
                             lambda found: None if found is files and name == base else samples(files).get(base))

    def _stored(self, found: Figures, length: int) -> str:
        """Pages, and how long the last one came behind the last prompt."""
        each = found.stored.get(length)
        return f"{each['pages']:,} of {each['expected']:,}, {each['seconds']:.1f} s" if each else NONE

    def _brought(self, found: Figures, name: str) -> str:
        """Raw bytes of what is found, over what a request takes longer than a resident one."""
        extra, from_storage = found.extra_s.get(name), found.extra_found.get(name)
        if not extra or not statistics.median(from_storage) or statistics.median(extra) <= 0:
            return NONE
        return f"{statistics.median(from_storage) * self._token / statistics.median(extra) / 1e9:.1f}"


NOTE = """
TTFT: p50, p99 (number of requests). Ratios: of medians, with 95% bootstrap intervals; "..." belongs to the row above. Each
prompt is asked for twice in a row; the second request is "resident": its prompt is in the engine's own cache. Pages stored: so
far, those of the prompts that warm up, too; seconds from the last request to the last page. Hits: prompt tokens that came
from the storage, of all; SGLang computes the last page always. Files are in the page cache, but for "files on the disk". Ids as
computed: requests whose token ids are those of the same prompt when it was computed, or of the resident request behind that.
Equal ids of dummy weights prove little: such a model may answer alike from another cache. They say nothing of a codec's loss.
"""
