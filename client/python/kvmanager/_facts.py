"""What a model's configuration says of positions, as text for CacheOptions.rope. All connectors use this one function,
so that they name one model's blocks alike."""

from __future__ import annotations

import hashlib
import json
from typing import Any

TEXT_BYTES_MAX = 256  # of each name that the daemon takes

_OTHER_NAMES = {"su": "longrope", "mrope": "default"}
_FROM_ORIGINAL = ("dynamic", "llama3", "longrope", "yarn")  # types that depend on the context of pretraining
_FROM_LONGEST = ("dynamic", "longrope")  # and on the longest context
_BESIDE = ("no_rope_layers", "rope_interleave", "rope_interleaved", "rotary_dim")  # of the configuration itself


def fits(text: str) -> str:
    """Text that is too long for the daemon, or not printable, stands as its digest."""
    plain = len(text.encode()) <= TEXT_BYTES_MAX and text.isprintable()
    return text if plain else "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def position_facts(config: Any) -> str:
    """Canonical JSON of the RoPE settings of a transformers configuration, and of its sliding window; its digest where
    it is longer than the daemon takes. Empty: the configuration has none.

    Settings mean the same in each form that versions of transformers write: `rope_theta` and `rope_scaling`,
    `rope_parameters`, and parameters by type of layer. Each version's form gives the same text."""
    facts = {name: getattr(config, name, None) for name in _BESIDE}
    facts["rope"] = _rope(config)
    facts |= _windows(config)
    facts = _canonical(facts)
    return fits(json.dumps(facts, sort_keys=True, separators=(",", ":"))) if facts else ""


def _rope(config: Any) -> dict[str, Any]:
    given = getattr(config, "rope_parameters", None) or {}
    scaling = getattr(config, "rope_scaling", None) or {}
    by_type = given if _is_nested(given) else scaling if _is_nested(scaling) else None
    if by_type is None:
        flat = _of_one(config, {**scaling, **given})
        local = getattr(config, "rope_local_base_freq", None)  # Gemma 3 in the form of transformers 4
        if local is None or not flat:
            return flat
        return {"full_attention": flat, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    return {kind: _of_one(config, one) for kind, one in by_type.items() if one}


def _is_nested(parameters: dict[str, Any]) -> bool:
    return any(isinstance(each, dict) for each in parameters.values())


def _of_one(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Parameters as transformers completes them."""
    facts = {name: value for name, value in given.items() if name != "type"}
    if facts.get("rope_theta") is None:
        facts["rope_theta"] = getattr(config, "rope_theta", None)
    if not given and facts["rope_theta"] is None:
        return {}
    kind = given.get("rope_type") or given.get("type") or "default"
    facts["rope_type"] = kind = _OTHER_NAMES.get(kind, kind)
    if facts.get("partial_rotary_factor") is None:
        facts["partial_rotary_factor"] = getattr(config, "partial_rotary_factor", None)
    if facts["partial_rotary_factor"] == 1:
        facts["partial_rotary_factor"] = None
    longest = getattr(config, "max_position_embeddings", None)
    if kind in _FROM_ORIGINAL:
        own = getattr(config, "original_max_position_embeddings", None)
        facts["original_max_position_embeddings"] = own or facts.get("original_max_position_embeddings") or longest
    if kind in _FROM_LONGEST:
        facts["max_position_embeddings"] = longest
    return facts


def _windows(config: Any) -> dict[str, Any]:
    """K and V behind the first layer depend on what queries attend to."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or getattr(config, "use_sliding_window", None) is False:
        return {}
    if types is None:
        return {"sliding_window": window}
    layers = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    every = len(layers) == len(types)
    return {"sliding_window": window, "sliding_layers": None if every else layers} if layers else {}


def _canonical(value: Any) -> Any:
    """None and what is empty is left out, and 1.0 is 1: files differ in these."""
    if isinstance(value, dict):
        each = {str(name): _canonical(of) for name, of in value.items()}
        return {name: of for name, of in each.items() if of is not None and of != {}}
    if isinstance(value, (list, tuple)):
        return [_canonical(of) for of in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
