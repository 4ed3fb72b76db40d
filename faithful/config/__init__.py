"""What a config asks for, and whether it can be: the keys that Accelerate has (schema.py), the config of a file or of
the launcher's environment (config.py, config_file.py, deepspeed_file.py), every reason for which it cannot run
(rules.py), and what the machine has (machine.py). It may import disk and errors. It knows no model."""
