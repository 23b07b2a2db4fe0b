"""What the connector loads and what it leaves to be computed, inside vLLM's own scheduler, against a real daemon. The planner
is told rates, and told no others, where a case is about what follows from them; planner_test is about how it learns them."""

from __future__ import annotations

import threading
import unittest
import unittest.mock

from engine import DEADLINE_S, Engine, prompt
from engine_testing import DaemonTestCase
from kvmanager.vllm.jobs import LoadJob
from kvmanager_testing import Daemon


def teach(engine: Engine, load_s: float, compute_s: float) -> None:
    """Of a token. From now on nothing is learnt."""
    planner, ended = engine.connector._scheduler._planner, engine.connector._scheduler._planner.load_ended
    for tokens in (256, 512, 1024, 2048) * 4:
        planner.load_began(0, "x", tokens)
        ended(tokens * load_s, "x", 0.0, tokens * load_s)
    for at in range(16):
        planner.step_began(at, [(0, 256)])
        planner.step_ended(at + 256 * compute_s)
        planner.step_began(at + 0.5, [(1024, 1280)])
        planner.step_ended(at + 0.5 + 256 * compute_s)
    planner.step_began = planner.step_ended = lambda *_: None
    planner.load_ended = lambda now, name, *_: ended(now, name)


class PlanTest(DaemonTestCase):
    def engine(self, **options) -> Engine:
        return Engine(self.daemon.listen, **{"plan": "cheaper", **options})

    def known(self, *prompts: list[int], output: int = 4) -> list[list[int]]:
        """Outputs; the daemon has the blocks then."""
        with self.engine(blocks=256) as first:
            return first.run(*[first.add(f"known{i}", each, output=output) for i, each in enumerate(prompts)])

    def count(self, engine: Engine, name: str) -> int:
        return sum(each.get(name, 0) for each in engine.stats)

    def assert_books(self, engine: Engine) -> None:
        """What was found was loaded or computed, and the planner holds nothing of requests that are gone."""
        half = engine.connector._scheduler
        found, loaded = self.count(engine, "lookup_hit_tokens"), engine.loaded_tokens
        self.assertEqual(found, loaded + self.count(engine, "loads_not_worth_tokens"))
        self.assertEqual(({}, {}, {}), (half._computing, half._load_times, half._planner._loading))

    def test_loads_and_steps_reach_the_planner(self) -> None:
        prompts = [prompt(i, 320) for i in range(4)]
        expected = self.known(*prompts)
        with self.engine() as engine:
            planner = engine.connector._scheduler._planner
            self.assertEqual(expected, [engine.run(engine.add(f"a{i}", each))[0] for i, each in enumerate(prompts)])
            self.assertEqual(4 * 304, engine.loaded_tokens)
            self.assertEqual((4, 304), (planner._loads.added, planner._loads.most()))
            self.assertEqual(4, len(planner._notices))
            self.assertEqual(4, planner._steps.added)  # of 16 tokens each; those of one token are of the output
            self.assertEqual(16, planner._steps.most())
            engine.run(engine.add("b", prompt(9, 700)))
            self.assertEqual((4 + 3, 256), (planner._steps.added, planner._steps.most()))
            self.assert_books(engine)

    def test_what_is_slow_to_load_is_computed_and_not_stored_again(self) -> None:
        tokens = prompt(10, 320)
        (expected,) = self.known(tokens)
        before = self.published()
        with self.engine() as engine, self.assertLogs("vllm.kvmanager", "INFO") as log:
            teach(engine, load_s=1e-2, compute_s=1e-4)
            for name in ("a", "b"):
                engine.scheduler.reset_prefix_cache()
                self.assertEqual([expected], engine.run(engine.add(name, tokens)))
            self.assertEqual(0, engine.loaded_tokens)
            self.assertEqual(2 * 304, self.count(engine, "loads_not_worth_tokens"))
            self.assertEqual(0, self.count(engine, "stored_tokens"))
            self.assert_books(engine)
        self.assertEqual(before, self.published())
        said = [line for line in log.output if "loads 0 of 304 tokens" in line]
        self.assertEqual(1, len(said), log.output)
        self.assertIn("with all of them loaded", said[0])

    def test_what_is_fast_to_load_is_loaded(self) -> None:
        tokens = prompt(11, 320)
        (expected,) = self.known(tokens)
        with self.engine() as engine:
            teach(engine, load_s=1e-6, compute_s=1e-4)
            self.assertEqual([expected], engine.run(engine.add("a", tokens)))
            self.assertEqual(304, engine.loaded_tokens)
            self.assert_books(engine)

    def test_what_loads_while_others_compute_is_loaded_in_part(self) -> None:
        tokens, longer = prompt(12, 700), prompt(13, 1200)
        (expected,) = self.known(tokens)
        with self.engine(blocks=256) as engine:
            teach(engine, load_s=4e-4, compute_s=1e-4)
            first = engine.add("a", longer)
            engine.step()
            second = engine.add("b", tokens)
            engine.settle()
            engine.run(first, second)
            self.assertEqual(expected, list(second.output_token_ids))
            # vLLM asks once a step has room: the last 176 tokens of the other take as long as a load of 44.
            self.assertEqual(32, engine.loaded_tokens)
            self.assertEqual(688 - 32, self.count(engine, "loads_not_worth_tokens"))
            self.assert_books(engine)

    def test_some_load_nevertheless(self) -> None:
        tokens = prompt(14, 320)
        self.known(tokens)
        with self.engine() as engine:
            teach(engine, load_s=2e-4, compute_s=1e-4)
            for number in range(40):
                engine.scheduler.reset_prefix_cache()
                engine.run(engine.add(f"a{number}", tokens, output=1))
            self.assertEqual(304, engine.loaded_tokens)
            self.assert_books(engine)

    def test_requests_of_one_prefix_together(self) -> None:
        shared = prompt(15, 320)
        prompts = [shared + prompt(16 + i, 40) for i in range(6)]
        expected = self.known(*prompts)
        for load_s in (1e-6, 1.1e-4, 1e-2):
            with self.subTest(load_s), self.engine(blocks=256) as engine:
                teach(engine, load_s, compute_s=1e-4)
                requests = [engine.add(f"a{i}", each) for i, each in enumerate(prompts)]
                engine.settle()
                self.assertEqual(expected, engine.run(*requests))
                self.assertEqual(load_s < 1e-3, engine.loaded_tokens > 0)
                self.assertEqual(load_s > 1e-5, self.count(engine, "loads_not_worth_tokens") > 0)
                self.assert_books(engine)

    def test_preempted_requests(self) -> None:
        prompts = [prompt(30 + i, 100) for i in range(3)]
        expected = self.known(*prompts, output=30)
        for load_s in (1e-6, 1e-2):
            with self.subTest(load_s), self.engine(blocks=24) as tight:
                teach(tight, load_s, compute_s=1e-4)
                found = tight.run(*[tight.add(f"t{i}", each, output=30) for i, each in enumerate(prompts)])
                self.assertGreater(tight.preemptions, 0)
                self.assertEqual(expected, found)
                self.assert_books(tight)

    def test_a_reset_in_the_middle(self) -> None:
        tokens = prompt(40, 320)
        (expected,) = self.known(tokens, output=40)
        for load_s in (1e-6, 1e-2):
            with self.subTest(load_s), self.engine() as engine:
                teach(engine, load_s, compute_s=1e-4)
                request = engine.add("a", tokens, output=40)
                while request.num_output_tokens < 20:
                    if not engine.step():
                        engine.settle()
                engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
                self.assertEqual([expected], engine.run(request))
                self.assert_books(engine)

    def test_a_request_that_is_aborted_while_it_loads(self) -> None:
        tokens = prompt(41, 320)
        self.known(tokens)
        run, aborted = LoadJob.run, threading.Event()

        def held(job: LoadJob, session: object) -> None:
            aborted.wait(DEADLINE_S)
            run(job, session)

        with self.engine() as engine, unittest.mock.patch.object(LoadJob, "run", held):
            teach(engine, load_s=1e-6, compute_s=1e-4)
            request = engine.add("a", tokens)
            engine.settle()
            while not engine.connector._scheduler._planner._loading:
                engine.step()
            engine.scheduler.finish_requests(["a"], request.status.FINISHED_ABORTED)
            aborted.set()
            engine.settle()
            engine.run(engine.add("b", prompt(42, 100)))
            self.assert_books(engine)

    def test_a_load_that_fails_measures_nothing(self) -> None:
        tokens = prompt(43, 320)
        (expected,) = self.known(tokens)
        with self.engine() as engine:
            request = engine.add("a", tokens)
            engine.settle()
            self.setUp()  # nothing is there any more
            self.assertEqual([expected], engine.run(request))
            self.assertEqual(0, engine.connector._scheduler._planner._loads.added)
            self.assertEqual({}, engine.connector._scheduler._planner._loading)

    def test_how_long_a_request_that_was_computed_is_kept(self) -> None:
        """What it found is shared with others, whether it was loaded or not."""
        shared = prompt(44, 160)
        self.known(shared)
        with self.engine() as engine:
            teach(engine, load_s=1e-2, compute_s=1e-4)
            half = engine.connector._scheduler
            engine.add("a", shared + prompt(45, 80), params={"kvmanager_retention_priority": 0})
            engine.settle()
            engine.step()
            self.assertEqual(10, half._requests["a"].found)
            self.assertEqual(160, half._requests["a"].choice is None and self.count(engine, "loads_not_worth_tokens"))


class AlwaysTest(unittest.TestCase):
    def test_who_decodes_what_was_computed_elsewhere_loads(self) -> None:
        tokens = prompt(50, 500)
        with Daemon(host_pool="128MiB") as daemon, Engine(daemon.listen, plan="cheaper") as engine:
            teach(engine, load_s=1e-2, compute_s=1e-4)
            engine.run(engine.add("p", tokens, output=1, params={"do_remote_decode": True}))
            engine.scheduler.reset_prefix_cache()
            engine.run(engine.add("d", tokens, params=engine.done["p"]))
            self.assertEqual(496, engine.loaded_tokens)

    def test_decode_engines_ranks_and_plan_load_have_no_planner(self) -> None:
        with Daemon(host_pool="64MiB") as daemon:
            for options, plans in (({}, True), ({"plan": "load"}, False), ({"role": "kv_consumer"}, False),
                                   ({"role": "kv_producer"}, False), ({"ranks": 2}, False)):
                with self.subTest(options), Engine(daemon.listen, **{"plan": "cheaper", **options}) as engine:
                    self.assertEqual(plans, engine.connector._scheduler._planner is not None)
                    self.assertEqual("load" if options.get("plan") else "cheaper", engine.connector._settings.plan)


if __name__ == "__main__":
    unittest.main()
