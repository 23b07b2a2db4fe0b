"""Loss against bytes as an SVG: a panel for each text and task, a point for each variant."""

from __future__ import annotations

import html
import math
import pathlib

from kvmanager.quality.protocol import accuracy_change, perplexity_change
from report import Measured

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 560, 300, 56, 46, 40
_COLOURS = {"daemon": "#0b6e4f", "emulated": "#5aa787", "peer": "#b5442a", "own": "#d9a08f"}
_NAMES = {"daemon": "daemon", "emulated": "hack in torch", "peer": "peers, our sinks and window", "own": "peers, their own window"}


def write_svg(path: pathlib.Path, measured: list[Measured], title: str) -> None:
    raw, others = measured[0], measured[1:]
    panels = [(f"{text}: perplexity, %", [100 * perplexity_change(raw.losses[text], one.losses[text])[0] for one in others])
              for text in raw.losses]
    panels += [(f"{task}: points lost", [-100 * accuracy_change(raw.right[task], one.right[task])[0] for one in others])
               for task in raw.right]
    height = _TOP + len(panels) * _HEIGHT
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
             f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
             f'<text x="8" y="16" font-size="12">{html.escape(title[:86])}</text>']
    for at, kind in enumerate(kind for kind in _NAMES if any(one.variant.kind == kind for one in others)):
        parts.append(f'<circle cx="{14 + 150 * at}" cy="32" r="4" fill="{_COLOURS[kind]}"/>'
                     f'<text x="{22 + 150 * at}" y="36">{_NAMES[kind]}</text>')
    for at, (name, values) in enumerate(panels):
        parts += _panel(name, others, values, _TOP + at * _HEIGHT)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _panel(name: str, others: list[Measured], values: list[float], top: float) -> list[str]:
    """Bytes in a logarithmic scale; losses in one that is linear below 1 and logarithmic above."""
    scaled = [math.asinh(value) for value in values]
    low, high = min([0.0, *scaled]), max([1.0, *scaled])
    least, most = min(one.bytes for one in others) * 0.9, max(one.bytes for one in others) * 1.1
    x = lambda size: _LEFT + (_WIDTH - _LEFT - 16) * math.log(size / least) / math.log(most / least)
    y = lambda value: top + 24 + (_HEIGHT - 24 - _BOTTOM) * (high - value) / (high - low)
    parts = [f'<text x="{_LEFT}" y="{top + 14}" font-weight="bold">{html.escape(name)}</text>']
    for tick in (-10, -3, -1, 0, 0.3, 1, 3, 10, 30, 100, 300, 1000):
        if low <= math.asinh(tick) <= high:
            at = y(math.asinh(tick))
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 16}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
                         f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512):
        if least <= tick <= most:
            parts.append(f'<text x="{x(tick):.1f}" y="{top + _HEIGHT - 22}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="{_WIDTH - 16}" y="{top + _HEIGHT - 8}" text-anchor="end">bytes per token and KV head</text>')
    for one, value in zip(others, scaled):
        parts.append(f'<circle cx="{x(one.bytes):.1f}" cy="{y(value):.1f}" r="4" fill="{_COLOURS[one.variant.kind]}">'
                     f"<title>{html.escape(one.variant.label)}</title></circle>")
        if one.variant.kind == "peer":
            parts.append(f'<text x="{x(one.bytes) + 6:.1f}" y="{y(value) - 4:.1f}" font-size="9">{html.escape(one.variant.name)}</text>')
    return parts
