"""What happens between `prepare` and `end_training`: the prepared model, steps, loaders. It may import evidence,
strategies and backends; it knows nothing of files and checkpoints."""
