"""Files that others may have written, and files that are replaced: from a name in a file to a path (names.py), what a
JSON file of ours must hold (readers.py), what a user's file of settings may be (documents.py), how a file takes the
place of another (replacing.py), or several do (folders.py). It may import errors only; it knows nothing of checkpoints
and runs. Nothing from a file is trusted: a run's folder may come from anyone."""
