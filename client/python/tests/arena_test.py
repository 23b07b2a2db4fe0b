"""Arenas: views without a copy, by every protocol, and memory that outlives its lease."""

from __future__ import annotations

import gc
import unittest

import kvmanager as kv
import numpy
from kvmanager_testing import Daemon
from reference import MODEL, Prompt, attention


class OtherLibrary:
    """A tensor that has DLPack alone."""

    def __init__(self, array) -> None:
        self.array = array

    def __dlpack__(self, **named):
        return self.array.__dlpack__()


class Arenas(unittest.TestCase):
    def setUp(self) -> None:
        self.daemon = self.enterContext(Daemon(host_pool="256MiB"))
        self.client = self.enterContext(kv.connect(self.daemon.listen))
        self.cache = self.client.open_cache(**MODEL)

    def test_numpy_and_dlpack_give_the_same_memory(self) -> None:
        tensor = self.client.create_arena(5000).tensor((3, 4), "float32", offset=64)
        self.assertEqual(tensor.arena.nbytes, 8192)
        view = tensor.numpy()
        view[:] = numpy.arange(12).reshape(3, 4)
        same = numpy.from_dlpack(tensor)
        self.assertTrue(numpy.shares_memory(view, same))
        numpy.testing.assert_array_equal(same, view)
        self.assertEqual(tensor.__dlpack_device__(), (1, 0))
        capsule = tensor.__dlpack__(max_version=(1, 0))
        self.assertIn("dltensor_versioned", repr(capsule))
        del capsule  # nobody took it
        self.assertRaises(BufferError, tensor.__dlpack__, copy=True)
        self.assertRaises(AttributeError, lambda: tensor.__cuda_array_interface__)

    def test_what_does_not_fit_into_a_message_goes_by_arena(self) -> None:
        tokens = 80000  # 20 MiB each of k and v, 40 MiB together; a message has 32 MiB at most
        k = self.client.create_arena(tokens * 256).tensor((tokens, 2, 64), "float16")
        v = self.client.create_arena(tokens * 256).tensor((tokens, 2, 64), "float16")
        k.numpy()[:], v.numpy()[:] = 0.5, 0.25
        sequence = self.cache.create_sequence()
        with self.assertRaises(kv.InvalidArgumentError) as caught:
            self.cache.step(0, [(sequence, 0, tokens)], k.numpy().copy(), v.numpy().copy())
        self.assertIn("arena", str(caught.exception))
        self.cache.step(0, [(sequence, 0, tokens)], k, v)
        out = self.client.create_arena(4096).tensor((1, 8, 64), "float32")
        q = numpy.ones((1, 8, 64), numpy.float32)
        self.cache.step(0, [(sequence, tokens - 1, 1)], q=q, out=out)
        numpy.testing.assert_allclose(out.numpy(), 0.25, atol=1e-3)

    def test_slices_of_a_view_are_found_in_the_arena_or_copied(self) -> None:
        prompt = Prompt(1, 20)
        k = self.client.create_arena(1 << 20).tensor((40, 2, 64), "float16").numpy()
        k[7:27] = prompt.k[0]
        sequence = self.cache.create_sequence()
        self.cache.step(0, [(sequence, 0, 20)], k[7:27], prompt.v[0])
        room = self.client.create_arena(1 << 20).tensor((100000,), "float32").numpy()
        for first in (0, 16, 3):  # 3: no multiple of 64 bytes
            q, out = room[first : first + 512].reshape(1, 8, 64), room[8000 + first : 8512 + first].reshape(1, 8, 64)
            q[:] = prompt.q[-1:]
            self.cache.step(0, [(sequence, 19, 1)], q=q, out=out)
            want, _ = attention(prompt.k[0], prompt.v[0], prompt.q[-1:], 19)
            numpy.testing.assert_allclose(out, want, atol=2e-3)

    def test_tensors_of_other_libraries_come_by_dlpack(self) -> None:
        prompt = Prompt(2, 20)
        sequence = self.cache.create_sequence()
        self.cache.step(0, [(sequence, 0, 20)], OtherLibrary(prompt.k[0]), OtherLibrary(prompt.v[0]))
        k, v = numpy.zeros_like(prompt.k[0]), numpy.zeros_like(prompt.k[0])
        self.cache.read(0, [(sequence, 0, 20)], OtherLibrary(k), v)
        numpy.testing.assert_array_equal(k, prompt.k[0])
        turned = OtherLibrary(numpy.zeros((64, 2, 20), numpy.float16).transpose())
        self.assertRaises(kv.InvalidArgumentError, self.cache.read, 0, [(sequence, 0, 20)], turned, v)

    def test_memory_outlives_its_lease(self) -> None:
        arena = self.client.create_arena(4096)
        view, other = arena.tensor(1024).numpy(), numpy.from_dlpack(arena.tensor(1024))
        view[:] = 3
        arena.close()
        del arena
        gc.collect()
        view[5] = 4
        self.assertEqual((other[4], other[5]), (3, 4))
        self.client.close()
        self.daemon.kill()
        self.assertEqual(view[6] + other[5], 7)
        self.daemon.start()

    def test_a_closed_arenas_tensors_are_copied(self) -> None:
        prompt = Prompt(3, 20)
        arena = self.client.create_arena(1 << 20)
        k = arena.tensor((20, 2, 64), "float16").numpy()
        k[:] = prompt.k[0]
        arena.close()
        arena.close()
        sequence = self.cache.create_sequence()
        self.cache.step(0, [(sequence, 0, 20)], k, prompt.v[0])
        back = numpy.zeros_like(k)
        self.cache.read(0, [(sequence, 0, 20)], back, numpy.zeros_like(k))
        numpy.testing.assert_array_equal(back, prompt.k[0])

    def test_shapes_that_do_not_fit_are_refused(self) -> None:
        arena = self.client.create_arena(4096)
        for field, arguments in (("offset", (4, "float32", 32)), ("offset", (4, "float32", -64)),
                                 ("shape", (1025, "float32")), ("shape", ((-1, 3), "float32")),
                                 ("shape", ((1,) * 9, "float32")), ("dtype", (4, "float64")),
                                 ("shape", (0, "float32", 8192))):
            with self.assertRaises(kv.InvalidArgumentError) as caught:
                arena.tensor(*arguments)
            self.assertEqual(caught.exception.field, field)
        self.assertEqual(arena.tensor((2, 0), "float16").numpy().shape, (2, 0))
        self.assertRaises(kv.InvalidArgumentError, self.client.create_arena, 0)

    def test_there_are_none_over_tcp(self) -> None:
        with Daemon(listen="tcp:127.0.0.1:0") as far, kv.connect(far.listen) as client:
            with self.assertRaises(kv.FailedPreconditionError) as caught:
                client.create_arena(4096)
            self.assertIn("inline tensors", str(caught.exception))
            cache, prompt = client.open_cache(**MODEL), Prompt(4, 30)
            sequence = cache.create_sequence()
            prompt.append(cache, sequence)
            out = numpy.zeros_like(prompt.q[-1:])
            cache.step(1, [(sequence, 29, 1)], q=prompt.q[-1:], out=out)
            want, _ = attention(prompt.k[1], prompt.v[1], prompt.q[-1:], 29)
            numpy.testing.assert_allclose(out, want, atol=2e-3)


if __name__ == "__main__":
    unittest.main()
