"""What a script may do to a model, before `prepare` and after, and what keeps training in step with it: its blocks, the
dtype of its weights, averages of them, writes into shards, and what an optimizer does with each element. It may import
config and tensors. It knows no strategy and no backend: they call it."""
