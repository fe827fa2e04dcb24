"""Figures from plain results: numbers, lists and dicts in, a Chart out."""
