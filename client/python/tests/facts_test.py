"""What connectors make of a model's configuration. The configurations are as versions of transformers have them."""

import hashlib
import json
import unittest
from types import SimpleNamespace

from kvmanager._facts import TEXT_BYTES_MAX, fits, position_facts

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
GEMMA3 = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)]


def config4(theta: float = 500000.0, scaling: dict | None = None, **other) -> SimpleNamespace:
    """As of transformers 4."""
    return SimpleNamespace(**dict(rope_theta=theta, rope_scaling=scaling, max_position_embeddings=131072) | other)


def config5(theta: float = 500000.0, scaling: dict | None = None, **other) -> SimpleNamespace:
    """As of transformers 5, where two names are one dictionary."""
    both = dict(scaling or dict(rope_type="default"), rope_theta=theta)
    return SimpleNamespace(**dict(rope_parameters=both, rope_scaling=both, max_position_embeddings=131072) | other)


class PositionFacts(unittest.TestCase):
    def test_versions_of_transformers_agree(self):
        for scaling in (None, LLAMA3, YARN | dict(original_max_position_embeddings=4096),
                        dict(type="linear", factor=4.0), dict(rope_type="dynamic", factor=2.0)):
            old, new = position_facts(config4(scaling=scaling)), position_facts(config5(scaling=scaling))
            self.assertEqual(old, new)
            self.assertLessEqual(len(old), TEXT_BYTES_MAX)
        self.assertEqual(position_facts(config4(theta=10000)), position_facts(config5(theta=10000.0)))
        self.assertEqual(position_facts(config4(partial_rotary_factor=0.5)),
                         position_facts(config5(scaling=dict(rope_type="default", partial_rotary_factor=0.5))))
        old = config4(1e6, rope_local_base_freq=10000.0, sliding_window=512, layer_types=GEMMA3)
        by_type = dict(full_attention=dict(rope_type="default", rope_theta=1e6),
                       sliding_attention=dict(rope_type="default", rope_theta=1e4))
        new = SimpleNamespace(rope_parameters=by_type, rope_scaling=by_type, sliding_window=512, layer_types=GEMMA3)
        self.assertEqual(position_facts(old), position_facts(new))

    def test_llama_3_is_short(self):
        """Its settings written twice were 345 bytes, which the daemon refuses."""
        text = position_facts(config5(scaling=LLAMA3))
        self.assertEqual(json.loads(text)["rope"], dict(LLAMA3, rope_theta=500000))
        self.assertNotIn(" ", text)

    def test_every_setting_counts(self):
        long = dict(rope_type="longrope", short_factor=[1.0] * 48, long_factor=[2.0] * 48,
                    original_max_position_embeddings=4096)
        by_type = dict(full_attention=dict(rope_type="default", rope_theta=1e6),
                       sliding_attention=dict(rope_type="default", rope_theta=1e4))
        nested = dict(sliding_window=512, layer_types=GEMMA3)
        configs = [
            config5(), config5(theta=1e4), config5(partial_rotary_factor=0.5), config5(partial_rotary_factor=0.25),
            config5(scaling=LLAMA3), config5(scaling=LLAMA3 | dict(factor=32.0)),
            config5(scaling=LLAMA3 | dict(original_max_position_embeddings=4096)),
            config5(scaling=YARN), config5(scaling=YARN | dict(beta_fast=31.0)),
            config5(scaling=YARN | dict(truncate=True)),
            config5(scaling=YARN | dict(attention_factor=1.5)), config5(scaling=YARN, max_position_embeddings=4096),
            config5(scaling=long), config5(scaling=long | dict(short_factor=[1.0] * 47 + [1.5])),
            config5(scaling=long, max_position_embeddings=4096),
            config5(scaling=dict(rope_type="dynamic", factor=2.0)),
            config5(scaling=dict(rope_type="dynamic", factor=2.0), max_position_embeddings=2048),
            config5(scaling=dict(rope_type="linear", factor=2.0)),
            config5(scaling=dict(rope_type="default", mrope_section=[16, 24, 24])),
            config5(no_rope_layers=[1, 1, 0]), config5(no_rope_layers=[1, 0, 1]),
            config5(sliding_window=512), config5(sliding_window=513), config5(**nested),
            config5(sliding_window=512, layer_types=GEMMA3[::-1]),
            SimpleNamespace(rope_parameters=by_type, **nested),
            SimpleNamespace(rope_parameters=by_type | dict(sliding_attention=dict(rope_type="default", rope_theta=2e4)),
                            **nested),
            SimpleNamespace(rope_parameters=by_type | dict(full_attention=dict(LLAMA3, rope_theta=1e6)), **nested),
        ]
        texts = [position_facts(config) for config in configs]
        self.assertEqual(len(set(texts)), len(configs))
        self.assertTrue(all(0 < len(text) <= TEXT_BYTES_MAX for text in texts))
        self.assertTrue(any(text.startswith("sha256:") for text in texts))

    def test_what_makes_no_difference_does_not_count(self):
        plain = position_facts(config5())
        for same in (config5(partial_rotary_factor=1.0), config5(max_position_embeddings=4096),
                     config5(sliding_window=None), config5(sliding_window=4096, use_sliding_window=False),
                     config5(sliding_window=4096, layer_types=["full_attention"] * 4),
                     config5(scaling=dict(rope_type="default", type="default", attention_factor=None))):
            self.assertEqual(position_facts(same), plain)
        self.assertEqual(position_facts(SimpleNamespace()), "")
        self.assertEqual(position_facts(None), "")

    def test_long_text_stands_as_its_digest(self):
        self.assertEqual(fits("x" * 256), "x" * 256)
        self.assertEqual(fits("x" * 257), "sha256:" + hashlib.sha256(b"x" * 257).hexdigest())
        self.assertTrue(fits("two\nlines").startswith("sha256:"))


if __name__ == "__main__":
    unittest.main()
