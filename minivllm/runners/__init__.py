"""Runners: one step of the model, for each way of keeping K and V."""
