"""What a config asks for, and whether it can be: the table of keys (keys.py), the config of a file (config_file.py, of
DeepSpeed's own: deepspeed.py) or of the launcher's environment (settings.py), and every reason for which it cannot run
(rules.py; strategies.py, fp8.py, fsdp.py by what they are of). It may import disk and errors. It knows no model."""
