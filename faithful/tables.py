"""Strategies and backends are modules with the same functions; a module holds only those in which it differs."""

import functools
import importlib
from types import SimpleNamespace


@functools.cache
def functions(package, name):
    """The functions of `faithful/<package>/<name>.py`, and those of `plain.py` beside it that it does not define."""
    default = importlib.import_module(f"faithful.{package}.plain")
    own = importlib.import_module(f"faithful.{package}.{name}")
    return SimpleNamespace(**{**vars(default), **vars(own)})
