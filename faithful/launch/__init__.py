"""The processes of a run: how they find each other and end with their launcher (launcher.py), what all have to be
started with (same_start.py), signals, one-line errors and exit codes (process.py), the end of a run that is told to
stop (deadline.py), what all of them have called and whether they wait for each other (rank_sync.py), what is printed
(printing.py). It may import config. It knows of training only what the Accelerator answers."""
