"""What every script of this folder does at its end, so that its runs can be compared."""

import json
from hashlib import sha256
from pathlib import Path


def tell(accelerator, model, folder, trainer=None):
    """Writes the weights, as a trainer does, and for each process a hash of those that it has."""
    trainer.save_model(f"{folder}/weights") if trainer else accelerator.save_model(model, f"{folder}/weights")
    values = accelerator.unwrap_model(model).state_dict()
    values = {name: getattr(value, "_local_tensor", value).float().cpu() for name, value in values.items()}
    text = repr([(name, value.numpy().tobytes()) for name, value in sorted(values.items())])
    path = Path(folder, f"rank{accelerator.process_index}.json")
    path.write_text(json.dumps({"processes": accelerator.num_processes, "weights": sha256(text.encode()).hexdigest()}))
