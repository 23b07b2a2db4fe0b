"""Quality of codecs on a Hugging Face model: python -m kvmanager.evaluate (docs/calibration.md).

The model runs through kvmanager.transformers and a daemon, once per codec: perplexity against raw, and accuracy at tasks
that retrieve what stands far back.
"""
