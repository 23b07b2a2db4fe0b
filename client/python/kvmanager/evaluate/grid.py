"""Which codec to take: a grid of them, and of those that lose little enough the one of fewest bytes."""

from __future__ import annotations

from kvmanager.evaluate.measure import Measured
from kvmanager.evaluate.report import accuracy

_HACK_BITS = ((4, 4), (4, 3), (4, 2), (3, 2))
_STACKED_BYTES = (54, 46, 38, 30, 25, 21)  # at 64 channels


def grid(calibration: str, head_dim: int) -> list[str]:
    """hack's, and zack+hack's of an artifact if there is one."""
    codecs = [f"hack:k_bits={k},v_bits={v}" for k, v in _HACK_BITS]
    if calibration:
        codecs += [f"zack+hack:bytes={each * head_dim / 64:g},calibration={calibration}" for each in _STACKED_BYTES]
    return codecs


def fewest_bytes(results: list[Measured], raw: Measured, max_loss: float, max_points: float | None) -> Measured:
    """Of the results, raw among them, those within both bounds. max_loss: share of raw's perplexity. max_points: of each
    task's accuracy, as a share; None: tasks are not asked."""
    def keeps(each: Measured) -> bool:
        lost = [accuracy(raw.tasks[task]) - accuracy(each.tasks[task]) for task in raw.tasks]
        # Equal shares of equal cases may differ in the last bit.
        return each.change(raw) <= max_loss and (max_points is None or all(one <= max_points + 1e-9 for one in lost))

    return min((each for each in results if keeps(each)), key=lambda each: each.token_bytes)
