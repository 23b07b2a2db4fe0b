"""Tables of a comparison: every variant beside raw, and each peer beside our codec of at most its bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmanager.quality.protocol import accuracy, accuracy_change, markdown, paired, percent, perplexity_change
from variants import Variant

BYTES_SLACK = 0.5  # of a byte per token: what rounds to the peer's bytes is not more than they are


@dataclass
class Measured:
    """losses: of each text, nats per token by window. right: of each task, by prompt and case."""

    variant: Variant
    bytes: float
    losses: dict[str, list[float]]
    right: dict[str, list[list[bool]]]


def table(measured: list[Measured]) -> str:
    """The first is raw."""
    raw = measured[0]
    rows = [["codec", "bytes", *(f"{text}, perplexity" for text in raw.losses), *raw.right]]
    rows.append([raw.variant.label, f"{raw.bytes:.1f}", *(f"{math.exp(_mean(each)):.3f}" for each in raw.losses.values()),
                 *(f"{100 * accuracy(each):.1f}% of {sum(map(len, each))}" for each in raw.right.values())])
    for one in measured[1:]:
        rows.append([one.variant.label, f"{one.bytes:.1f}",
                     *(percent(perplexity_change(raw.losses[text], one.losses[text])) + "%" for text in raw.losses),
                     *(f"{100 * accuracy(one.right[task]):.1f}%, {percent(accuracy_change(raw.right[task], one.right[task]), 1)}"
                       for task in raw.right)])
    return markdown(rows) + "\nChange of perplexity and of accuracy (points) against raw, with paired standard errors.\n"


def beside_peers(measured: list[Measured]) -> str:
    """Of each peer with our sinks and window the codec of ours, of at most its bytes, that loses least; what ours loses more,
    paired, and whether that is within the limits: one standard error of perplexity, two of accuracy."""
    raw = measured[0]
    rows = [["peer", "bytes", "ours", "bytes", *(f"{text}: ours - peer" for text in raw.losses),
             *(f"{task}: ours - peer" for task in raw.right), "holds"]]
    for kind in ("daemon", "emulated"):
        ours = [one for one in measured if one.variant.kind == kind and one.bytes < raw.bytes]
        for one in measured if ours else []:
            if one.variant.kind != "peer":
                continue
            fitting = [each for each in ours if each.bytes <= one.bytes + BYTES_SLACK]
            if not fitting:
                rows.append([one.variant.label, f"{one.bytes:.1f}", "none", "", *[""] * (len(raw.losses) + len(raw.right)), "no"])
                continue
            best = min(fitting, key=_loss)
            losses = {text: paired(one.losses[text], best.losses[text]) for text in raw.losses}
            points = {task: accuracy_change(one.right[task], best.right[task]) for task in raw.right}
            holds = [not mean > error for mean, error in losses.values()] + [not mean < -2 * error for mean, error in points.values()]
            rows.append([one.variant.label, f"{one.bytes:.1f}", best.variant.label, f"{best.bytes:.1f}",
                         *(percent(each) + "%" for each in losses.values()), *(percent(each, 1) for each in points.values()),
                         "yes" if all(holds) else "no"])
    if len(rows) == 1:
        return ""
    return markdown(rows) + ("\nOurs: the setting of at most the peer's bytes that loses least, with the same sinks and window. Holds: no "
                             "more loss than the paired standard error, no fewer points than two of them.\n")


def _loss(one: Measured) -> float:
    """Mean loss over texts; without texts, wrong cases."""
    if one.losses:
        return _mean([_mean(each) for each in one.losses.values()])
    return -_mean([accuracy(each) for each in one.right.values()])


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
