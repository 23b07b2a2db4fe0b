"""The table of a comparison of vLLM's engines: rows of figures, and of their ratios to vLLM's own."""

from __future__ import annotations

import statistics
from typing import Callable

from configurations import ALONE, OFFLOAD, Configuration
from rows import NONE, Rows, Samples, milliseconds, number, tokens
from scale import GIB, Scale
from summary import Figures


def _per_second(values: Samples) -> str:
    return f"{statistics.median(values):,.0f} ({len(values)})" if values else NONE


class Table:
    """columns: in order; ratios are to those of vLLM's own that are among them. limits: of machine.py, GB/s. paired: as Rows
    takes it."""

    def __init__(
        self, columns: dict[Configuration, Figures], scale: Scale, bytes_of_token: int, limits: dict[str, float],
        paired: bool = False,
    ) -> None:
        self._columns, self._scale, self._token, self._limits = columns, scale, bytes_of_token, limits
        self._bases = [(each, found) for each, found in columns.items() if each.name in (ALONE, OFFLOAD)]
        self._rows = Rows(columns, paired)

    def markdown(self) -> str:
        """Once."""
        for length in ("short", "long"):
            self._length(length, tokens(getattr(self._scale, length)))
        for length in ("short", "long"):
            self._disk(length, tokens(getattr(self._scale, length)))
        short, unique = tokens(self._scale.short), tokens(self._scale.unique)
        self._samples(f"{short}, four at once: prompt tokens/s", _per_second, lambda found: found.rates.get("short at once"))
        self._rows.row(f"{short}, four at once: hits", lambda found: number(found.hits.get("short at once"), ".1%"))
        self._samples(f"unique {unique}, {self._scale.unique_at_once} at once: output tokens/s", _per_second,
                      lambda found: found.rates.get("unique"))
        load, store = f"{self._limits['load_gb_s']:.1f}", f"{self._limits['store_gb_s']:.1f}"
        self._rows.row(f"load, GB/s by the connector (limit {load})", lambda found: number(found.load_gb_s, ".1f"))
        self._rows.row(f"store, GB/s by the connector (limit {store})", lambda found: number(found.store_gb_s, ".1f"))
        self._fit()
        return self._rows.markdown() + self._compared() + self._rows.errors(lambda found: found.errors)

    def _samples(self, name: str, form: Callable[[Samples], str], of: Callable[[Figures], Samples]) -> None:
        """A row of samples, and one of ratios to each of vLLM's own configurations."""
        self._rows.row(name, lambda found: form(of(found)))
        for base, base_found in self._bases:
            self._rows.ratio(f"... over {base.label}", of, lambda found: None if found is base_found else of(base_found))

    def _length(self, length: str, size: str) -> None:
        self._samples(f"{size} cold: TTFT, ms", milliseconds, lambda found: found.first_s.get(f"{length} cold"))
        self._samples(f"{size} cold: whole request, ms", milliseconds, lambda found: found.total_s.get(f"{length} cold"))
        self._samples(f"{size} warm: TTFT, ms", milliseconds, lambda found: found.first_s.get(f"{length} warm"))
        self._rows.row(f"{size} resident: TTFT, ms", lambda found: milliseconds(found.first_s.get(f"{length} resident")))
        self._samples(f"{size} warm less resident: TTFT, ms", milliseconds, lambda found: found.extra_s.get(length))
        self._rows.row(f"{size} warm: hits", lambda found: number(found.hits.get(f"{length} warm"), ".1%"))
        self._rows.row(f"{size} first warm pass: hits", lambda found: number(found.first_hits.get(length), ".1%"))
        self._rows.row(f"{size} warm: GB/s of raw K and V to the first token", lambda found: self._brought(found, length))

    def _disk(self, length: str, size: str) -> None:
        """Of --parts disk; ratios are to the same prompts computed."""
        self._rows.row(f"{size} computed: TTFT, ms", lambda found: milliseconds(found.first_s.get(f"{length} computed")))
        for way, name in (("from disk", "the disk alone has it"), ("from pool", "then in host memory"),
                          ("from own", "then in the engine")):
            self._rows.row(f"{size}, {name}: TTFT, ms", lambda found: milliseconds(found.first_s.get(f"{length} {way}")))
            self._rows.ratio("... over computing it", lambda found: found.first_s.get(f"{length} {way}"),
                             lambda found: found.first_s.get(f"{length} computed"))
        self._rows.row(f"{size}, the disk alone has it: hits",
                       lambda found: number(found.hits.get(f"{length} from disk"), ".1%"))

    def _brought(self, found: Figures, length: str) -> str:
        """Raw bytes of what is found, over what a warm request takes longer than a resident one."""
        cached, extra = found.extra_cached.get(length), found.extra_s.get(length)
        if not cached or not statistics.median(cached) or statistics.median(extra) <= 0:
            return NONE
        return f"{statistics.median(cached) * self._token / statistics.median(extra) / 1e9:.1f}"

    def _fit(self) -> None:
        pool = self._scale.capacity_pool_bytes
        self._rows.row(f"tokens found again in {pool / GIB:g} GiB", lambda found: number(found.fit_tokens, ",d"))
        for base, base_found in self._bases:
            if base_found.fit_tokens:
                self._rows.row(f"... over {base.label}", lambda found: NONE if found is base_found or found.fit_tokens is None
                          else f"{found.fit_tokens / base_found.fit_tokens:.2f}")

    def _compared(self) -> str:
        lines = []
        for configuration, found in self._columns.items():
            for each in found.compared:
                errors = f"{each['k_error']:.4f} | {each['v_error']:.4f}"
                lines.append(f"| {configuration.label} | {each['prompt']} | {each['blocks']} | {each['loaded']} | "
                             f"{each['equal']} | {errors} | {each['overwritten_equal']} |")
        if not lines:
            return ""
        head = ("\nBlocks in the engine's cache as they were computed, and as they were loaded after it was overwritten:\n\n"
                "| | prompt tokens | full blocks | loaded | equal bit for bit | K's error | V's | equal before loading |\n"
                "|" + " --- |" * 8 + "\n")
        return head + "\n".join(lines) + "\n"


NOTE = """
TTFT: p50, p99 (number of requests). Rates: median (number of batches). Ratios: of medians, with 95% bootstrap intervals. "Less
resident": of each warm request, the TTFT of the same prefix in the engine's own cache, asked for right behind it, taken off.
"""
