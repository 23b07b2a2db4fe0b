"""Keys and values of transformers' models in kvmanagerd: a Cache, and the attention function `kvmanager`.

    import kvmanager.transformers as kvt                     # registers the attention function

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvmanager")
    kv = kvt.attach(model, "unix:/run/kvmanager/kvmanager.sock", codec="hack:k_bits=4,v_bits=3")
    with kv.cache(input_ids, attention_mask) as cache:       # begins with the prefix that the daemon has
        model.generate(input_ids, attention_mask=attention_mask, past_key_values=cache)

For decoders whose attention is causal softmax attention over all tokens (Llama, Mistral, Qwen and their like), or in
some layers over a window (Gemma 3, gpt-oss), batch rows padded on the left. Attention runs in the daemon on the host,
and on a GPU in this process, on the daemon's compressed pages; of layers with a window in torch, on their last keys and
values. Without gradients: torch.no_grad(), as generate() does.

An Attachment and its caches belong to the thread that made them. When the daemon goes, the call under way raises
kvmanager.UnavailableError; caches made before are void then, and attachment.cache() connects again.
"""

from kvmanager.transformers.attachment import Attachment, Claimed, attach
from kvmanager.transformers.attention import register
from kvmanager.transformers.cache import KvCache
from kvmanager.transformers.fold import fold_output_weights

register()

__all__ = ["Attachment", "Claimed", "KvCache", "attach", "fold_output_weights"]
