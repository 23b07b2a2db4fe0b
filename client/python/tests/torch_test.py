"""torch's tensors: views of arenas, steps on the host, and, where there is a GPU, device arenas and attention in process."""

from __future__ import annotations

import unittest

import kvmanager as kv
import torch
from kvmanager_testing import Daemon

MODEL = {"model": "m", "layers": 2, "kv_heads": 2, "query_heads": 8, "head_dim": 64}
TOKENS = 150


def attention(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Causal, of as many queries as there are keys; [tokens][heads][head_dim]."""
    group = q.shape[1] // k.shape[1]
    heads_first = [each.float().transpose(0, 1) for each in (q, k, v)]
    q, k, v = heads_first[0], *(each.repeat_interleave(group, 0) for each in heads_first[1:])
    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
    return out[0].transpose(0, 1)


def rows(heads: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.randn(TOKENS, heads, MODEL["head_dim"], device=device).to(dtype)


class OnTheHost(unittest.TestCase):
    def setUp(self) -> None:
        torch.manual_seed(1)
        self.daemon = self.enterContext(Daemon())
        self.client = self.enterContext(kv.connect(self.daemon.listen))

    def test_steps_of_each_dtype_equal_torchs_attention(self) -> None:
        for dtype, atol in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
            cache = self.client.open_cache(**MODEL, dtype=dtype)
            arena = self.client.create_arena(1 << 20)
            k, v = (arena.tensor((TOKENS, 2, 64), dtype, offset).torch() for offset in (0, 1 << 18))
            k.copy_(rows(2, dtype))
            v.copy_(rows(2, dtype))
            sequence = cache.create_sequence()
            for q in (rows(8, dtype), rows(8, torch.float32)):
                out = torch.zeros_like(q)
                if q.dtype == dtype:
                    cache.step(0, [(sequence, 0, TOKENS)], k, v, q, out)
                else:
                    cache.step(0, [(sequence, 0, TOKENS)], q=q, out=out)
                torch.testing.assert_close(out.float(), attention(k, v, q), atol=atol, rtol=atol)

    def test_views_share_memory(self) -> None:
        tensor = self.client.create_arena(4096).tensor((4, 8), "bfloat16")
        one, other = torch.from_dlpack(tensor), tensor.torch()
        one.fill_(3)
        self.assertTrue((other == 3).all())
        self.assertEqual(one.data_ptr(), tensor.data_ptr())

    def test_strides_are_refused(self) -> None:
        cache = self.client.open_cache(**MODEL)
        k = rows(2, torch.float16).transpose(0, 1)
        with self.assertRaises(kv.InvalidArgumentError) as caught:
            cache.step(0, [(cache.create_sequence(), 0, TOKENS)], k, k)
        self.assertIn(".contiguous()", str(caught.exception))

    def test_token_ids_may_be_a_tensor(self) -> None:
        cache = self.client.open_cache(**MODEL)
        self.assertEqual(cache.block_names(torch.arange(128)), cache.block_names(range(128)))


@unittest.skipUnless(torch.cuda.is_available(), "no GPU")
class OnAGpu(unittest.TestCase):
    def setUp(self) -> None:
        torch.manual_seed(1)
        self.daemon = self.enterContext(Daemon(flags=("--device-pool-bytes", "1GiB")))
        self.client = self.enterContext(kv.connect(self.daemon.listen))
        self.device = self.client.open_device(0)
        self.cache = self.client.open_cache(**MODEL, device=0)
        self.stream = torch.cuda.current_stream().cuda_stream

    def test_device_arenas_are_torchs_tensors(self) -> None:
        arena = self.device.create_arena(1 << 20)
        one, other = arena.tensor((4, 64), "float16"), arena.tensor((4, 64), "float16", 1 << 19)
        torch.from_dlpack(one).fill_(2)
        self.device.enqueue_ready(self.stream, 1)
        self.device.enqueue_wait_done(self.stream, self.device.copy(one, other, ready=1))
        self.assertTrue((torch.from_dlpack(other) == 2).all().item())
        self.assertFalse(self.device.lost)

    def test_steps_of_the_daemon(self) -> None:
        arena = self.device.create_arena(4 << 20)
        k, v, q, out = (torch.from_dlpack(arena.tensor((TOKENS, heads, 64), "float16", i << 20))
                        for i, heads in enumerate((2, 2, 8, 8)))
        for tensor in (k, v, q):
            tensor.copy_(rows(tensor.shape[1], torch.float16, "cuda"))
        self.device.enqueue_ready(self.stream, 1)
        sequence = self.cache.create_sequence()
        done = self.cache.step(0, [(sequence, 0, TOKENS)], k, v, q, out, ready=1).done
        self.device.enqueue_wait_done(self.stream, done)
        torch.testing.assert_close(out.float(), attention(k, v, q), atol=4e-3, rtol=4e-3)
        host = torch.zeros(TOKENS, 2, 64, dtype=torch.float16)
        with self.assertRaises(kv.InvalidArgumentError):
            self.cache.step(1, [(sequence, 0, TOKENS)], host, host)

    def test_attention_in_process(self) -> None:
        run = kv.InProcess(self.device, self.cache, self.stream)
        sequence = self.cache.create_sequence()
        layers = [(rows(2, torch.float16, "cuda"), rows(2, torch.float16, "cuda"), rows(8, torch.float16, "cuda"))
                  for _ in range(2)]
        run.ask([(sequence, 0, TOKENS)])
        with self.assertRaises(kv.FailedPreconditionError):
            run.append(0, *layers[0][:2])
        run.start()
        outs = []
        for layer, (k, v, q) in enumerate(layers):
            run.append(layer, k, v)
            outs.append(torch.empty_like(q))
            run.attend(layer, q, outs[-1])
        run.end()
        for (k, v, q), out in zip(layers, outs):
            torch.testing.assert_close(out.float(), attention(k, v, q), atol=4e-3, rtol=4e-3)
        with self.assertRaises(kv.InvalidArgumentError):
            run.append(0, layers[0][0].cpu(), layers[0][1])
        self.device.close()  # and the run with it
        with self.assertRaises(kv.FailedPreconditionError):
            run.end()


if __name__ == "__main__":
    unittest.main()
