"""zack+hack's coding of a page, emulated in torch: what a probe makes of keys or values (codecs/zack_hack)."""

from __future__ import annotations

import heapq

import torch

from kvmanager.calibrate.texts import PAGE_TOKENS

SEGMENT_CHANNELS = 16
WIDTH_MAX = 4
MEASURED_LOSS = (1.0, 0.40, 0.21, 0.038, 0.0082)  # codecs/zack_hack/allocation.h: of energy, with 0 to 4 bits
PROBE_BITS = 1.5  # on average: coarser than what is used, so that the divergence is far from rounding
_NORM_CODES = 255
_SHRINKS = tuple(1 - 0.05 * step for step in range(15))  # of the range of 1-bit codes


def allocate(energies: list[float], bits: int) -> list[int]:
    """AllocateBits of codecs/zack_hack/allocation.h with the measured table: widths of a head's and side's segments."""
    widths = [0] * len(energies)

    def gain(at: int) -> float:
        return energies[at] * (MEASURED_LOSS[widths[at]] - MEASURED_LOSS[widths[at] + 1])

    queue = [(-gain(at), at) for at in range(len(energies))]
    heapq.heapify(queue)
    while bits > 0 and queue:
        _, at = heapq.heappop(queue)
        widths[at] += 1
        bits -= 1
        if widths[at] < WIDTH_MAX:
            heapq.heappush(queue, (-gain(at), at))
    return widths


def head_widths(energy: torch.Tensor, average_bits: float) -> tuple[torch.Tensor, torch.Tensor]:
    """energy [kv_heads, head_dim] of one side, in the order of channels. Returns each channel's width [kv_heads,
    head_dim] where every head gets average_bits, and the energy that each head loses."""
    segments = energy.double().view(energy.shape[0], -1, SEGMENT_CHANNELS).sum(-1)
    widths = torch.tensor([allocate(head.tolist(), round(average_bits * segments.shape[1])) for head in segments])
    lost = (segments * torch.tensor(MEASURED_LOSS, dtype=torch.float64)[widths]).sum(-1)
    return widths.repeat_interleave(SEGMENT_CHANNELS, 1), lost


def norms_of(x: torch.Tensor) -> torch.Tensor:
    """x [kv_heads, tokens, d] of whole pages: the largest magnitude of each token [kv_heads, tokens, 1], as the page's
    codes of 8 bits have it."""
    largest = x.abs().amax(-1, keepdim=True).unflatten(1, (-1, PAGE_TOKENS))
    top = largest.amax(2, keepdim=True).clamp_min(1e-20)
    return ((largest / top * _NORM_CODES).ceil().clamp(1, _NORM_CODES) * top / _NORM_CODES).flatten(1, 2)


def code_pages(x: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """x [kv_heads, tokens, head_dim] of whole pages, widths [kv_heads, head_dim]: what is read back of codes along the
    tokens of each page. Width 0 keeps the mean; 1 has the range of least squared error, others from least to largest."""
    pages = x.unflatten(1, (-1, PAGE_TOKENS))
    width = widths.to(x.device)[:, None, None, :]
    steps = (2.0**width - 1).clamp_min(1)
    low, high = pages.amin(2, keepdim=True), pages.amax(2, keepdim=True)

    def coded(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        step = ((high - low) / steps).clamp_min(1e-8)
        return ((pages - low) / step).round().clamp(min=torch.zeros_like(steps), max=steps) * step + low

    best = coded(low, high)
    if bool((widths == 1).any()):
        middle, half = (low + high) / 2, (high - low) / 2
        best_error = (best - pages).square().sum(2, keepdim=True)
        for shrink in _SHRINKS[1:]:
            tried = coded(middle - half * shrink, middle + half * shrink)
            error = (tried - pages).square().sum(2, keepdim=True)
            better = (error < best_error) & (width == 1)
            best, best_error = torch.where(better, tried, best), torch.where(better, error, best_error)
    return torch.where(width == 0, pages.mean(2, keepdim=True), best).flatten(1, 2)


class Rotation:
    """Of one side of one layer: columns in the order of importance, as pages hold them. normed: the norm of each token
    is stored apart, as V's is."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor, order: torch.Tensor, normed: bool):
        """left, right [kv_heads, d, d], order [kv_heads, d]."""
        self._normed = normed
        columns = order.long()[:, None, :].expand(-1, left.shape[1], -1)
        self._right, self._back = right.gather(2, columns), left.gather(2, columns).transpose(1, 2)

    def code(self, x: torch.Tensor, widths: torch.Tensor, sinks: int) -> torch.Tensor:
        """x [kv_heads, tokens, d] with the full pages behind the sinks rotated, coded and rotated back."""
        full = x.shape[1] - x.shape[1] % PAGE_TOKENS
        rows = x[:, sinks:full].float()
        right, back = self._right.to(rows.device), self._back.to(rows.device)
        out = x.float().clone()
        rotated = (rows @ right).half().float()
        norms = norms_of(rotated) if self._normed else 1.0
        out[:, sinks:full] = code_pages(rotated / norms, widths) * norms @ back
        return out


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, coded_k: torch.Tensor, coded_v: torch.Tensor,
           lag_pages: int) -> torch.Tensor:
    """Causal attention that reads its own page and `lag_pages` before it from k and v, older ones from coded_k and
    coded_v. q [query_heads, tokens, d], k and v [kv_heads, tokens, d]; returns like q."""
    heads, tokens, d = q.shape
    kv_heads = k.shape[0]
    rows = (q.float() * d**-0.5).view(kv_heads, -1, tokens, d)
    out = torch.empty_like(rows)
    place = torch.arange(tokens, device=q.device)
    k, v = k.float(), v.float()
    for first in range(0, tokens, 256):
        end = min(tokens, first + 256)
        query, key = place[first:end, None], place[None, :end]
        near = query // PAGE_TOKENS - key // PAGE_TOKENS <= lag_pages
        x = rows[:, :, first:end].flatten(1, 2)
        scores = (x @ k[:, :end].transpose(1, 2)).view(kv_heads, -1, end - first, end)
        if coded_k is not k:
            far = (x @ coded_k[:, :end].transpose(1, 2)).view_as(scores)
            scores = torch.where(near, scores, far)
        p = scores.masked_fill_(key > query, -torch.inf).softmax(-1)
        o = (p * near).flatten(1, 2) @ v[:, :end] + (p * ~near).flatten(1, 2) @ coded_v[:, :end]
        out[:, :, first:end] = o.view(kv_heads, -1, end - first, d)
    return out.view(heads, tokens, d)
