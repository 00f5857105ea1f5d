"""Engines: a model, in torch or exported, that computes the answers for batches of pixels."""
