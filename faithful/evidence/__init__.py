"""What shows that a run is what its config says: counts on live tensors (evidence.py), hashes of the first samples
(batch.py), bytes sent in a step (communication.py), and the record that is written of all of it (record.py). It may
import plan, strategies and backends. It changes nothing."""
