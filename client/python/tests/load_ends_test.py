"""When the connector's half in a vLLM worker says that loads have ended. Time is a number here. The module alone is loaded: vLLM is
not installed where this runs."""

from __future__ import annotations

import importlib.util
import os
import random
import types
import unittest

import kvmanager

_PATH = os.path.join(os.path.dirname(kvmanager.__file__), "vllm", "load_ends.py")
_spec = importlib.util.spec_from_file_location("load_ends", _PATH)
load_ends = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(load_ends)

SLEEP_S = 0.001  # of an engine between two steps that compute nothing


class World:
    """An engine's steps, and loads that end at given times. Times are seconds."""

    def __init__(self, hears: bool = False) -> None:
        self.hears = hears  # the scheduler is in the worker's process
        self.now = 1000.0
        self.ends = load_ends.LoadEnds()
        self.said: dict[str, float] = {}  # when
        self._coming: list[tuple[float, str, set[int] | None]] = []
        self.missing: dict[str, set[int] | None] = {}
        load_ends.time = types.SimpleNamespace(monotonic=lambda: self.now)
        # The lock is held in wait(), which end() takes.
        self.ends._changed = types.SimpleNamespace(wait=self._wait, notify=lambda: None)

    def load(self, name: str, seconds: float, missing: set[int] | None = None, blocks: int = 1) -> None:
        self.ends.begin(name, blocks)
        self._coming.append((self.now + seconds, name, missing))
        self._coming.sort(key=lambda each: each[0])

    def step(self, computes: bool = False, seconds: float = 0.0005) -> None:
        self.ends.wait(computes)
        self._advance(seconds)
        self._say({name: end.missing for name, end in self.ends.take().items()})
        if self.hears:
            self.hear()
        if not computes:
            self._advance(SLEEP_S)

    def hear(self) -> None:
        """The scheduler, of the step before."""
        self._say(dict.fromkeys(self.ends.take_whole()))

    def _say(self, missing: dict[str, set[int] | None]) -> None:
        for name, each in missing.items():
            assert name not in self.said
            self.said[name], self.missing[name] = self.now, each

    def idle(self, steps: int = 100) -> None:
        for _ in range(steps):
            self.step()

    def _advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._coming and self._coming[0][0] <= until:
            self.now, name, missing = self._coming.pop(0)
            self.ends.end(name, missing)
        self.now = until

    def _wait(self, seconds: float) -> None:
        """Of a condition: until something ends."""
        left = self._coming[0][0] - self.now if self._coming else seconds
        self.ends._lock.release()
        self._advance(min(seconds, max(0.0, left)))
        self.ends._lock.acquire()


class LoadEndsTest(unittest.TestCase):
    def world(self, period_s: float = 0.03, hears: bool = False) -> World:
        """An engine that has computed some steps."""
        world = World(hears)
        for _ in range(4):
            world.step(computes=True, seconds=period_s)
        world.idle(4)
        return world

    def test_one_alone_is_said_at_once(self) -> None:
        for seconds in (0.0001, 0.0015, 0.005, 0.02, 0.3):
            world = self.world()
            began = world.now
            world.load("a", seconds)
            world.idle()
            self.assertLess(world.said["a"] - began - seconds, 0.0021)

    def test_a_scheduler_that_is_near_takes_what_is_whole(self) -> None:
        world = self.world()
        world.hear()  # it is there, but does not hear of each step
        world.load("a", 0.001)
        world.load("b", 0.001, {7})
        world.step()
        self.assertEqual({"b": {7}}, world.missing)  # vLLM reads of failures with the step's output
        self.assertTrue(world.ends.pending)
        world.hear()
        self.assertEqual({"b": {7}, "a": None}, world.missing)
        self.assertFalse(world.ends.pending)
        world.load("c", 0.001)
        world.step()
        self.assertNotIn("c", world.said)
        world.step()  # it was left to the scheduler once
        self.assertIn("c", world.said)

    def test_a_scheduler_that_is_near_holds_what_others_soon_follow(self) -> None:
        world = self.world(hears=True)
        for number in range(4):
            world.load(f"{number}", 0.007 * (number + 1))
        world.idle()
        self.assertEqual(1, len(set(world.said.values())))

    def test_others_that_end_soon_are_said_with_it(self) -> None:
        world = self.world()
        for number in range(4):
            world.load(f"{number}", 0.007 * (number + 1), {number} if number % 2 else None)
        world.idle()
        self.assertEqual(1, len(set(world.said.values())))
        self.assertEqual({"0": None, "1": {1}, "2": None, "3": {3}}, world.missing)

    def test_nothing_is_held_longer_than_two_steps_take(self) -> None:
        for period_s, most_s in ((0.01, 0.02), (0.02, 0.04), (2.0, load_ends._TOGETHER_S)):
            world = self.world(period_s)
            began = world.now
            world.load("a", 0.005)
            world.load("b", 1.0)
            world.idle(1000)
            self.assertGreater(world.said["a"] - began, 0.005 + most_s - 0.0001)
            self.assertLess(world.said["a"] - began, 0.005 + most_s + 0.0021)
            self.assertLess(world.said["b"] - began, 1.0021)

    def test_nothing_waits_for_a_load_that_takes_longer(self) -> None:
        """Of 100 blocks, where the one before had 8 in 5 ms."""
        world = self.world()
        began = world.now
        world.load("a", 0.005, blocks=8)
        world.load("b", 0.07, blocks=100)
        world.load("c", 0.074, blocks=8)
        world.idle()
        self.assertLess(world.said["a"] - began, 0.005 + 0.0021)
        self.assertEqual(world.said["b"], world.said["c"])

    def test_prompts_that_come_during_a_load_are_seen(self) -> None:
        """A step that computes nothing ends soon, until the load that is under way does."""
        world = self.world()
        world.load("a", 0.008, blocks=8)  # as long as the next will take
        world.idle()
        began, longest_s, steps = world.now, 0.0, 0
        world.load("b", 0.008, blocks=8)
        while "b" not in world.said:
            before = world.now
            world.step()
            longest_s, steps = max(longest_s, world.now - before), steps + 1
        self.assertGreaterEqual(steps, 3)
        self.assertLess(longest_s, load_ends._SOON_S + 0.0021)
        self.assertLess(world.said["b"] - began - 0.008, 0.0006)

    def test_prompts_are_seen_while_a_load_is_late(self) -> None:
        """It takes longer than was thought: nobody knows when it ends."""
        world = self.world()
        world.load("a", 0.008, blocks=8)  # as long as the next is thought to take
        world.idle()
        began, steps = world.now, 0
        world.load("b", 0.05, blocks=8)
        while "b" not in world.said:
            world.step()
            steps += 0.02 < world.now - began < 0.05
        self.assertGreaterEqual(steps, 7)

    def test_an_engine_that_computes_is_told_at_once(self) -> None:
        world = self.world()
        world.load("a", 0.005)
        world.load("b", 0.05)
        world.step(computes=True, seconds=0.01)
        self.assertEqual(["a"], list(world.said))

    def test_a_name_that_comes_again_before_its_load_has_ended(self) -> None:
        """Of a request that was aborted."""
        world = self.world()
        world.load("a", 0.005)
        world.load("a", 0.02)
        for _ in range(8):
            world.step()
        self.assertEqual(["a"], list(world.said))
        world.said.clear()
        world.idle()
        self.assertEqual(["a"], list(world.said))

    def test_before_any_step_nothing_is_held(self) -> None:
        world = World()
        world.load("a", 0.005)
        world.load("b", 0.02)
        world.idle()
        self.assertLess(world.said["a"], world.said["b"])

    def test_each_is_said_once_and_soon(self) -> None:
        """Whatever comes when."""
        source = random.Random(4)
        for walk in range(200):
            world, period_s = World(hears=walk % 2 == 1), source.choice((0.002, 0.01, 0.05))
            ends: dict[str, float] = {}
            for number in range(200):
                for _ in range(source.choice((0, 0, 0, 1, 4))):
                    name, seconds = f"{number} {len(ends)}", source.choice((0.0, 0.003, 0.02, 0.2)) * source.random()
                    ends[name] = world.now + seconds
                    world.load(name, seconds, source.choice((None, {1})), blocks=source.randint(1, 100))
                if source.random() < 0.1:
                    world.hear()
                world.step(source.random() < 0.2, period_s * (1 + source.random()))
            world.idle(400)
            self.assertEqual(set(ends), set(world.said))
            for name, end in ends.items():
                self.assertGreaterEqual(world.said[name], end)
                # Of two steps, the second one where it was left to a scheduler that does not hear of the first.
                steps_s = 2 * (load_ends._WAIT_AGAIN_S + 2 * period_s) + SLEEP_S
                self.assertLess(world.said[name] - end, load_ends._TOGETHER_S + steps_s)


if __name__ == "__main__":
    unittest.main()
