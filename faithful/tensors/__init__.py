"""Tensors by themselves: names, shards, sizes and hashes (names.py), Python values as tensors (serialization.py), and
states of low-bit optimizers (low_bit.py). It may import errors; it knows no strategy, no backend and no run."""
