"""Files that others may have written, and files that are replaced: from a name in a file to a path (names.py), what a
JSON file of ours must hold (readers.py), what a user's file of settings may be (documents.py), how files take the place
of others (replacing.py). It may import errors only; it knows nothing of checkpoints and runs. Nothing from a file is
trusted: a run's folder may come from anyone."""
