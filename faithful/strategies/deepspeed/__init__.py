"""ZeRO by DeepSpeed: the strategy (zero.py), its engine's private state (engine.py), the parameters that a script sees
(seen.py), and stand-ins for the optimizer of DeepSpeed's own file (dummies.py). Imports as strategies do."""
