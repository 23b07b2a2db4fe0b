"""Leases: given back by close, by the garbage collector on any thread, by a killed process; daemons that go; fork()."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import unittest

import kvmanager as kv
import numpy
from kvmanager_testing import Daemon
from reference import MODEL, Prompt

DEADLINE_S = 60  # of what should take milliseconds


class WithDaemon(unittest.TestCase):
    def setUp(self) -> None:
        self.daemon = self.enterContext(Daemon())
        self.client = self.enterContext(kv.connect(self.daemon.listen, name="test"))
        self.watcher = self.enterContext(kv.connect(self.daemon.listen, name="watcher"))

    def leases(self) -> int:
        return self.watcher.status().leases

    def eventually(self, condition) -> None:
        """The daemon learns of an end by itself."""
        until = time.monotonic() + DEADLINE_S
        while not condition():
            self.assertLess(time.monotonic(), until)


def on_a_thread(function) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


class Leases(WithDaemon):
    def test_with_gives_back_everything(self) -> None:
        with kv.connect(self.daemon.listen) as client:
            cache = client.open_cache(**MODEL)
            held = [cache.create_sequence() for _ in range(3)]
            held.append(held[0].fork())
            with cache.create_sequence():
                self.assertEqual(self.leases(), 5)
            self.assertEqual(self.leases(), 4)
        self.eventually(lambda: self.leases() == 0 and self.watcher.status().connections == 2)
        self.assertEqual(len(held), 4)  # they are still here, and void

    def test_what_is_let_go_is_given_back(self) -> None:
        cache = self.client.open_cache(**MODEL)
        sequence = cache.create_sequence()
        self.assertEqual(self.leases(), 1)
        del sequence
        gc.collect()
        self.client.ping()
        self.assertEqual(self.leases(), 0)

    def test_the_garbage_collector_may_run_on_any_thread(self) -> None:
        cache = self.client.open_cache(**MODEL)
        prompt = Prompt(1, 20)
        held = [cache.create_sequence() for _ in range(50)]
        prompt.append(cache, held[0])
        out = numpy.full((1, 8, 64), 7, numpy.float32)
        pending = cache.step_async(0, [(held[0], 19, 1)], q=prompt.q[-1:], out=out)
        arena = self.client.create_arena(4096)
        keep = arena.tensor(16).numpy()
        bag = [held, [pending], [arena], [self.client.open_cache(**MODEL)]]
        del held, pending, arena
        on_a_thread(bag.clear)
        gc.collect()
        self.client.ping()  # the owner's next call gives them back
        self.eventually(lambda: self.leases() == 0)
        self.assertTrue((out == 7).all())  # a call that was let go writes nothing
        keep[:] = 1

    def test_threads_that_drop_while_the_owner_works(self) -> None:
        cache = self.client.open_cache(**MODEL)
        bag: list[kv.Sequence] = []
        stop = threading.Event()

        def drop() -> None:
            while not stop.is_set() or bag:
                if bag:
                    bag.pop()

        threads = [threading.Thread(target=drop) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(500):
            bag.append(cache.create_sequence())
        stop.set()
        for thread in threads:
            thread.join()
        self.client.ping()
        self.eventually(lambda: self.leases() == 0)

    def test_a_client_that_another_thread_drops(self) -> None:
        bag = [kv.connect(self.daemon.listen)]
        bag.append(bag[0].open_cache(**MODEL).create_sequence())
        self.assertEqual(self.leases(), 1)
        on_a_thread(bag.clear)
        gc.collect()
        self.client.ping()  # another client of the same thread
        self.eventually(lambda: self.leases() == 0 and self.watcher.status().connections == 2)

    def test_a_client_per_thread(self) -> None:
        def work() -> None:
            with kv.connect(self.daemon.listen) as client:
                cache = client.open_cache(**MODEL)
                prompt = Prompt(2, 30)
                for _ in range(5):
                    with cache.create_sequence() as sequence:
                        prompt.append(cache, sequence)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.eventually(lambda: self.leases() == 0 and self.watcher.status().connections == 2)

    def test_handles_whose_thread_has_ended_may_be_dropped(self) -> None:
        bag: list[object] = []

        def work() -> None:
            client = kv.connect(self.daemon.listen)
            cache = client.open_cache(**MODEL)
            bag.extend([cache.create_sequence(), cache])
            client.close()
            left = kv.connect(self.daemon.listen)  # never closed
            bag.extend([left, left.open_cache(**MODEL)])

        on_a_thread(work)
        self.assertRaises(kv.FailedPreconditionError, bag[0].info)
        self.assertRaises(kv.FailedPreconditionError, bag[2].ping)
        bag.clear()
        gc.collect()
        self.client.ping()


class Daemons(WithDaemon):
    def test_one_that_is_killed_is_unavailable_at_once_and_reconnected_to(self) -> None:
        cache = self.client.open_cache(**MODEL)
        sequence = cache.create_sequence()
        prompt = Prompt(3, 20)
        prompt.append(cache, sequence)
        epoch = self.client.boot_epoch
        self.daemon.kill()
        with self.assertRaises(kv.UnavailableError) as caught:
            prompt.append(cache, sequence, 0, 1)
        self.assertIn("reconnect()", str(caught.exception))
        self.assertFalse(self.client.connected)
        self.daemon.start()
        self.client.reconnect()
        self.assertTrue(self.client.connected)
        self.assertNotEqual(self.client.boot_epoch, epoch)
        with self.assertRaises(kv.FailedPreconditionError) as caught:
            sequence.info()
        self.assertIn("open and create again", str(caught.exception))
        sequence.close()
        again = self.client.open_cache(**MODEL)
        prompt.append(again, again.create_sequence())

    def test_a_call_under_way_ends_with_it(self) -> None:
        cache = self.client.open_cache(**MODEL)
        claim = cache.claim_async(b"x" * 16, deadline_ms=60000)
        self.daemon.kill()
        with self.assertRaises(kv.Error):  # the daemon may have answered before
            claim.wait()
        self.daemon.start()


class Copies(WithDaemon):
    def test_a_lease_has_one_owner(self) -> None:
        cache = self.client.open_cache(**MODEL)
        sequence = cache.create_sequence()
        arena = self.client.create_arena(4096)
        pending = cache.step_async(0, [(sequence, 0, 1)], *[numpy.zeros((1, 2, 64), numpy.float16)] * 2)
        for held in (self.client, cache, sequence, arena, arena.tensor(16), pending):
            for copier in (copy.copy, copy.deepcopy, pickle.dumps):
                if isinstance(held, kv.ArenaTensor) and copier is copy.copy:
                    continue  # a second view of the same memory
                with self.assertRaisesRegex(TypeError, "cannot be copied or pickled"):
                    copier([held] if copier is copy.deepcopy else held)
        gc.collect()
        pending.wait()
        self.assertEqual(sequence.info().tokens, 0)  # layer 1 has none


class Forks(WithDaemon):
    def child(self, function) -> None:
        """Runs in a fork; its answer is its exit status."""
        pid = os.fork()
        if pid == 0:
            try:
                function()
                os._exit(0)
            except BaseException as error:
                print(f"child: {error!r}", flush=True)
                os._exit(1)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)

    def test_a_child_holds_nothing_and_may_connect_itself(self) -> None:
        cache = self.client.open_cache(**MODEL)
        sequence = cache.create_sequence()
        pending = cache.step_async(0, [(sequence, 0, 1)], *[numpy.zeros((1, 2, 64), numpy.float16)] * 2)
        bag = [cache.create_sequence()]

        def work() -> None:
            for call in (self.client.ping, sequence.info, pending.wait, lambda: cache.create_sequence(), sequence.close):
                try:
                    call()
                    raise AssertionError("it was answered")
                except kv.FailedPreconditionError as error:
                    assert "connect a client of its own" in str(error), error
            bag.clear()  # the parent's lease stays
            gc.collect()
            with kv.connect(self.daemon.listen) as client:
                own = client.open_cache(**MODEL)
                Prompt(4, 20).append(own, own.create_sequence())

        self.child(work)
        self.assertEqual(pending.wait().raw_pairs, 0)
        self.assertEqual(sequence.info().tokens, 0)  # layer 1 has none
        self.eventually(lambda: self.leases() == 2 and self.watcher.status().connections == 2)

    def test_a_parent_that_dies_gives_back_though_its_child_lives(self) -> None:
        to_parent, from_child = os.pipe()
        pid = os.fork()
        if pid == 0:
            client = kv.connect(self.daemon.listen)
            held = client.open_cache(**MODEL).create_sequence()
            if os.fork() == 0:
                os.close(from_child)
                os.read(to_parent, 1)  # lives until the test ends
                os._exit(0)
            os._exit(0 if held.id else 1)
        os.close(to_parent)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        self.eventually(lambda: self.leases() == 0)
        os.close(from_child)


if __name__ == "__main__":
    unittest.main()
