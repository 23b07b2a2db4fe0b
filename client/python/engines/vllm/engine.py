"""A vLLM engine without a model: vLLM's own scheduler, requests, configuration and model runner's connector, around
keys and values that are a function of token, position and layer. So every block that a step reads can be checked."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

LAYERS, HEADS, HEAD_DIM, VOCABULARY = 4, 2, 64, 1000
DEADLINE_S = 600

init_none_hash(sha256)
torch.set_num_threads(1)
_model_folder = tempfile.TemporaryDirectory(prefix="kvvllm")
with open(os.path.join(_model_folder.name, "config.json"), "w", encoding="utf-8") as _file:
    json.dump(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 2 * HEADS * HEAD_DIM,
            "intermediate_size": 256,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2 * HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 4096,
        },
        _file,
    )
_model_config: ModelConfig | None = None


def model_config() -> ModelConfig:
    """Made once: vLLM inspects the model's class in a process of its own."""
    global _model_config
    if _model_config is None:
        folder = _model_folder.name
        _model_config = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=2048
        )
    return _model_config


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=tokens)


def rows(tokens: list[int], positions: list[int], layer: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tokens at positions: [tokens][HEADS][HEAD_DIM] float16."""
    seed = torch.tensor(tokens)[:, None, None] * 7.13 + torch.tensor(positions)[:, None, None] * 0.37
    seed = seed + layer * 3.1 + rank * 1.7 + torch.arange(HEADS)[None, :, None] * 0.9
    phase = seed + torch.arange(HEAD_DIM)[None, None, :] * (1 + torch.arange(HEADS)[None, :, None]) * 0.11
    return torch.sin(phase).to(torch.float16), torch.cos(phase).to(torch.float16)


class Worker:
    """One rank: the paged cache and vLLM's model runner's side of the connector."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.rank = rank
        self.engine = engine
        self.connector = KVConnectorFactory.create_connector(engine.config, KVConnectorRole.WORKER, engine.caches)
        shape = (engine.blocks, HEADS, engine.block_size, 2 * HEAD_DIM)
        self.layers = {name: torch.full(shape, float("nan"), dtype=torch.float16) for name in engine.layer_names}
        if not engine.heads_first:  # the same shape, tokens outside of heads
            self.layers = {name: each.transpose(1, 2).contiguous().transpose(1, 2) for name, each in self.layers.items()}
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.runner = ActiveKVConnector(engine.config, self.layers)

    @torch.inference_mode()
    def step(self, output):
        """What a model runner does in a step, in its mode; returns the connector's output."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        with set_forward_context(None, self.engine.config):
            self.runner.pre_forward(output)
            for layer, name in enumerate(self.engine.layer_names):
                self.connector.wait_for_layer_load(name)
                for request, tokens in output.num_scheduled_tokens.items():
                    self._forward(layer, name, request, tokens)
                self.connector.save_kv_layer(name, self.layers[name], None)
            self.runner.finish_forward()
            return self.runner.post_forward(output.finished_req_ids)

    def _forward(self, layer: int, name: str, request_id: str, count: int) -> None:
        engine = self.engine
        request = engine.scheduler.requests[request_id]
        first = engine.computed[request_id]
        group = engine.group_of[name]
        table = engine.tables[request_id][group]
        cache, size = self.layers[name], engine.block_size
        tokens = list(request.all_token_ids)
        k, v = rows(tokens[first : first + count], list(range(first, first + count)), layer, self.rank)
        new = range(first, first + count)
        blocks = torch.tensor([table[each // size] for each in new])
        cache[blocks, :, torch.tensor([each % size for each in new])] = torch.cat([k, v], dim=-1)
        # What attention reads must be what this request's tokens make.
        window = engine.windows[group]
        begin = 0 if window is None else max(0, first - window + 1)
        positions = list(range(begin, first))
        k, v = rows([tokens[each] for each in positions], positions, layer, self.rank)
        blocks = torch.tensor([table[each // size] for each in positions], dtype=torch.long)
        places = torch.tensor([each % size for each in positions], dtype=torch.long)
        found = cache[blocks, :, places].float()
        for expected, got in ((k, found[..., :HEAD_DIM]), (v, found[..., HEAD_DIM:])):
            off = (expected.float() - got).abs()
            if not (len(positions) == 0 or bool((off <= engine.tolerance).all())):
                raise AssertionError(f"{request_id}: layer {layer} reads K or V that differ by {off.max()}")


class Engine:
    """Scheduler and workers. A context manager.

    windows: of each cache group, None: full attention; layers are dealt out in turn."""

    def __init__(
        self,
        address: str,
        blocks: int = 128,
        block_size: int = 16,
        ranks: int = 1,
        windows: tuple[int | None, ...] = (None,),
        role: str = "kv_both",
        tolerance: float = 0.0,
        heads_first: bool = True,
        chunk: int = 256,
        **extra,
    ) -> None:
        self.blocks, self.block_size, self.windows, self.tolerance = blocks, block_size, windows, tolerance
        self.heads_first = heads_first
        self.layer_names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
        self.group_of = {name: layer % len(windows) for layer, name in enumerate(self.layer_names)}
        shape = {"block_size": block_size, "num_kv_heads": HEADS, "head_size": HEAD_DIM, "dtype": torch.float16}
        groups = [
            KVCacheGroupSpec(
                [name for name in self.layer_names if self.group_of[name] == group],
                FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(sliding_window=window, **shape),
            )
            for group, window in enumerate(windows)
        ]
        self.caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.config = VllmConfig(
            model_config=model_config(),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=chunk,
                max_model_len=2048,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvManagerConnector",
                kv_connector_module_path="kvmanager.vllm",
                kv_role=role,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"address": address, "plan": "load", **extra},
            ),
        )
        self.config.cache_config.num_gpu_blocks = blocks
        self.config.scheduler_config.disable_hybrid_kv_cache_manager = False  # as on a GPU
        self.config.parallel_config.tensor_parallel_size = ranks
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.caches,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.hasher = get_request_block_hasher(block_size, sha256)
        self.workers = [self._worker(rank) for rank in range(ranks)]
        self.aggregator = KVOutputAggregator(ranks)
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.computed: dict[str, int] = {}
        self.done: dict[str, dict] = {}  # kv_transfer_params of finished requests
        self.preemptions = 0
        self.stats: list[dict] = []  # of the connector, as a logger gets them

    def _worker(self, rank: int) -> Worker:
        from kvmanager.vllm import connector

        as_it_was, connector._rank = connector._rank, lambda: rank
        try:
            return Worker(self, rank)
        finally:
            connector._rank = as_it_was

    # What a user of the engine does.

    def add(self, name: str, prompt: list[int], output: int = 4, salt: str | None = None, params: dict | None = None):
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        sampling.extra_args = {"kv_transfer_params": params} if params else None
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def run(self, *requests: Request) -> list[list[int]]:
        """Steps until these are finished, and the workers have nothing to do; returns their output tokens."""
        end = time.monotonic() + DEADLINE_S
        while not all(request.is_finished() for request in requests):
            if time.monotonic() > end:
                raise AssertionError("requests do not finish")
            if not self.step():
                self.settle()
        self.settle()
        while self.scheduler.finished_req_ids or self.connector.has_pending_push_work():
            if time.monotonic() > end:
                raise AssertionError("blocks of finished requests are not given back")
            self.step()
            self.settle()
        return [list(request.output_token_ids) for request in requests]

    @property
    def loaded_tokens(self) -> int:
        """Of all requests so far, by one rank."""
        return sum(each.get("loaded_tokens", 0) for each in self.stats) // len(self.workers)

    def settle(self) -> None:
        """Until what the halves began is done."""
        for connector in self.connectors():
            half = connector._scheduler or connector._worker
            if half.link is not None and not half.link.settle(DEADLINE_S):
                raise AssertionError("the connector does not come to rest")

    def step(self) -> bool:
        """One step; whether it ran any token."""
        output = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self.computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        self.computed.update(zip(cached.req_ids, cached.num_computed_tokens))
        self.preemptions += len(output.preempted_req_ids or ())
        for name in output.num_scheduled_tokens:
            self.tables[name] = self.scheduler.kv_cache_manager.get_block_ids(name)
        outputs = [self._output(output, worker.step(output)) for worker in self.workers]
        said = self.scheduler.update_from_output(output, self.aggregator.aggregate(outputs))
        for client in said.values():
            if client.scheduler_stats is not None and client.scheduler_stats.kv_connector_stats:
                self.stats.append(client.scheduler_stats.kv_connector_stats)
            for each in client.outputs:
                if each.finish_reason is not None:
                    self.done[each.request_id] = each.kv_transfer_params
        return bool(output.num_scheduled_tokens)

    def _output(self, output, connector_output) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            tokens = self.scheduler.requests[name].all_token_ids
            ends = self.computed[name] + output.num_scheduled_tokens[name] == len(tokens)
            sampled.append([(sum(tokens) * 31 + len(tokens)) % VOCABULARY] if ends else [])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    def connectors(self) -> list:
        return [self.connector, *(worker.connector for worker in self.workers)]

    def wait(self, attached: bool) -> bool:
        """Until every half is (not) attached."""
        return all(
            (connector._scheduler or connector._worker).link.wait(attached, DEADLINE_S) for connector in self.connectors()
        )

    def __enter__(self) -> Engine:
        if not self.wait(True):
            raise AssertionError("the connector does not attach")
        return self

    def __exit__(self, *_: object) -> None:
        for connector in self.connectors():
            connector.shutdown()

