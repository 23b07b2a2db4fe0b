"""What was measured, as a table, as JSON and as a drawing."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from kvmanager.evaluate.measure import Measured

_CONTEXTS = (2048, 32768)  # tokens of which the bytes of sinks are a part
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 420, 70, 170, 30, 50


def _percent(value: float, error: float | None) -> str:
    return f"{100 * value:+.2f}%" + ("" if error is None else f" ± {100 * error:.2f}")


def accuracy(right: list[bool]) -> float:
    return sum(right) / len(right) if right else 0.0


def table(results: list[Measured], raw: Measured) -> str:
    """Plain text, a line per codec."""
    tasks = list(raw.tasks)
    head = ["codec", "bytes", *(f"in {tokens}" for tokens in _CONTEXTS), "perplexity", "change", *tasks]
    rows = [head]
    for each in results:
        row = [each.codec, f"{each.token_bytes:.1f}", *(f"{each.context_bytes(tokens):.1f}" for tokens in _CONTEXTS),
               f"{each.perplexity():.4f}", "" if each is raw else _percent(each.change(raw), each.change_error(raw))]
        rows.append(row + [f"{sum(each.tasks[task])} of {len(each.tasks[task])}" for task in tasks])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                       for column, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def as_json(results: list[Measured], raw: Measured, settings: dict[str, Any]) -> dict[str, Any]:
    def one(each: Measured) -> dict[str, Any]:
        return {"codec": each.codec, "canonical": each.canonical,
                "token_bytes": each.token_bytes, "sink_tokens": each.sink_tokens,
                "payload_token_bytes": each.payload_page_bytes / (each.page_tokens * each.kv_heads),
                "context_bytes": {str(tokens): each.context_bytes(tokens) for tokens in _CONTEXTS},
                "nats_per_token": each.nats(), "perplexity": each.perplexity(), "window_nats": each.losses,
                "change": each.change(raw), "change_error": each.change_error(raw),
                "tasks": {task: {"right": sum(right), "cases": len(right), "accuracy": accuracy(right)}
                          for task, right in each.tasks.items()}}
    return {**settings, "codecs": [one(each) for each in results]}


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = next(step * factor for factor in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (step * factor) <= 8)
    first = math.ceil(low / step)
    return [at * step for at in range(first, int(high / step + 1e-9) + 1)]


def svg(results: list[Measured], raw: Measured, title: str) -> str:
    """Bytes per token and KV head against the change of perplexity, in percent, with its standard error."""
    points = [(each, each.token_bytes, 100 * each.change(raw), 100 * (each.change_error(raw) or 0)) for each in results]
    most = max(point[1] for point in points) * 1.05
    low = min(0.0, *(y - e for _, _, y, e in points))
    high = max(1.0, *(y + e for _, _, y, e in points))
    margin = (high - low) * 0.05
    low, high = low - margin, high + margin

    def x_of(value: float) -> float:
        return _LEFT + value / most * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
           'font-size="12">', f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
           f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>']
    for value in _ticks(0, most):
        out.append(f'<text x="{x_of(value):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(low, high):
        y = y_of(value)
        out.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>'
                   f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}%</text>')
    out.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">bytes per token and KV '
               'head</text>')
    for each, x, y, error in points:
        if error:
            out.append(f'<path d="M{x_of(x):.1f} {y_of(y - error):.1f}V{y_of(y + error):.1f}" stroke="#36c"/>')
        out.append(f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="4" fill="#36c"/>'
                   f'<text x="{x_of(x) + 7:.1f}" y="{y_of(y) + 4:.1f}">{escape(each.codec)}</text>')
    return "\n".join([*out, "</svg>", ""])
