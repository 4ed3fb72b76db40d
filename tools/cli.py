"""What the commands share: their parser, the words after `--`, columns, and how a refusal ends them."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import faithful
from faithful.disk import names, replacing
from faithful.launch import launcher, printing
from shared import args
from tools import find


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise args.Refused(f"{args.short(args.with_hint(self, message), 2000)} ({self.prog} --help lists the options)")


def parser(name: str, description: str | None) -> Parser:
    """A parser whose help begins with `./launch.sh <name>`, or as the command is typed here, and keeps the lines of the
    description. A bad option raises Refused."""
    return Parser(
        prog=f"{find.COMMAND} {name}",
        description=(description or "").replace("./launch.sh", find.COMMAND),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def die_with_me() -> None:
    """Called in a child before it becomes a launcher: it is killed when this process ends, even by kill -9."""
    launcher.end_with_the_parent(signal.SIGKILL)  # the workers end with their launcher


RANGES, number = args.RANGES, args.number
count = number(int, 1)  # for `add_argument(type=count)`


def split(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """(the words before `--`, those after it); the second is None without `--`."""
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def make_folder(folder: Path) -> None:
    """Makes a folder for what a command writes. Call it before the work, which would be lost at its end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise args.Refused(f"nothing can be written to {folder}: {error.strerror}") from None


def write(path: Path, text: str) -> None:
    """Writes a file that a command leaves, in one step. Raises Refused if it cannot be written."""
    make_folder(path.parent)
    try:
        replacing.write_text(path, text)
    except OSError as error:
        raise args.Refused(f"{path} cannot be written: {error.strerror or error}") from None


def columns(rows: Iterable[Iterable[object]]) -> list[str]:
    """Rows of strings as lines, in columns two spaces apart."""
    lines = [[names.printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def run(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> NoReturn:
    """Calls main(argv) and exits with the code that it returns. It is an error if what the command prints cannot be
    written, unless its reader has gone, as in `| head`."""
    printing.survive(plainly=True)
    code = code_of(main, sys.argv[1:] if argv is None else argv)
    sys.stdout.flush()
    sys.exit(code or ("stdout" in printing.lost) or None)


def code_of(main: Callable[[list[str]], int | None], argv: list[str]) -> int | None:
    """Calls main(argv) and returns its exit code. A refusal is one line for each of its arguments."""
    try:
        return main(argv)
    except (args.Refused, faithful.Refused) as refused:
        for line in refused.args:
            print(f"refused: {printing.plain(line)}", file=sys.stderr)
        return refused.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        print(f"refused: {error.filename} cannot be read or written: {error.strerror}", file=sys.stderr)
        return 2
