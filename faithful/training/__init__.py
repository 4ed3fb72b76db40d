"""What a script may do to a prepared model, from `prepare` to `end_training`, and what keeps training in step with it.
It imports no strategy and no backend: they call it, or `live.py` calls their methods. It knows no files."""
