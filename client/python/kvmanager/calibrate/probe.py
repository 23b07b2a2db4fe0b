"""What a unit of energy lost costs in each part of a model: zack_hack.{mode}.sensitivity of its artifact.

A part is a side of one layer, of one KV head or of all. It alone is coded, coarsely; the rest of the model runs as it is.
The divergence of the predictions over windows of prose and of text to copy, divided by the energy lost, is the part's
sensitivity (codecs/zack_hack/sensitivity.h). All of V together says which basis codes it better."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import numpy as np
import torch

from kvmanager.calibrate.attention import visiting
from kvmanager.calibrate.coding import PROBE_BITS, Rotation, attend, head_widths
from kvmanager.calibrate.models import Geometry, decoder_layers
from kvmanager.calibrate.progress import Progress
from kvmanager.calibrate.texts import PAGE_TOKENS, Window

_POSITIONS_MAX = 512  # of a window whose predictions are compared
_ROWS = 128           # of logits at a time


def counted_positions(window: Window, sinks: int, lag_pages: int) -> torch.Tensor:
    """Of predictions that are compared: none that reads raw pages alone."""
    first = max(window.counted, sinks + (lag_pages + 1) * PAGE_TOKENS)
    last = len(window.ids) - 1
    if first >= last:
        raise ValueError(f"--window {len(window.ids)}: must be more than {first + 1}, what is read raw")
    step = max(1, -(-(last - first) // _POSITIONS_MAX))
    return torch.arange(first, last, step)


def divergence(raw: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(softmax(raw) || softmax(logits)) per row, in nats. raw: log probabilities [rows, vocabulary]."""
    return torch.cat([(a.exp() * (a - b.log_softmax(-1))).sum(-1)
                      for a, b in zip(raw.split(_ROWS), logits.float().split(_ROWS))]).clamp_min(0)


class _Replay:
    """Runs the model again from one of its layers on, with what the layers before it gave."""

    def __init__(self, model: Any, window: Window, positions: torch.Tensor):
        self._model, self._layers = model, decoder_layers(model)
        self._ids = torch.tensor([window.ids], device=model.device)
        self._positions = positions.to(model.device)
        self._outputs: list[Any] = []
        with self._forwards([self._record(layer.forward) for layer in self._layers]):
            self.raw = self._logits().log_softmax(-1)

    def _record(self, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._outputs.append(forward(*args, **kwargs))
            return self._outputs[-1]
        return run

    def _logits(self) -> torch.Tensor:
        """[positions, vocabulary]"""
        return self._model(input_ids=self._ids, use_cache=False, logits_to_keep=self._positions).logits[0].float()

    @contextmanager
    def _forwards(self, forwards: list[Any]) -> Iterator[None]:
        """The first layers run these instead of their own."""
        before = [layer.__dict__.get("forward") for layer in self._layers]
        try:
            for layer, forward in zip(self._layers, forwards):
                layer.forward = forward
            yield
        finally:
            for layer, forward, _ in zip(self._layers, before, forwards):
                if forward is None:
                    del layer.forward  # the class's again
                else:
                    layer.forward = forward

    def logits_from(self, layer: int) -> torch.Tensor:
        known = [lambda *args, _output=output, **kwargs: _output for output in self._outputs[:layer]]
        with self._forwards(known):
            return self._logits()


class Factors:
    """What probes need of an artifact."""

    def __init__(self, tensors: dict[str, np.ndarray], mode: str):
        def factor(pair: str, end: str) -> torch.Tensor:
            name = f"{mode}.{pair}.{end}"  # zack+hack's own, else ZACK's
            return torch.from_numpy(tensors.get(f"zack_hack.{name}", tensors[f"zack.{name}"]))

        self._parts = [(factor(pair, "left"), factor(pair, "right")) for pair in ("qk", "vw")]
        self._order = torch.from_numpy(tensors[f"zack_hack.{mode}.order"])
        self.energy = torch.from_numpy(tensors[f"zack_hack.{mode}.energy"])

    def rotation(self, place: int, side: int) -> Rotation:
        left, right = self._parts[side]
        return Rotation(left[place], right[place], self._order[place, :, side], normed=side == 1)


@torch.no_grad()
def divergences_of_values(model: Any, geometry: Geometry, bases: dict[str, Factors], windows: list[Window], *,
                          average_bits: float, sinks: int, lag_pages: int, quiet: bool) -> dict[str, float]:
    """Of each basis the mean divergence where V of every layer is coded at that many bits, and nothing else."""
    places = {layer: place for place, layer in enumerate(geometry.layers)}
    total = dict.fromkeys(bases, 0.0)
    done = 0
    with Progress("choosing V's basis", len(windows) * (1 + len(bases)), quiet) as progress:
        for window in windows:
            positions = counted_positions(window, sinks, lag_pages).to(model.device)
            ids = torch.tensor([window.ids], device=model.device)

            def logits() -> torch.Tensor:
                nonlocal done
                got = model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits[0].float()
                done += 1
                progress.update(done)
                return got

            raw = logits().log_softmax(-1)
            for basis, factors in bases.items():
                with visiting(_values_coded(factors, places, average_bits, sinks, lag_pages)):
                    total[basis] += float(divergence(raw, logits()).mean()) / len(windows)
    return total


def _values_coded(factors: Factors, places: dict[int, int], average_bits: float, sinks: int, lag_pages: int) -> Any:
    def visit(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        if layer not in places:
            return None
        widths, _ = head_widths(factors.energy[places[layer], :, 1], average_bits)
        k, v = k.float(), v.float()
        return attend(q, k, v, k, factors.rotation(places[layer], 1).code(v, widths, sinks), lag_pages)
    return visit


@torch.no_grad()
def measure_sensitivity(model: Any, geometry: Geometry, factors: Factors, windows: list[Window], *, sinks: int,
                        lag_pages: int, per_head: bool, quiet: bool) -> np.ndarray:
    """[layers, kv_heads, 2] in fp32. The heads of a layer have the same unless per_head."""
    heads: list[int | None] = list(range(geometry.kv_heads)) if per_head else [None]
    costs = np.zeros((len(geometry.layers), geometry.kv_heads, 2))
    depth = len(decoder_layers(model))
    work = [depth - layer for layer in geometry.layers]  # layers that a probe runs
    total = len(windows) * (depth + 2 * len(heads) * sum(work))
    done = 0.0
    with Progress("probing the model", total, quiet) as progress:
        for window in windows:
            replay = _Replay(model, window, counted_positions(window, sinks, lag_pages))
            done += depth
            progress.update(done)
            for place, layer in enumerate(geometry.layers):
                for side in (0, 1):
                    rotation = factors.rotation(place, side)
                    widths, lost = head_widths(factors.energy[place, :, side], PROBE_BITS)
                    for head in heads:
                        probed = _probe(layer, side, head, rotation, widths, sinks, lag_pages)
                        with visiting(probed):
                            cost = float(divergence(replay.raw, replay.logits_from(layer)).mean())
                        covered = slice(None) if head is None else head
                        energy = max(float(lost[covered].sum()), float(np.finfo(np.float32).tiny))
                        costs[place, covered, side] += cost / energy / len(windows)
                        done += work[place]
                        progress.update(done)
            del replay
    return costs.astype(np.float32)


def _probe(layer: int, side: int, head: int | None, rotation: Rotation, widths: torch.Tensor, sinks: int,
           lag_pages: int) -> Any:
    def visit(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        if index != layer:
            return None
        k, v = k.float(), v.float()
        of = v if side else k
        coded = rotation.code(of, widths, sinks)
        if head is not None:
            coded, only = of.clone(), coded
            coded[head] = only[head]
        return attend(q, k, v, *((k, coded) if side else (coded, v)), lag_pages)
    return visit
