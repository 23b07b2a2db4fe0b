"""KeptBlocks: an extension of vLLM's worker that keeps copies of blocks of the paged cache, and compares blocks with them.

For `worker_extension_cls`; its methods are called by `collective_rpc`, between the engine's steps. Which blocks a request has is
read from what the scheduler tells the model runner, which is the same for all of vLLM's runners. A request that has ended
leaves its blocks as they are until others are given them, so all calls come when nothing runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

_OVERWRITTEN = 1.5  # finite: padding of other requests' attention may read it


class KeptBlocks:
    def watch_blocks(self) -> None:
        """From now on the newest request's block ids are known."""
        runner = self.model_runner
        execute, self._kept_ids, self._kept = runner.execute_model, [], {}

        def watched(scheduled, *arguments, **named):
            for new in scheduled.scheduled_new_reqs:
                self._kept_newest, self._kept_ids = new.req_id, list(_only_group(new.block_ids))
            running = scheduled.scheduled_cached_reqs
            for request, ids in zip(running.req_ids, running.new_block_ids):
                if ids is not None and request == self._kept_newest:
                    self._kept_ids += _only_group(ids)
            return execute(scheduled, *arguments, **named)

        runner.execute_model = watched

    def keep_blocks(self, name: int, count: int) -> None:
        """Copies the first `count` blocks of the newest request."""
        ids = self._kept_ids[:count]
        self._kept[name] = (ids, [(k.cpu(), v.cpu()) for k, v in self._kept_rows(ids)])

    @torch.inference_mode()  # the engine's caches were made in it
    def overwrite_blocks(self) -> None:
        for cache in self.model_runner.kv_caches:
            cache.fill_(_OVERWRITTEN)
        self._kept_wait()

    def compare_blocks(self, name: int, count: int) -> dict:
        """The first `count` blocks of the newest request with those that were kept as `name`, in all layers.

        equal: blocks of which no bit differs. k_error, v_error: norm of the difference over the norm of what was kept, over all
        `count` blocks."""
        return self._kept_compare(self._kept_ids[:count], self._kept[name][1])

    def compare_kept_blocks(self, name: int, count: int) -> dict:
        """The same, with what now lies where the kept blocks lay."""
        ids, rows = self._kept[name]
        return self._kept_compare(ids[:count], rows)

    def _kept_compare(self, ids: list[int], kept: list[tuple[torch.Tensor, torch.Tensor]]) -> dict:
        equal = torch.ones(len(ids), dtype=torch.bool, device=self.device)
        errors = []
        for side in range(2):
            difference, whole = 0.0, 0.0
            for layer, now in enumerate(self._kept_rows(ids)):
                then = kept[layer][side][: len(ids)].to(self.device)
                equal &= (now[side].view(torch.int16) == then.view(torch.int16)).all(1)
                difference += (now[side].double() - then.double()).square().sum().item()
                whole += then.double().square().sum().item()
            errors.append(math.sqrt(difference / whole) if whole else 0.0)
        return {"equal": int(equal.sum()), "compared": len(ids), "k_error": errors[0], "v_error": errors[1]}

    def _kept_rows(self, ids: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of each layer's blocks: K and V, each [blocks, values in the order of the cache]."""
        self._kept_wait()
        blocks = self.model_runner.vllm_config.cache_config.num_gpu_blocks
        for cache in self.model_runner.kv_caches:
            yield _rows(cache, blocks, ids)

    def _kept_wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _only_group(ids: tuple[list[int], ...]) -> list[int]:
    if len(ids) != 1:
        raise ValueError(f"the model has {len(ids)} groups of cache layers, must have 1")
    return ids[0]


def _rows(cache: torch.Tensor, blocks: int, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a layer's cache in one of the layouts of kvmanager/paged.py. A kernel's blocks may be smaller than the scheduler's:
    several of them, one after the other, are one."""
    shape = tuple(cache.shape)
    if len(shape) == 5 and shape[0] == 2:
        cache = cache.transpose(0, 1)
    elif len(shape) == 4:
        # [B][H][N][2 D]: a GPU has K, then V, of each token; a CPU all of K, then all of V, of a head's tokens.
        if not cache.is_cuda:
            cache = cache.flatten(2)
        cache = cache.unflatten(-1, (2, -1)).movedim(-2, 1)
    if cache.dim() < 4 or cache.shape[1] != 2 or cache.shape[0] % blocks:
        raise ValueError(f"a layer's cache is {shape}, must be [2][blocks]..., [blocks][2]... or "
                         f"[blocks][heads][tokens][2 * values], with a multiple of {blocks} blocks")
    parts = cache.shape[0] // blocks
    index = torch.tensor([block * parts + part for block in ids for part in range(parts)], dtype=torch.long, device=cache.device)
    rows = cache.index_select(0, index)
    return tuple(rows[:, side].reshape(len(ids), -1) for side in range(2))
