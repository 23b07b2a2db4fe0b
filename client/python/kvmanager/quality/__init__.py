"""How much a codec costs a model: perplexity over held-out text and retrieval tasks, each paired with raw.

protocol: models, windows of text, losses, paired standard errors, results on disk, tables and drawings.
tasks: passkey, lookup and copy.

Needs torch and transformers, no daemon: what runs a model is given by the caller (protocol.Forward), be it attention in
the daemon (kvmanager.transformers) or a codec's arithmetic in torch.
"""
