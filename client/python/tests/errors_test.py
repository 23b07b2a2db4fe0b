"""Every class of error that a daemon can be made to answer, and that of every code; each names field, value, bound."""

from __future__ import annotations

import pickle
import signal
import threading
import unittest

import kvmanager as kv
import numpy
from kvmanager import errors
from kvmanager_testing import Daemon
from reference import MODEL, Prompt


class Classes(unittest.TestCase):
    def test_each_code_has_one(self) -> None:
        for code in range(1, 17):
            error = errors.from_fields({"code": code, "message": "m", "field": "f", "value": "v", "bound": "b"})
            self.assertEqual((error.code, error.message, error.field, error.value, error.bound), (code, "m", "f", "v", "b"))
            self.assertTrue(str(error).startswith(f"{error.name}: m"))
            if code != 2:
                self.assertIsNot(type(error), kv.Error)
            again = pickle.loads(pickle.dumps(error))
            self.assertEqual((type(again), again.field, str(again)), (type(error), "f", str(error)))

    def test_a_code_of_a_newer_daemon_is_an_error(self) -> None:
        error = errors.from_fields({"code": 99, "message": "m", "field": "", "value": "", "bound": ""})
        self.assertIs(type(error), kv.Error)


class WithoutMemory:
    """As torch's on the meta device."""

    shape, dtype, is_cuda = (10, 2, 64), "torch.float16", False

    def data_ptr(self) -> int:
        return 0

    def is_contiguous(self) -> bool:
        return True


class WithDaemon(unittest.TestCase):
    def setUp(self) -> None:
        self.daemon = self.enterContext(Daemon(host_pool="8MiB", flags=("--arena-bytes", "16MiB")))
        self.client = self.enterContext(kv.connect(self.daemon.listen, name="test"))
        self.cache = self.client.open_cache(**MODEL)

    def refused(self, kind: type, function, *arguments, **named) -> kv.Error:
        with self.assertRaises(kind) as caught:
            function(*arguments, **named)
        self.assertIs(type(caught.exception), kind)
        return caught.exception


class InvalidArgument(WithDaemon):
    def test_options(self) -> None:
        for field, changed in (("layers", {"layers": 0}), ("layers", {"layers": -1}), ("head_dim", {"head_dim": 2**40}),
                               ("layers", {"layers": "two"}), ("dtype", {"dtype": "float32"}), ("model", {"model": 7}),
                               ("codec", {"codec": "none_such"})):
            with self.subTest(changed):
                error = self.refused(kv.InvalidArgumentError, self.client.open_cache, **{**MODEL, **changed})
                self.assertIn(field, error.field)
                self.assertTrue(error.bound)
        error = self.refused(kv.InvalidArgumentError, self.client.open_cache, **{**MODEL, "model": object()})
        self.assertIn("object", error.value)

    def test_addresses_and_deadlines(self) -> None:
        self.assertEqual(self.refused(kv.InvalidArgumentError, kv.connect, "http://x").field, "address")
        self.assertEqual(self.refused(kv.InvalidArgumentError, kv.connect, "unix:/x", deadline_ms=0).field, "deadline_ms")
        self.assertEqual(self.refused(kv.InvalidArgumentError, kv.connect, "unix:/x", connect_ms=2**70).field, "connect_ms")

    def test_who_asks(self) -> None:
        refused = self.refused(kv.InvalidArgumentError, kv.connect, "unix:/x", token="short")
        self.assertEqual(refused.field, "token (bytes)")
        self.assertNotIn("short", str(refused))
        self.assertEqual(self.refused(kv.InvalidArgumentError, kv.connect, "unix:/x", admin_address="/x").field, "address")
        listen = self.daemon.listen
        self.assertEqual(self.refused(kv.PermissionDeniedError, kv.connect, listen, token="t" * 16).field, "token")
        with kv.connect(listen, admin_address=self.daemon.admin) as client:
            self.assertEqual(client.status().boot_epoch, client.boot_epoch)
        with kv.connect(listen, admin_address="unix:/nowhere") as client:
            self.assertEqual(self.refused(kv.FailedPreconditionError, client.status).field, "admin_address")

    def test_tensors_are_looked_at_before_anything_is_sent(self) -> None:
        prompt = Prompt(1, 10)
        k, v, q = prompt.k[0], prompt.v[0], prompt.q
        sequence = self.cache.create_sequence()
        entries = [(sequence, 0, 10)]
        out = numpy.zeros_like(q)
        read_only = numpy.zeros_like(q)
        read_only.flags.writeable = False
        wrong = (
            ("k (shape)", (k[:9], v), {}),
            ("k (shape)", (k.transpose(1, 0, 2).copy(), v), {}),
            ("v (dtype)", (k, v.astype(numpy.float32)), {}),
            ("k", (k.transpose(1, 0, 2), v), {}),
            ("k", ([1, 2], v), {}),
            ("q (dtype)", (k, v), {"q": q.astype(numpy.float64), "out": out}),
            ("out (dtype)", (k, v), {"q": q, "out": out.astype(numpy.float16)}),
            ("out (shape)", (k, v), {"q": q, "out": out[:5]}),
            ("out", (k, v), {"q": q, "out": read_only}),
            ("out", (k, v), {"q": q}),
            ("q", (k, v), {"out": out}),
            ("k", (WithoutMemory(), v), {}),
            ("lse (shape)", (k, v), {"q": q, "out": out, "lse": numpy.zeros(10, numpy.float32)}),
        )
        for field, arguments, named in wrong:
            with self.subTest(field, named=sorted(named)):
                error = self.refused(kv.InvalidArgumentError, self.cache.step, 0, entries, *arguments, **named)
                self.assertEqual(error.field, field)
                self.assertTrue(error.value and error.bound)
        self.assertEqual(sequence.info().tokens, 0)
        self.cache.step(0, entries, k.reshape(2, 5, 2, 64), v.reshape(10, 128), q.reshape(1, 10, 8, 64), out)

    def test_entries(self) -> None:
        k = numpy.zeros((1, 2, 64), numpy.float16)
        for entries in ([(1, -1, 1)], [("a", 0, 1)], [(1, 0, 2**64)]):
            self.refused(kv.InvalidArgumentError, self.cache.step, 0, entries, k, k)
        sequence = self.cache.create_sequence()
        error = self.refused(kv.FailedPreconditionError, self.cache.step, 0, [(sequence, 3, 1)], k, k)
        self.assertEqual((error.field, error.value), ("entries[0].position", "3"))
        self.assertEqual(self.refused(kv.InvalidArgumentError, self.cache.step, 2, [(sequence, 0, 1)], k, k).field, "layer")
        self.refused(kv.InvalidArgumentError, self.cache.step, 2**40, [(sequence, 0, 1)], k, k)

    def test_what_is_not_finite_is_named(self) -> None:
        k = numpy.zeros((3, 2, 64), numpy.float16)
        k[1, 1, 5] = numpy.nan
        sequence = self.cache.create_sequence()
        error = self.refused(kv.InvalidArgumentError, self.cache.step, 0, [(sequence, 0, 3)], k, k)
        self.assertIn("k", error.field)
        self.assertIn("nan", error.value.lower())
        self.assertEqual(sequence.info().tokens, 0)

    def test_names_and_numbers(self) -> None:
        sequence = self.cache.create_sequence()
        self.refused(kv.InvalidArgumentError, self.cache.block_names, [-1])
        self.refused(kv.InvalidArgumentError, self.cache.block_names, [2**32])
        self.refused(kv.InvalidArgumentError, self.cache.external_names, [b""])
        self.refused(kv.InvalidArgumentError, self.cache.external_names, [b"x" * 65])
        self.refused(kv.InvalidArgumentError, self.cache.external_names, ["text"])
        self.refused(kv.InvalidArgumentError, self.cache.match, [b"bytes"])
        self.refused(kv.InvalidArgumentError, kv.BlockNames, bytes(63))
        self.refused(kv.InvalidArgumentError, self.cache.create_sequences, [None], [1, 2])
        self.refused(kv.InvalidArgumentError, self.cache.create_sequences, [None], [-1])
        self.refused(kv.InvalidArgumentError, sequence.crop, -1)
        self.refused(kv.InvalidArgumentError, sequence.crop, 1)
        self.refused(kv.InvalidArgumentError, self.cache.output_factors, 2)
        self.refused(kv.InvalidArgumentError, self.client.purge, -2)
        self.refused(kv.InvalidArgumentError, self.client.purge, -1)
        self.refused(kv.InvalidArgumentError, sequence.hand_off, "nowhere")
        self.refused(kv.InvalidArgumentError, sequence.hand_off, "127.0.0.1:1", timeout_ms=0)

    def test_numbers_that_c_would_cut_are_refused(self) -> None:
        prompt = Prompt(1, 10)
        sequence = self.cache.create_sequence()
        prompt.append(self.cache, sequence)
        k = numpy.zeros((10, 2, 64), numpy.float16)
        arena = self.client.create_arena(4096)
        for field, call in (
            ("tokens", lambda: sequence.crop(2**70)),
            ("tokens", lambda: sequence.begin_hand_off("127.0.0.1:1", 2**64)),
            ("timeout_ms", lambda: sequence.hand_off("127.0.0.1:1", timeout_ms=2**64)),
            ("layer", lambda: self.cache.read(2**32, [(sequence, 0, 10)], k, k)),
            ("layer", lambda: self.cache.output_factors(2**32)),
            ("prompt_tokens", lambda: self.cache.create_sequences([None], [2**64])),
            ("deadline_ms", lambda: self.cache.claim(b"ticket", 2**64 + 1)),
            ("nbytes", lambda: self.client.create_arena(2**64 + 4096)),
            ("cache_id", lambda: self.client.purge(2**64 - 1)),
            ("ordinal", lambda: self.client.open_device(2**32)),
            ("shape", lambda: arena.tensor((4.5,))),
            ("offset", lambda: arena.tensor((4,), offset=2**64)),
        ):
            with self.subTest(field):
                error = self.refused(kv.InvalidArgumentError, call)
                self.assertEqual(error.field, field)
                self.assertTrue(error.value and error.bound)
        self.assertEqual(sequence.info().tokens, 10)

    def test_what_is_of_another_type_is_named(self) -> None:
        sequence = self.cache.create_sequence()
        for field, call in (
            ("address", lambda: kv.connect(None)),
            ("options", lambda: self.client.open_cache(**{**MODEL, "model": "\ud800"})),
            ("options", lambda: self.client.open_cache(**{**MODEL, "layers": float("nan")})),
            ("names", lambda: sequence.publish(None)),
            ("names", lambda: sequence.publish(bytes(64))),
            ("peer", lambda: sequence.hand_off(b"127.0.0.1:1")),
            ("blob", lambda: sequence.hand_off("127.0.0.1:1", "text")),
            ("ticket", lambda: self.cache.claim("text")),
            ("tokens", lambda: sequence.crop("1")),
            ("nbytes", lambda: self.client.create_arena(1.5)),
            ("prompt_tokens", lambda: self.cache.create_sequences([None], ["1"])),
        ):
            with self.subTest(field):
                self.assertEqual(self.refused(kv.InvalidArgumentError, call).field, field)
        self.refused(kv.NotFoundError, self.cache.claim, bytearray(16))
        self.client.open_cache(**{**MODEL, "dtype": numpy.float16})

    def test_more_than_one_call_may_ask_for(self) -> None:
        names = self.cache.block_names(range(64))
        for call, given in ((self.cache.match, [names] * 4097), (self.cache.create_sequences, [None] * 4097)):
            error = self.refused(kv.InvalidArgumentError, call, given)
            self.assertEqual((error.field, error.value), ("requests", "4097 long"))


class Others(WithDaemon):
    def test_not_found(self) -> None:
        k = numpy.zeros((1, 2, 64), numpy.float16)
        error = self.refused(kv.NotFoundError, self.cache.step, 0, [(12345, 0, 1)], k, k)
        self.assertIn("12345", str(error))
        self.refused(kv.NotFoundError, self.cache.claim, b"none such")
        pending = self.cache.claim_async(b"none such")
        first, second = self.refused(kv.NotFoundError, pending.wait), self.refused(kv.NotFoundError, pending.wait)
        self.assertIs(first, second)

    def test_memory_is_exhausted_and_the_message_says_what_to_do(self) -> None:
        sequence = self.cache.create_sequence()
        k = numpy.zeros((16384, 2, 64), numpy.float16)
        with self.assertRaises(kv.ResourceExhaustedError) as caught:
            for layer in range(2):
                for at in range(0, 1 << 17, 16384):
                    self.cache.step(layer, [(sequence, at, 16384)], k, k)
        self.assertIn("close sequences", str(caught.exception))
        self.refused(kv.ResourceExhaustedError, self.client.create_arena, 64 << 20)

    def test_a_draining_daemon_takes_nothing_new(self) -> None:
        self.client.drain()
        self.refused(kv.UnavailableError, self.cache.create_sequence)
        self.client.drain(False)
        self.cache.create_sequence()

    def test_a_daemon_that_does_not_answer_meets_the_deadline(self) -> None:
        hasty = self.enterContext(kv.connect(self.daemon.listen, deadline_ms=50))
        self.daemon.process.send_signal(signal.SIGSTOP)
        try:
            error = self.refused(kv.DeadlineExceededError, hasty.ping)
            self.assertIn("50 ms", str(error))
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)
        hasty.ping()  # the connection lives

    def test_nobody_there_is_unavailable(self) -> None:
        error = self.refused(kv.UnavailableError, kv.connect, "unix:/tmp/kv_nobody_is_there", connect_ms=20)
        self.assertIn("start kvmanagerd", str(error))

    def test_a_daemon_that_is_gone_is_to_be_started_or_reconnected_to(self) -> None:
        with Daemon() as daemon, kv.connect(daemon.listen, connect_ms=20) as client:
            daemon.kill()
            self.assertIn("reconnect()", str(self.refused(kv.UnavailableError, client.ping)))
            self.assertIn("start kvmanagerd", str(self.refused(kv.UnavailableError, client.reconnect)))

    def test_a_peer_that_is_not_there_costs_no_lease(self) -> None:
        sequence = self.cache.create_sequence()
        error = self.refused(kv.UnavailableError, sequence.hand_off, "127.0.0.1:1")
        self.assertIn("if client.connected is False", str(error))
        self.assertTrue(self.client.connected)
        self.assertEqual(sequence.info().tokens, 0)

    def test_a_gpu_that_is_not_there(self) -> None:
        error = self.refused(kv.FailedPreconditionError, self.client.open_device, 0)
        self.assertIn("--device-pool-bytes", str(error))
        with self.assertRaises(kv.Error):
            self.client.open_cache(**MODEL, device=0)

    def test_a_cache_belongs_to_host_or_gpu(self) -> None:
        class OnGpu:
            shape, dtype, is_cuda = (1, 2, 64), "torch.float16", True

            def data_ptr(self) -> int:
                return 64

            def is_contiguous(self) -> bool:
                return True

        sequence = self.cache.create_sequence()
        error = self.refused(kv.InvalidArgumentError, self.cache.step, 0, [(sequence, 0, 1)], OnGpu(), OnGpu())
        self.assertEqual((error.field, error.value), ("k", "on a GPU"))

    def test_another_thread_is_told_so(self) -> None:
        found: list[kv.Error] = []
        sequence = self.cache.create_sequence()
        k = numpy.zeros((1, 2, 64), numpy.float16)

        def work() -> None:
            for call in (self.client.ping, self.cache.refresh, sequence.fork, sequence.close, self.client.close,
                         lambda: self.client.create_arena(4096), lambda: self.cache.step(0, [(sequence, 0, 1)], k, k),
                         lambda: pending.wait()):
                try:
                    call()
                except kv.Error as error:
                    found.append(error)

        pending = self.cache.step_async(0, [(sequence, 0, 1)], k, k)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.assertEqual([type(error) for error in found], [kv.FailedPreconditionError] * 8)
        self.assertTrue(all("client per thread" in str(error) for error in found))
        pending.wait()  # nothing has changed
        self.cache.step(0, [(sequence, 1, 1)], k, k)

    def test_closed_handles_say_so(self) -> None:
        sequence = self.cache.create_sequence()
        sequence.close()
        sequence.close()
        self.assertIn("closed", str(self.refused(kv.FailedPreconditionError, sequence.info)))
        self.client.close()
        for call in (self.client.ping, self.cache.refresh, lambda: self.client.connected, self.client.reconnect):
            self.assertIn("closed", str(self.refused(kv.FailedPreconditionError, call)))


if __name__ == "__main__":
    unittest.main()
