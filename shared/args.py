"""A dataclass becomes the command line.

Each field is an option, its default the default, the comment behind it the help text:

    learning_rate: float = 2e-3  # peak, after the warm-up

Options are spelled with underscores or dashes. Import costs matter at start-up, so this is argparse and nothing else.
"""

import argparse
import dataclasses
import inspect
import os
import re
import sys
import types
import typing


class Refused(Exception):
    """A user's mistake: what was asked, what is there, what to do. Printed as it is, without a traceback."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """Every rank parses the same line; only the first of each launch says what is wrong with it."""

    def error(self, message):
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {message} (--help lists the options)", file=sys.stderr)
        sys.exit(2)


def parse(cls, argv=None):
    """The dataclass `cls`, filled from `argv` (default: the command line). Exits with 2 on a bad option."""
    source = inspect.getsource(cls)
    types_of = typing.get_type_hints(cls)
    parser = Parser(description=(inspect.getmodule(cls).__doc__ or "").strip(), allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    for field in dataclasses.fields(cls):
        comment = re.search(rf"^ +{field.name}\b[^#\n]*#(.*)$", source, re.M)
        help = f"{comment.group(1).strip() if comment else ''} (default: {field.default})".replace("%", "%%").strip()
        flags = sorted({f"--{field.name}", f"--{field.name.replace('_', '-')}"})
        kind = types_of[field.name]
        if isinstance(kind, types.UnionType):  # `int | None`
            kind = next(t for t in kind.__args__ if t is not type(None))
        if kind is bool:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, default=field.default, help=help)
        elif typing.get_origin(kind) is typing.Literal:
            parser.add_argument(*flags, choices=typing.get_args(kind), default=field.default, help=help)
        else:
            parser.add_argument(*flags, type=kind, default=field.default, metavar=kind.__name__.upper(), help=help)
    return cls(**vars(parser.parse_args(argv)))


def key_values(text, allowed):
    """`"init_scale=1024,growth_interval=100"` -> {"init_scale": 1024.0, ...}; `allowed` maps each key to its type."""
    values = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        try:
            values[key] = allowed[key](value)
        except (KeyError, ValueError):
            keys = ", ".join(f"{k}={t.__name__}" for k, t in allowed.items())
            raise Refused(f"{item!r} is not one of {keys}") from None
    return values
