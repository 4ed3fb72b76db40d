"""Looks up a strategy or backend: a module that defines the functions in which it differs from `plain.py`."""

import functools
import importlib
from types import SimpleNamespace


@functools.cache
def functions(package, name):
    """The functions of `faithful/<package>/<name>.py`; those that it lacks come from `plain.py` in the same folder."""
    default = importlib.import_module(f"faithful.{package}.plain")
    own = importlib.import_module(f"faithful.{package}.{name}")
    return SimpleNamespace(**{**vars(default), **vars(own)})
