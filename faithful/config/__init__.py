"""What a config asks for, and whether it can be: the keys that Accelerate has (schema.py), the config of a file
(config_file.py, of DeepSpeed's own: deepspeed.py) or of the launcher's environment (settings.py), and every reason for
which it cannot run (rules.py; fp8.py, fsdp.py, strategies.py by their keys). It may import disk and errors. It knows no
model."""
