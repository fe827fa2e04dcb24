"""Replays: the engine without a model, on the lengths of real requests."""
