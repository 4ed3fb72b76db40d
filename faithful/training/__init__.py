"""The prepared model and optimizer, and the steps: finite losses and norms, clipping, data loaders that can go on in
the middle of an epoch. It may import evidence, strategies and backends. It writes no files."""
