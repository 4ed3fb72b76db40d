"""The files of a checkpoint: the folder of a run, which that run owns (run_folder.py), that of a checkpoint, complete
or not there (checkpoints.py), names of tensors (tensor_keys.py), sharded tensors for another number of processes
(rows.py), weights alone (weight_files.py), and checkpoints that Accelerate wrote (accelerate_format.py). It may import
launch, disk and tensors. What a run puts in is in saving."""
