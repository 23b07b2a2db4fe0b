"""Calibration of a Hugging Face model: python -m kvmanager.calibrate (docs/calibration.md).

Runs the model on windows of text with transformers, writes Q, K and V as a capture, lets `kvctl calibrate` train on it,
probes the model for what an error costs in each layer and side, chooses defaults, and measures them on held-out windows.
"""
