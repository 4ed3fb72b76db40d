"""Tensors by themselves: names, shards, sizes and hashes (names.py), Python values as tensors (serialization.py), and
states of optimizers as plain tensors (optimizer_states.py). It may import errors; it knows no strategy, no backend and
no run."""
