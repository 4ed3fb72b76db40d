"""Models that only process 0 builds: on the others they are on the meta device (meta_init.py), and each process reads
its own slices of a file (sharded_files.py). It may import config, disk and tensors. It knows no strategy."""
