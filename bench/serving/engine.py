"""One engine, a real AsyncLLM with its EngineCore, and what is asked of it: engine.py PLAN RESULT, started by serving_bench.py.

PLAN and RESULT are JSON files. RESULT is written after each phase, so that what was measured before an error, or before this
process was ended, is there.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
import time
import traceback
from typing import AsyncContextManager, Callable

import counters
import workload
from counters import daemon_metrics
from scale import BLOCK_TOKENS, Scale, token_bytes
from summary import TIMED
from turns import Turn

_STILL_S = 1.0  # nothing stored for so long: all is stored
_SETTLE_S = 60.0
_OTHERS_SETTLE_S = 2.0
_FORGET_S = 60.0


class Engine:
    """workload.Asked of vLLM."""

    def __init__(self, plan: dict) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        scale = Scale(**plan["scale"])
        arguments = {
            "model": plan["model"],
            "load_format": "dummy" if plan["dummy"] else "auto",
            "skip_tokenizer_init": True,
            "max_model_len": scale.model_len,
            "block_size": BLOCK_TOKENS,
            "enforce_eager": True,
            "num_gpu_blocks_override": scale.engine_cache // BLOCK_TOKENS,
            "max_num_batched_tokens": scale.batch,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "kv_transfer_config": plan["transfer"],
            "worker_extension_cls": "kept_blocks.KeptBlocks" if plan["kind"] == "compare" else "",
            "seed": 1,
        }
        if plan["gpu"]:
            arguments["gpu_memory_utilization"] = plan["gpu_memory"]
        if plan["gpu"] and plan["turns"]:  # what is free changes while several start
            arguments["kv_cache_memory_bytes"] = scale.engine_cache * plan["token_bytes"]
        self._metrics = plan["metrics"]
        self._has_connector = plan["transfer"] is not None
        self._count = 0
        self._turn = Turn(plan["turns"])
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def ask(self, prompt: list[int], output: int) -> workload.Answer:
        from vllm import SamplingParams

        self._count += 1
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, detokenize=False)
        began, first, last = time.monotonic(), None, None
        async for last in self._engine.generate({"prompt_token_ids": prompt}, sampling, str(self._count)):
            first = first or time.monotonic() - began
        return workload.Answer(first, time.monotonic() - began, last.num_cached_tokens or 0, len(last.outputs[0].token_ids))

    def turn(self) -> AsyncContextManager[None]:
        return self._turn.taken()

    async def forget(self) -> None:
        end = time.monotonic() + _FORGET_S
        while not await self._engine.reset_prefix_cache():  # refused while blocks are in use
            if time.monotonic() > end:
                raise TimeoutError(f"vLLM refuses to reset its prefix cache for {_FORGET_S} s")
            await asyncio.sleep(0.1)

    async def settle(self) -> None:
        if not self._metrics:
            await asyncio.sleep(_OTHERS_SETTLE_S if self._has_connector else 0)
            return
        end, still, before = time.monotonic() + _SETTLE_S, time.monotonic(), None
        while time.monotonic() < min(end, still + _STILL_S):
            await asyncio.sleep(0.1)
            found = daemon_metrics(self._metrics)
            now = found.get("kvmanager_published_blocks_total", 0)
            if now != before or found.get("kvmanager_disk_unwritten_blocks", 0):
                before, still = now, time.monotonic()

    async def disk_blocks(self) -> float:
        return daemon_metrics(self._metrics).get("kvmanager_disk_read_blocks_total", 0) if self._metrics else 0

    async def call(self, method: str, *arguments) -> object:
        (answer,) = await self._engine.collective_rpc(method, args=arguments)
        return answer

    def counted(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        return counters.read(REGISTRY)

    def close(self) -> None:
        self._turn.close()
        self._engine.shutdown()


async def run(plan: dict, result: dict, write: Callable[[], None]) -> None:
    def say(line: str) -> None:
        print(f"bench: {line}", flush=True)
        write()

    record = workload.Record(say)
    result.update(requests=record.requests, batches=record.batches, counted=record.counted)
    scale, began = Scale(**plan["scale"]), time.monotonic()
    config = json.loads((pathlib.Path(plan["model"]) / "config.json").read_text(encoding="utf-8"))
    engine = Engine(plan)
    try:
        result["start_s"] = time.monotonic() - began
        record.say(f"started in {result['start_s']:.1f} s")
        if plan["kind"] in TIMED:
            await getattr(workload, plan["kind"])(engine, record, scale, config["vocab_size"])
        elif plan["kind"] in ("capacity", "disk"):
            raw_tokens, work = scale.capacity_pool_bytes // token_bytes(config), getattr(workload, plan["kind"])
            await work(engine, record, scale, config["vocab_size"], plan["compression_max"], raw_tokens)
        else:
            result["compared"] = await workload.compare(engine, record, scale, config["vocab_size"])
        if plan["metrics"]:
            result["daemon"] = {name: value for name, value in daemon_metrics(plan["metrics"]).items()
                                if name.startswith("kvmanager_") and value}
    finally:
        engine.close()


def main() -> int:
    plan, file = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")), pathlib.Path(sys.argv[2])
    result: dict = {}

    def write() -> None:
        whole = file.with_suffix(".new")
        whole.write_text(json.dumps(result), encoding="utf-8")
        whole.replace(file)

    try:
        asyncio.run(run(plan, result, write))
    except BaseException as error:  # also SystemExit of an engine that does not start
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    write()
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
