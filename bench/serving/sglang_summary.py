"""Figures and faults of an SGLang configuration, from the run that results.json has of it."""

from __future__ import annotations

import dataclasses

from configurations import Configuration
from sglang_workload import COLD, FOUND, RESIDENT

_RAW = "raw"


@dataclasses.dataclass
class Figures:
    """By f"{length} {way}" of a pass: first_s, of each request, and resident_s, of each one behind it; extra_s, what a request
    takes to its first token more than the resident one behind it, and extra_found, its tokens from the storage; hits, the share
    of prompt tokens that came from the storage; equal, how many requests had the token ids that were computed, and of how many.
    What was not measured is not there.

    stored: by length, as sglang_workload.settle gives it."""

    first_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    resident_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    extra_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    extra_found: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    hits: dict[str, float] = dataclasses.field(default_factory=dict)
    equal: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    stored: dict[int, dict] = dataclasses.field(default_factory=dict)
    errors: list[str] = dataclasses.field(default_factory=list)


def _computed(requests: list[dict]) -> dict[tuple[int, int], list[list[int]]]:
    """By length and pair: the ids of the first cold request, and of the resident one behind it. Either is computed without a
    storage; they may differ by rounding, since the resident one computes its last tokens alone."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    for each in requests:
        if each["behind"] == COLD and each["cycle"] == 0:
            found.setdefault((each["length"], each["pair"]), []).append(each["ids"])
    return found


def _is_equal(request: dict, computed: dict[tuple[int, int], list[list[int]]]) -> bool:
    return request["ids"] in computed.get((request["length"], request["pair"]), [])


def _is_compared(request: dict) -> bool:
    """The first cold ones are what others are compared with."""
    return request["behind"] != COLD or request["cycle"] > 0


def figures(run: dict) -> Figures:
    found, requests = Figures(), run.get("requests", [])
    residents = {(each["behind"], each["cycle"], each["length"], each["pair"]): each["first_s"]
                 for each in requests if each["way"] == RESIDENT}
    computed = _computed(requests)
    for each in requests:
        name = f"{each['length']} {each['behind']}"
        if each["way"] == RESIDENT:
            found.resident_s.setdefault(name, []).append(each["first_s"])
            continue
        found.first_s.setdefault(name, []).append(each["first_s"])
        resident = residents.get((each["behind"], each["cycle"], each["length"], each["pair"]))
        if resident is not None:
            found.extra_s.setdefault(name, []).append(each["first_s"] - resident)
            found.extra_found.setdefault(name, []).append(each["found"])
    for name in found.first_s:
        of_way = [each for each in requests if f"{each['length']} {each['way']}" == name]
        found.hits[name] = sum(each["found"] for each in of_way) / sum(each["length"] for each in of_way)
        compared = [each for each in of_way if _is_compared(each)]
        if compared:
            found.equal[name] = sum(_is_equal(each, computed) for each in compared), len(compared)
    found.stored = {each["length"]: each for each in run.get("stored", [])}
    found.errors = [run["error"]] if run.get("error") else []
    return found


def faults(configuration: Configuration, run: dict) -> list[str]:
    """What makes times say something else than they seem to: requests of the storage's prompts that found nothing, others that
    found something, and, with codec raw, token ids that differ from those computed."""
    requests, found = run.get("requests", []), []
    computed = _computed(requests)
    for length, way in dict.fromkeys((each["length"], each["way"]) for each in requests):
        of_way = [each for each in requests if (each["length"], each["way"]) == (length, way)]
        where, count = f"{configuration.label}, {length} tokens, {way}: ", len(of_way)
        if way in FOUND and (missed := sum(not each["found"] for each in of_way)):
            found.append(where + f"{missed} of {count} requests found nothing in the storage")
        if way not in FOUND and (hit := sum(bool(each["found"]) for each in of_way)):
            found.append(where + f"{hit} of {count} requests found tokens in the storage, must be 0")
        differing = [each["pair"] for each in of_way if _is_compared(each) and not _is_equal(each, computed)]
        if configuration.codec == _RAW and differing:
            found.append(where + f"{len(differing)} of {count} requests have other token ids than were computed, must be 0 "
                         f"with codec raw: prompts {', '.join(map(str, sorted(set(differing))))}")
    return found
