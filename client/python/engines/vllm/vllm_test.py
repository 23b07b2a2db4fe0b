"""The connector inside vLLM's own scheduler and model runner's hooks, against a real daemon."""

from __future__ import annotations

import signal
import threading
import time
import unittest
import unittest.mock

import kvmanager
import torch
from engine import DEADLINE_S, Engine, prompt
from engine_testing import DaemonTestCase, compare_signatures, published
from kvmanager.vllm import KvManagerConnector, scheduler
from kvmanager.vllm.facts import Settings, tenant_of
from kvmanager.vllm.worker import WorkerHalf
from kvmanager_testing import Daemon
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging


class InterfaceTest(unittest.TestCase):
    def test_every_abstract_method_is_there(self) -> None:
        self.assertEqual(set(), set(KvManagerConnector.__abstractmethods__))
        self.assertTrue(issubclass(KvManagerConnector, SupportsHMA))

    def test_methods_have_the_signatures_of_their_bases(self) -> None:
        self.assertGreaterEqual(compare_signatures(self, KvManagerConnector, KVConnectorBase_V1, SupportsHMA), 20)

    def test_unknown_settings_are_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "addres"):
            Engine("unix:/nowhere", addres="x")

    def test_settings_of_another_type_are_refused(self) -> None:
        for wrong in ({"lookup_ms": "1000"}, {"deadline_ms": 0}, {"prefill_wait_ms": 10.5}, {"staging_mib": 4096},
                      {"codec": None}, {"store_output": "no"}, {"lag_pages": True}, {"peers": "host:1"},
                      {"plan": "least"}, {"plan": None}, {"map_gib": -2}, {"map_gib": 2049},
                      {"map_gib": True}, {"peers": ["host"]}, {"peers": ["host:1,host:2"]}, {"peers": [7]}):
            with self.subTest(wrong), self.assertRaisesRegex(ValueError, f"{next(iter(wrong))} is .* must be"):
                Engine("unix:/nowhere", **wrong)


class LifeTest(DaemonTestCase):
    def engine(self, **options) -> Engine:
        return Engine(self.daemon.listen, **options)

    def test_the_factory_makes_both_halves(self) -> None:
        with self.engine() as engine:
            self.assertIs(KVConnectorFactory.get_connector_class(engine.config.kv_transfer_config), KvManagerConnector)
            self.assertIsInstance(engine.connector, KvManagerConnector)
            self.assertIsInstance(engine.workers[0].connector, KvManagerConnector)
            self.assertTrue(engine.connector.attached)

    def test_miss_store_hit(self) -> None:
        tokens = prompt(1, 700)
        with self.engine() as first:
            (expected,) = first.run(first.add("a", tokens, output=20))
            self.assertEqual(0, first.loaded_tokens)
            self.assertEqual(0, first.scheduler.kv_cache_manager.usage)
        # 700 prompt tokens and 19 of the output have K and V.
        self.assertEqual(719 // 16, self.published())
        with self.engine() as second:
            (found,) = second.run(second.add("b", tokens, output=20))
            self.assertEqual(expected, found)
            self.assertEqual(699 // 16 * 16, second.loaded_tokens)
        self.assertEqual(719 // 16, self.published())

    def test_a_scheduler_in_the_workers_process_hears_of_loads_itself(self) -> None:
        tokens, said = prompt(1, 320), []
        results = WorkerHalf.results

        def listening(half: WorkerHalf) -> tuple:
            sent, received, failed = results(half)
            said.extend(received)
            return sent, received, failed

        for ranks in (1, 2):
            with self.subTest(ranks), unittest.mock.patch.object(WorkerHalf, "results", listening):
                with self.engine(ranks=ranks) as first:
                    (expected,) = first.run(first.add("a", tokens))
                said.clear()
                with self.engine(ranks=ranks) as second:
                    for name in ("b", "c", "d"):
                        second.scheduler.reset_prefix_cache()
                        self.assertEqual([expected], second.run(second.add(name, tokens)))
                    self.assertEqual(3 * 304, second.loaded_tokens)
                    self.assertEqual({}, second.connector._scheduler._load_times)
                    self.assertFalse(any(worker.connector._worker.load_ends.pending for worker in second.workers))
                if ranks == 1:  # the first may end before it asks
                    self.assertNotIn("c", said)
                    self.assertNotIn("d", said)
                else:
                    self.assertEqual(["b", "b", "c", "c", "d", "d"], said)

    def test_partial_hit_and_what_follows_is_stored(self) -> None:
        tokens = prompt(2, 320)
        with self.engine() as first:
            first.run(first.add("a", tokens, output=1))
        longer = tokens[:200] + prompt(3, 200)
        with self.engine() as second:
            second.run(second.add("b", longer, output=1))
            self.assertEqual(192, second.loaded_tokens)
        with self.engine() as third:
            third.run(third.add("c", longer, output=1))
            self.assertEqual(399 // 16 * 16, third.loaded_tokens)

    def test_a_local_prefix_is_not_loaded_again(self) -> None:
        tokens = prompt(4, 320)
        with self.engine() as first:
            first.run(first.add("a", tokens, output=1))
        with self.engine() as second:
            second.run(second.add("b", tokens[:160], output=1))
            loaded = second.loaded_tokens
            second.run(second.add("c", tokens, output=1))
            self.assertEqual(144, loaded)
            self.assertEqual(144 + 304 - 160, second.loaded_tokens)

    def test_salts_are_tenants(self) -> None:
        tokens = prompt(5, 160)
        with self.engine() as first:
            first.run(first.add("a", tokens, output=1, salt="one"))
        with self.engine() as second:
            second.run(second.add("b", tokens, output=1, salt="two"), second.add("c", tokens, output=1))
            self.assertEqual(0, second.loaded_tokens)
            second.run(second.add("d", prompt(6, 16) + tokens, output=1, salt="one"))
            self.assertEqual(0, second.loaded_tokens)
        with self.engine() as third:
            third.run(third.add("e", tokens, output=1, salt="one"))
            self.assertEqual(144, third.loaded_tokens)
        with kvmanager.connect(self.daemon.listen) as client:
            tenants = {cache.options.tenant for cache in client.caches()}
        self.assertFalse(any("one" in tenant for tenant in tenants))
        self.assertGreaterEqual(len(tenants), 3)

    def test_after_a_reset_nothing_from_before_is_found(self) -> None:
        tokens = prompt(7, 160)
        with self.engine() as engine:
            for salt in (None, "one"):
                engine.run(engine.add(f"a{salt}", tokens, output=1, salt=salt))
            self.assertTrue(engine.scheduler.reset_prefix_cache(reset_connector=True))
            requests = [engine.add(f"b{salt}", tokens, output=1, salt=salt) for salt in (None, "one")]
            engine.run(*requests)
            self.assertEqual(0, engine.loaded_tokens)
            engine.scheduler.reset_prefix_cache()
            engine.run(*[engine.add(f"c{salt}", tokens, output=1, salt=salt) for salt in (None, "one")])
            self.assertEqual(2 * 144, engine.loaded_tokens)
        with self.engine() as other:  # which knows nothing of these weights
            other.run(other.add("d", tokens, output=1))
            self.assertEqual(0, other.loaded_tokens)

    def test_a_reset_in_the_middle_of_a_request(self) -> None:
        tokens = prompt(8, 320)
        with self.engine() as engine:
            (expected,) = engine.run(engine.add("a", tokens, output=40))
            engine.scheduler.reset_prefix_cache()
            request = engine.add("b", tokens + [1], output=40)
            while request.num_output_tokens < 20:
                if not engine.step():
                    engine.settle()
            loaded = engine.loaded_tokens
            self.assertGreater(loaded, 0)
            engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            engine.run(request)
            self.assertEqual(40, request.num_output_tokens)
            (again,) = engine.run(engine.add("c", tokens, output=40))
            self.assertEqual((expected, loaded), (again, engine.loaded_tokens))

    def test_preempted_requests_go_on(self) -> None:
        prompts = [prompt(10 + i, 100) for i in range(3)]
        with self.engine() as roomy:
            expected = roomy.run(*[roomy.add(f"r{i}", each, output=30) for i, each in enumerate(prompts)])
        with kvmanager.connect(self.daemon.listen) as client:
            client.purge()
        with self.engine(blocks=24) as tight:
            found = tight.run(*[tight.add(f"t{i}", each, output=30) for i, each in enumerate(prompts)])
            self.assertGreater(tight.preemptions, 0)
            self.assertEqual(expected, found)

    def test_lookups_are_waited_for_a_moment_and_no_longer(self) -> None:
        tokens = prompt(22, 320)
        with self.engine() as first:
            first.run(first.add("a", tokens))
        wait = unittest.mock.patch.object(scheduler, "_LOOKUP_WAIT_S", DEADLINE_S)
        with Daemon() as daemon, Engine(daemon.listen) as frozen, self.engine() as second:
            with wait:
                self.assertEqual((304, True), second.connector.get_num_new_matched_tokens(second.add("b", tokens), 0))
            daemon.process.send_signal(signal.SIGSTOP)
            try:
                request, began = frozen.add("c", tokens), time.monotonic()
                self.assertEqual((None, False), frozen.connector.get_num_new_matched_tokens(request, 0))
                self.assertLess(time.monotonic() - began, 0.5)  # half of lookup_ms
                with wait:
                    threading.Timer(0.1, daemon.process.send_signal, [signal.SIGCONT]).start()
                    self.assertEqual((0, False), frozen.connector.get_num_new_matched_tokens(request, 0))
            finally:
                daemon.process.send_signal(signal.SIGCONT)

    def test_a_load_that_fails_is_recomputed(self) -> None:
        tokens = prompt(20, 320)
        with self.engine() as first:
            (expected,) = first.run(first.add("a", tokens))
        with self.engine() as second, kvmanager.connect(self.daemon.listen) as client:
            request = second.add("b", tokens)
            second.settle()  # the lookup hits
            client.purge()
            self.assertEqual([expected], second.run(request))
            self.assertEqual(1, sum(each.get("loads_failed", 0) for each in second.stats))
        self.assertEqual(323 // 16, self.published())

    def test_a_hit_that_shrank_is_loaded_in_part(self) -> None:
        tokens = prompt(21, 320)
        with self.engine() as first:
            (expected,) = first.run(first.add("a", tokens))
        with self.engine() as second, kvmanager.connect(self.daemon.listen) as client:
            worker = second.workers[0].connector._worker
            request = second.add("b", tokens)
            second.settle()
            # A holder of the first half keeps it from being purged.
            cache = client.open_cache(**worker.facts.describe(("", 0)))
            half = cache.create_sequence(cache.external_names([bytes(each) for each in request.block_hashes[:10]]))
            self.assertEqual(10, half.hit_blocks)
            client.purge()
            self.assertEqual([expected], second.run(request))

    def priorities(self, engine: Engine, request) -> list[int]:
        with kvmanager.connect(self.daemon.listen) as client:
            cache = client.open_cache(**engine.workers[0].connector._worker.facts.describe(("", 0)))
            names = cache.external_names([bytes(each) for each in request.block_hashes])
            return [block["priority"] for block in client.explain(names, cache.description.id)["blocks"]]

    def test_a_request_says_how_long_its_blocks_are_kept(self) -> None:
        shared, params = prompt(24, 160), {"kvmanager_retention_priority": 80, "kvmanager_retention_ttl_s": 3600}
        with self.engine() as engine:
            first = engine.add("a", shared, output=1, params=params)
            engine.run(first)
            self.assertEqual([80] * 10, self.priorities(engine, first))
            # One that will not return, behind what it shares.
            second = engine.add("b", shared + prompt(25, 80), output=1, params={"kvmanager_retention_priority": 0})
            engine.run(second)
            self.assertEqual([80] * 10 + [0] * 5, self.priorities(engine, second))
        # One that stores nothing, and loads.
        with self.engine() as engine:
            third = engine.add("c", shared + [1], output=1, params={"kvmanager_retention_priority": 90})
            engine.run(third)
            self.assertEqual(160, engine.loaded_tokens)
            self.assertEqual([90] * 10, self.priorities(engine, third))
            with self.assertLogs("vllm.kvmanager", "WARNING") as log:
                for number, wrong in enumerate(("x", 101, None)):
                    params = {"kvmanager_retention_priority": wrong, "kvmanager_retention_ttl_s": 1}
                    (output,) = engine.run(engine.add(f"d{number}", shared, params=params))
                    self.assertEqual(4, len(output))
            self.assertEqual(1, len(log.output), log.output)
            self.assertIn("kvmanager_retention_priority is 'x', must be an integer of 0..100", log.output[0])

    def test_many_at_once(self) -> None:
        prompts = [prompt(30, 100) + prompt(31 + i, 150) for i in range(8)]
        with self.engine(blocks=256) as first:
            expected = first.run(*[first.add(f"a{i}", each) for i, each in enumerate(prompts)])
        with self.engine(blocks=256, heads_first=False) as second:
            found = second.run(*[second.add(f"b{i}", each) for i, each in enumerate(prompts)])
            self.assertEqual(expected, found)
            # At least what is each one's own: the prefix that they share may be there by the time that others begin.
            self.assertGreaterEqual(second.loaded_tokens, 8 * (240 - 96))

    def test_layer_by_layer(self) -> None:
        tokens = prompt(40, 320)
        with self.engine(layerwise_saves=True) as first:
            self.assertTrue(KvManagerConnector.requires_piecewise_for_cudagraph({"layerwise_saves": True}))
            first.run(first.add("a", tokens))
        with self.engine() as second:
            second.run(second.add("b", tokens))
            self.assertEqual(304, second.loaded_tokens)

    def test_small_staging_takes_several_turns_and_drops_nothing(self) -> None:
        tokens = prompt(41, 1500)
        with self.engine(staging_mib=1, chunk=2048) as first:
            (expected,) = first.run(first.add("a", tokens))
            data = first.workers[0].connector._worker
            self.assertLess(data.extent_blocks * 16, 1500)
        self.assertEqual(1500 // 16, self.published())
        with self.engine(staging_mib=1) as second:
            self.assertEqual([expected], second.run(second.add("b", tokens)))
            self.assertEqual(1499 // 16 * 16, second.loaded_tokens)

    def test_encoded_pages_come_back_within_the_codec_s_error(self) -> None:
        tokens = prompt(42, 640)
        options = {"codec": "hack:k_bits=3,v_bits=2", "block_size": 64, "tolerance": 0.8}
        with self.engine(**options) as first:
            first.run(first.add("a", tokens))
        with self.engine(**options) as second:
            second.run(second.add("b", tokens))
            self.assertEqual(576, second.loaded_tokens)
        with self.assertRaisesRegex(AssertionError, "differ"), self.engine(**{**options, "tolerance": 0.0}) as third:
            third.run(third.add("c", tokens))

    def test_sliding_windows_beside_full_attention(self) -> None:
        tokens = prompt(43, 640)
        with self.engine(windows=(None, 64), blocks=256) as first:
            (expected,) = first.run(first.add("a", tokens, output=20))
        with self.engine(windows=(None, 64), blocks=256) as second, kvmanager.connect(self.daemon.listen) as client:
            self.assertEqual([expected], second.run(second.add("b", tokens, output=20)))
            self.assertEqual(639 // 16 * 16, second.loaded_tokens)
            second.scheduler.reset_prefix_cache()
            request = second.add("c", tokens, output=20)
            second.settle()
            client.purge()
            self.assertEqual([expected], second.run(request))

    def test_a_copy_that_fails_costs_a_store(self) -> None:
        tokens = prompt(47, 320)
        with self.engine() as first:
            copies = first.workers[0].connector._worker.copies
            as_it_was = copies.save

            def save(layer, *arguments):
                if layer == 2:
                    raise torch.OutOfMemoryError("no room")
                return as_it_was(layer, *arguments)

            copies.save = save
            (expected,) = first.run(first.add("a", tokens))
            self.assertEqual(0, self.published())
            copies.save = as_it_was
            self.assertEqual([expected], first.run(first.add("b", tokens)))
            self.assertEqual(323 // 16, self.published())

    def test_ranks_have_caches_of_their_own(self) -> None:
        tokens = prompt(44, 320)
        with self.engine(ranks=2) as first:
            (expected,) = first.run(first.add("a", tokens))
        self.assertEqual(2 * (323 // 16), self.published())
        with self.engine(ranks=2) as second, kvmanager.connect(self.daemon.listen) as client:
            self.assertEqual([expected], second.run(second.add("b", tokens)))
            self.assertEqual(304, second.loaded_tokens)
            # What one rank lacks is no hit.
            second.scheduler.reset_prefix_cache()
            cache = client.open_cache(**second.workers[0].connector._facts.describe(("", 1)))
            client.purge(cache.description.id)
            before = second.loaded_tokens
            self.assertEqual([expected], second.run(second.add("c", tokens)))
            self.assertEqual(before, second.loaded_tokens)

    def test_counts_reach_prometheus_and_the_log(self) -> None:
        tokens = prompt(45, 320)
        lines: list[str] = []
        registry = CollectorRegistry()

        def of(kind):
            return lambda name, documentation, labelnames, **more: kind(
                name, documentation, labelnames, registry=registry, **more
            )

        with self.engine() as engine:
            config = engine.config
            kinds = {Gauge: of(Gauge), Counter: of(Counter), Histogram: of(Histogram)}
            metrics = KvManagerConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
            log = KVConnectorLogging(config.kv_transfer_config)
            for name in ("a", "b"):
                engine.scheduler.reset_prefix_cache()
                engine.run(engine.add(name, tokens))
                for each in engine.stats:
                    metrics.observe(each)
                    log.observe(each)
                engine.stats.clear()
            log.log(lambda form, text: lines.append(text))
        text = generate_latest(registry).decode()
        self.assertIn('vllm:kvmanager_stored_tokens_total{engine="0"} 320.0', text)
        self.assertIn('vllm:kvmanager_loaded_tokens_total{engine="0"} 304.0', text)
        self.assertIn('vllm:kvmanager_load_seconds_count{engine="0"} 1.0', text)
        self.assertIn("stored_tokens=320", lines[0])

    def test_a_model_that_cannot_be_kept_is_served_without(self) -> None:
        engine = self.engine(block_size=8)
        self.assertIsNone(engine.connector._scheduler)
        self.assertIn("block_size", engine.connector._facts.off)
        request = engine.add("a", prompt(46, 64))
        while not request.is_finished():
            self.assertTrue(engine.step())


class DisaggregatedTest(unittest.TestCase):
    def test_prefill_here_decode_there_through_one_daemon(self) -> None:
        tokens = prompt(50, 500)
        with Daemon(host_pool="128MiB") as daemon:
            with Engine(daemon.listen, role="kv_producer") as prefill, Engine(daemon.listen, role="kv_consumer") as decode:
                self._hand_over(prefill, decode, tokens, {"do_remote_decode": True})

    def test_prefill_here_decode_on_another_daemon(self) -> None:
        tokens = prompt(51, 500)
        with Daemon(host_pool="128MiB") as here, Daemon(host_pool="128MiB") as there:
            with Engine(here.listen, role="kv_producer") as prefill, Engine(there.listen, role="kv_consumer") as decode:
                self._hand_over(prefill, decode, tokens, {"do_remote_decode": True, "kvmanager_peer": there.peer})

    def test_prefill_and_decode_after_a_reset(self) -> None:
        with Daemon(host_pool="128MiB") as daemon, Engine(daemon.listen, role="kv_producer") as prefill:
            with Engine(daemon.listen, role="kv_consumer") as decode:
                for engine in (prefill, decode):
                    engine.scheduler.reset_prefix_cache(reset_connector=True)
                self._hand_over(prefill, decode, prompt(59, 500), {"do_remote_decode": True})

    def test_requests_name_peers_of_the_list_alone(self) -> None:
        with Daemon(host_pool="128MiB") as here, Daemon(host_pool="128MiB") as there, Daemon(host_pool="128MiB") as other:
            prefill = Engine(here.listen, role="kv_producer", peers=[there.peer])
            with prefill, Engine(there.listen, role="kv_consumer") as decode:
                with self.assertLogs("vllm.kvmanager", "WARNING") as log:
                    for number, peer in enumerate((other.peer, f"{there.peer},{other.peer}", f"{there.peer} ", "\n")):
                        params = {"do_remote_decode": True, "kvmanager_peer": peer}
                        (output,) = prefill.run(prefill.add(f"r{number}", prompt(53 + number, 100), params=params))
                        self.assertEqual(4, len(output))
                self.assertIn(f"must be of peers, {there.peer}", log.output[0])
                self.assertEqual((0, 0), (published(there), published(other)))
                allowed = {"do_remote_decode": True, "kvmanager_peer": there.peer}
                self._hand_over(prefill, decode, prompt(58, 500), allowed)
                prefill.run(prefill.add("last", prompt(59, 100)))  # whose steps bring the counts
                counts = [sum(each.get(name, 0) for each in prefill.stats) for name in ("hand_offs_failed", "hand_offs")]
                self.assertEqual([4, 1], counts)

    def test_a_prefill_that_never_comes_is_computed(self) -> None:
        with Daemon(host_pool="128MiB") as daemon:
            with Engine(daemon.listen, role="kv_consumer", prefill_wait_ms=200) as decode:
                request = decode.add("d", prompt(52, 100), params={"do_remote_prefill": True, "kvmanager_blocks": 6})
                decode.run(request)
                self.assertEqual(0, decode.loaded_tokens)

    def test_a_request_that_says_anything_is_served(self) -> None:
        """kv_transfer_params are a client's of the API, and read in the scheduler's own thread."""
        anything = [{"do_remote_prefill": True, "kvmanager_blocks": each} for each in
                    ("six", None, float("nan"), [6], {}, -5, True, 10**30)]
        anything += [{"do_remote_prefill": True, "kvmanager_era": each} for each in ("\ud800", 7, "x" * 10**6, "a\0b")]
        anything += [{"do_remote_decode": True, "kvmanager_peer": each} for each in (["x"], "\ud800", "a\0b:1", 7)]
        with Daemon(host_pool="128MiB") as daemon, Engine(daemon.listen, prefill_wait_ms=50) as engine:
            for number, params in enumerate(anything):
                with self.subTest(params):
                    request = engine.add(f"r{number}", prompt(70 + number, 100), params=params)
                    (output,) = engine.run(request)
                    self.assertEqual(4, len(output))
            salted = engine.add("salted", prompt(99, 100), salt="\ud800")
            engine.run(salted)
            self.assertTrue(engine.connector.attached)

    def test_tenants_of_equal_salts_are_told_apart_by_their_whole_name(self) -> None:
        long = "t" * 200
        names = {tenant_of(Settings.of({"tenant": tenant}), "salt") for tenant in (long, long + "a", long + "b")}
        self.assertEqual(3, len(names))
        self.assertTrue(all(len(each) <= 256 for each in names))

    def _hand_over(self, prefill: Engine, decode: Engine, tokens: list[int], params: dict) -> None:
        # The decode engine is told while the blocks are on their way: it waits for all of them.
        request = prefill.add("p", tokens, output=1, params=params)
        while not request.is_finished():
            prefill.step()
        told = prefill.done["p"]
        self.assertEqual(500 // 16, told["kvmanager_blocks"])
        decoding = decode.add("d", tokens, output=4, params=told)
        decode.step()
        self.assertIn(decode.loaded_tokens, (0, 499 // 16 * 16))
        prefill.run(request)
        decode.run(decoding)
        self.assertEqual(499 // 16 * 16, decode.loaded_tokens)


if __name__ == "__main__":
    unittest.main()
