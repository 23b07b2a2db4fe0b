"""Figures of a configuration, from the runs that results.json has of it."""

from __future__ import annotations

import dataclasses

from counters import LOADS, STORES, rate, total
from scale import BLOCK_TOKENS

TIMED = ("latency", "unique")  # kinds of runs that take the engine's times
RATES = {"short at once": "prompt", "unique": "output"}  # tokens of a batch that count


@dataclasses.dataclass
class Figures:
    """Samples of all rounds together; what was not measured is empty or None.

    first_s, total_s: by way, of each request. extra_s: by length, what each warm request takes to its first token more than the
    resident one behind it; extra_cached: tokens of its prompt that were not computed. rates: by way, tokens per second of each
    batch. hits: by way, share of prompt tokens that were not computed; first_hits: by length, of the first warm pass.
    load_gb_s, store_gb_s: as the connector counts them. fit_tokens: what the pool that was filled gives back."""

    rounds: int = 0
    first_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    total_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    extra_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    extra_cached: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    rates: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    hits: dict[str, float] = dataclasses.field(default_factory=dict)
    first_hits: dict[str, float] = dataclasses.field(default_factory=dict)
    load_gb_s: float | None = None
    store_gb_s: float | None = None
    fit_tokens: int | None = None
    compared: list[dict] = dataclasses.field(default_factory=list)
    counted: dict[str, float] = dataclasses.field(default_factory=dict)
    errors: list[str] = dataclasses.field(default_factory=list)


def hit_share(requests: list[dict]) -> float:
    return sum(each["cached"] for each in requests) / sum(each["prompt"] for each in requests)


def figures(runs: list[dict]) -> Figures:
    """runs: of one configuration."""
    found = Figures()
    for run in runs:
        if run.get("error"):
            found.errors.append(f"{run['kind']}, round {run['round']}: {run['error']}")
        if run["kind"] in TIMED and run.get("requests"):
            found.rounds += 1
            _add_latency(found, run)
        elif run["kind"] == "disk":
            for each in run.get("requests", []):
                found.first_s.setdefault(each["way"], []).append(each["first_s"])
        elif run["kind"] == "capacity" and not run.get("error"):
            found.fit_tokens = sum(each["cached"] for each in run["requests"] if each["way"] == "found")
        elif run["kind"] == "compare":
            found.compared += run.get("compared", [])
    timed = [run for run in runs if run["kind"] in TIMED]
    requests = [each for run in runs if run["kind"] in (*TIMED, "disk") for each in run.get("requests", [])]
    for way in {each["way"] for each in requests}:
        of_way = [each for each in requests if each["way"] == way]
        found.hits[way] = hit_share(of_way)
        length, _, kind = way.partition(" ")
        if kind == "warm":
            found.first_hits[length] = hit_share([each for each in of_way if each["cycle"] == 0])
    counted = [{name: value for name, value in each.items() if isinstance(value, (int, float))}
               for run in timed for each in run.get("counted", [])]
    found.counted = total(counted)
    found.load_gb_s, found.store_gb_s = rate(found.counted, LOADS), rate(found.counted, STORES)
    return found


def _add_latency(found: Figures, run: dict) -> None:
    residents = {}
    for each in run["requests"]:
        found.first_s.setdefault(each["way"], []).append(each["first_s"])
        found.total_s.setdefault(each["way"], []).append(each["total_s"])
        length, _, kind = each["way"].partition(" ")
        if kind == "resident":
            residents[length, each["cycle"], each["pair"]] = each["first_s"]
    for each in run["requests"]:
        length, _, kind = each["way"].partition(" ")
        resident = residents.get((length, each["cycle"], each["pair"]))
        if kind == "warm" and resident is not None:
            found.extra_s.setdefault(length, []).append(each["first_s"] - resident)
            found.extra_cached.setdefault(length, []).append(each["cached"])
    for each in run["batches"]:
        tokens = each[RATES[each["way"]]]
        found.rates.setdefault(each["way"], []).append(tokens / each["wall_s"])


def compared_faults(label: str, lossless: bool, compared: list[dict]) -> list[str]:
    """What is wrong in results of workload.compare. Without loss, all that is loaded is equal."""
    faults = []
    for each in compared:
        prompt = f"{label}, prompt of {each['prompt']} tokens: "
        if each["overwritten_equal"]:
            faults.append(prompt + f"{each['overwritten_equal']} blocks were equal before they were loaded, must be 0")
        if each["loaded"] != each["blocks"]:
            faults.append(prompt + f"{each['loaded']} blocks were loaded, must be {each['blocks']}")
        if lossless and each["equal"] != each["loaded"]:
            faults.append(prompt + f"{each['equal']} blocks are equal bit for bit, must be {each['loaded']}")
    return faults


def disk_faults(label: str, requests: list[dict]) -> list[str]:
    """What did not come from where it should, in requests of workload.disk."""
    faults = []
    for each in requests:
        length, _, way = each["way"].partition(" ")
        if not way.startswith("from "):
            continue
        wanted = each["cached"] // BLOCK_TOKENS if way == "from disk" else 0
        if not each["cached"] or each["disk_blocks"] != wanted:
            faults.append(f"{label}, {length} prefix {each['pair']} {way}: {each['cached']} tokens hit and "
                          f"{each['disk_blocks']:.0f} blocks were read from the disk, must be {wanted}")
    return faults
