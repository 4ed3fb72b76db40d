"""Looks up a strategy or backend: a module that defines the functions in which it differs from `plain.py`."""

import functools
import importlib
from types import SimpleNamespace


class Functions(SimpleNamespace):
    """The functions of one file. Pickled as the names of both, because modules cannot be pickled."""

    def __reduce__(self):
        return functions, self.found_by


@functools.cache
def functions(package, name):
    """The functions of `faithful/<package>/<name>.py`; those that it lacks come from `plain.py` in the same folder."""
    default = importlib.import_module(f"faithful.{package}.plain")
    own = importlib.import_module(f"faithful.{package}.{name}")
    return Functions(**{**vars(default), **vars(own)}, found_by=(package, name))
