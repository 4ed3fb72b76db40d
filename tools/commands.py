"""The commands of ./launch.sh, and of accelerate-recipes where pip has installed this.

It imports no torch, so it is quick, and the help, lists and lines on mistyped names are there before ./launch.sh setup.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  any python3 may be asked
    print(f"error: Python 3.11 or newer is needed, this is {sys.version.split()[0]}", file=sys.stderr)
    sys.exit(2)
import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import re
import subprocess
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import faithful  # noqa: E402
from faithful.errors import Gone, working_folder_is_gone  # noqa: E402
from faithful.launch import printing  # noqa: E402
from shared import args  # noqa: E402
from shared.args import Refused  # noqa: E402
from tools import find  # noqa: E402

HELP = """Training recipes for Hugging Face Accelerate: change the config file, not the code.

{command} COMMAND ...

  demo                       train a vision transformer in two processes
  setup [--cpu] [--extra NAME]...
                             make .venv with the pinned dependencies (extras: photos, dev, trackers, ...);
                             --cpu: torch's build for CPUs, without CUDA's libraries
  CONFIG [launch options] RECIPE [recipe options]
                             e.g. {command} fsdp_bf16 --num_processes 4 vit --max_steps 100
  CONFIG [launch options] SCRIPT.py [its options]   or   -m MODULE [its options]
                             your own Accelerate script, unchanged; --config_wins: over its arguments
  launch CONFIG ...          the same
  check [CONFIG...]          every problem of every config file, without launching
  advise [--memory 80GB] [--devices 8] -- RECIPE [recipe options]
                             which config: what fits, what it costs, what is known of its loss
  compare CONFIG... -- RECIPE [recipe options]
                             the same training under each, over seeds, judged in pairs, as one HTML page
  diagnose CONFIG -- RECIPE [recipe options]
                             where FP8 hurts: each layer, and what it costs the loss
  estimate [CONFIG...] -- RECIPE [recipe options]
                             memory per process before anything is trained, and what fits
  show RUN_FOLDER            a run as a short table: results, memory, what was proved
  export RUN_FOLDER          the trained weights as plain fp32 safetensors, from any run or checkpoint
  predict RUN_FOLDER [files] the class of each image, or with --prompt how a text goes on
  copy RECIPE CONFIG DEST    a recipe with its data, models and config in a folder of its own
  CONFIG RECIPE --help       the options of a recipe
  ls                         the configs and recipes there are
  path [NAME]                the file of a config, a recipe or a page (docs/fp8.md), for other commands
  --version                  the version
  test [pytest options]      the test suite
"""
IN_CLONE = ("setup", "test")  # commands of a clone of the repository alone
TOOLS = {name: name for name in "advise check compare diagnose estimate export predict show".split()}
TOOLS["copy"] = "copy_recipe"  # copy.py would shadow Python's module
DRAW = ("compare", "diagnose")  # these tools train first, and need the packages of [recipes] at the end


def main() -> NoReturn:
    printing.survive(plainly=True)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a restarted worker gets the addresses of dead workers
    # Seconds from SIGTERM until torch's launcher kills its workers. In its 30 they could not save a model of gigabytes.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    code = None
    try:
        run(sys.argv[1:])
    except Refused as refused:
        for line in refused.args:
            print(f"error: {line}", file=sys.stderr)
        code = refused.exit_code
    sys.stdout.flush()
    sys.exit(code or ("stdout" in printing.lost) or None)


def run(words: list[str]) -> None:
    command, *rest = words or ["help"]
    if command in ("help", "-h", "--help"):
        print(help_text(), end="")
    elif command == "--version":
        print(f"accelerate-recipes {faithful.__version__}")
    elif command == "ls":
        print("\n".join(find.listing()))
    elif command == "path":
        print(path_of(*rest[:1]))
    elif command in IN_CLONE:
        in_clone(command, rest)
    elif command.startswith("-"):
        raise Refused(f"unknown option {command} ({find.COMMAND} alone prints its help)")
    elif os.name != "posix":
        raise Refused(f"{command} needs Linux, here ls, path and --version work: use WSL")
    elif working_folder_is_gone():  # there torch cannot be imported
        raise Refused(str(Gone()))
    elif command in TOOLS:
        need_packages(words, recipes=command in DRAW)
        try:
            from tools import cli

            cli.run(importlib.import_module(f"tools.{TOOLS[command]}").main, rest)
        except ModuleNotFoundError as error:
            if not error.name or error.name.partition(".")[0] in ("amp8", "faithful", "shared", "tools"):
                raise
            cure = "./launch.sh setup" if find.CLONE else "pip install 'accelerate-recipes[recipes]'"
            raise Refused(f"this {command} needs {error.name}: {cure}") from None
    elif command == "demo":
        demo(rest)
    else:
        launch(rest if command == "launch" else words)


def help_text() -> str:
    text = HELP.format(command=find.COMMAND)
    return text if find.CLONE else re.sub(rf"^  ({'|'.join(IN_CLONE)}) .*\n(   .*\n)*", "", text, flags=re.M)


def path_of(name: str = "") -> Path:
    """The file of a config or recipe, or any file of this repository that pip has installed."""
    for kind, (folder, suffix) in find.FOLDERS.items():
        if name.removesuffix(suffix) in find.names(kind):
            return folder / f"{name.removesuffix(suffix)}{suffix}"
    if (ROOT / name).exists():
        return ROOT / name
    raise Refused(f"no config, recipe or page {name}: {find.suggestion(name, 'config', 'recipe')}")


def in_clone(command: str, words: list[str]) -> None:
    if not find.CLONE:
        raise Refused(
            f"{command} is for a clone of the repository; pip installs: pip install 'accelerate-recipes[recipes]'"
        )
    if command == "setup":
        execute(ROOT / "launch.sh", command, *words)
    need_packages([command, *words])
    os.chdir(ROOT)
    # With pytest-xdist some files at once: most tests keep one core busy, many wait.
    at_once = "-n logical --maxprocesses 4 --dist loadfile".split() if importlib.util.find_spec("xdist") else []
    execute(sys.executable, "-m", "pytest", *at_once, *words)


def execute(*line: str | Path) -> NoReturn:
    """Becomes another program."""
    sys.stdout.flush()
    os.execv(line[0], [str(word) for word in line])


def need_packages(words: list[str], recipes: bool = False) -> None:
    """In a clone: makes .venv and starts again with its Python, if this one has no torch and accelerate. Where pip has
    installed this: says what the recipes lack, if they are needed."""
    if find.CLONE:
        absent = [name for name in ("torch", "accelerate") if not importlib.util.find_spec(name)]
        own = ROOT / ".venv" / "bin" / "python"
        if absent and Path(sys.executable) != own:
            if code := subprocess.call([ROOT / "launch.sh", "setup"]):
                sys.exit(code)
            execute(own, __file__, *words)
    elif recipes and (absent := packages_absent("recipes")):
        raise Refused(f"recipes need {', '.join(absent)}: pip install 'accelerate-recipes[recipes]'")


def packages_absent(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    absent = []
    for line in importlib.metadata.requires("accelerate-recipes") or ():
        if re.search(rf"extra == ['\"]{extra}['\"]", line) and (name := re.match(r"[\w.-]+", line)):
            try:
                importlib.metadata.distribution(name[0])
            except importlib.metadata.PackageNotFoundError:
                absent.append(name[0])
    return absent


def demo(words: list[str]) -> None:
    if find.option(words, "output_dir") is not None:
        raise Refused(f"demo names its own folder: {find.COMMAND} ddp_bf16 vit {' '.join(words)}")
    out = find.RUNS / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    out = out.relative_to(ROOT) if find.CLONE and Path.cwd() == ROOT else out
    launch(["ddp_bf16", "vit", "--output_dir", str(out), *words])


def launch(words: list[str]) -> None:
    """`CONFIG [launch options] RECIPE [recipe options]` as a line for `accelerate launch`, which this becomes."""
    given = list(words)
    if not words or words[0] in ("-h", "--help"):
        return print(help_text(), end="")
    config = find.config(words.pop(0))
    options, through, wins, recipe = [], [], [], None
    while words and recipe is None:  # options before the recipe are for accelerate launch
        word = words.pop(0)
        if word in ("-h", "--help"):
            return print(help_text(), end="")
        if word == "--config_wins":
            wins = [word]
        elif word in ("-m", "--module"):
            if not words:
                raise Refused(f"{word} needs a module")
            through, recipe = ["-m"], words.pop(0)
        elif not word.startswith("-"):
            recipe = word
        elif (word.startswith("--") and "=" in word) or word in find.flags():
            options.append(word)
        elif not words:
            raise Refused(f"{word} needs a value")
        elif words[0].endswith(".py") or words[0] in find.names("recipe"):
            raise Refused(f"{word} needs a value before {words[0]}")
        else:
            options += [word, words.pop(0)]
    if recipe is None:
        raise Refused(f"which recipe? {find.COMMAND} {config.stem} vit")
    if through:
        of_ours, through = False, ["-m", "faithful", *wins, "-m"]
    else:
        recipe = find.recipe(recipe)
        of_ours, knows_faithful = looked_at(recipe, words)
        # A script that does not import faithful runs with faithful's Accelerator in place of Accelerate's.
        through = [] if knows_faithful else ["-m", "faithful", *wins]
    if through and find.CLONE:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    elif wins and not through:
        os.environ["FAITHFUL_CONFIG_WINS"] = "1"
    # A copy of a recipe has its own environment, with what it imports.
    need_packages(given, recipes=of_ours and Path(recipe).resolve().is_relative_to(ROOT))
    options += rendezvous(config, options)
    options += options_missing(config, options)
    line = ["--config_file", str(config), *options, *through, str(recipe), *words]
    print("accelerate launch", *line)
    # A wrapper of accelerate's launcher: it exits with the workers' code and prints no traceback of its own.
    execute(sys.executable, ROOT / "tools" / "accelerate_launch.py", *line)


def looked_at(script: Path, words: list[str]) -> tuple[bool, bool]:
    """(whether a script is one of our recipes, whether it imports faithful). Checks the options of a recipe, as the
    processes take seconds to start, and prints them for --help."""
    try:
        text = script.read_text(errors="replace")
    except OSError as error:
        raise Refused(f"{script} cannot be read: {error.strerror}") from None
    ours = re.search(r"^class Arguments\(options", text, re.M) is not None
    if ours and {"-h", "--help"} & {*words}:
        sys.argv[0] = script.name
        args.parse(find.arguments_of(script), ["--help"])
    with contextlib.suppress(ImportError):  # of yaml, for --config, before setup
        if ours and readable(script):
            find.parse_options(script, words)
    return ours, re.search(r"^ *(from|import) faithful\b", text, re.M) is not None


def readable(recipe: Path) -> bool:
    """Whether a recipe's options can be read without the rest of it. Its user may have changed it: it checks them
    itself."""
    try:
        return bool(find.arguments_of(recipe))
    except Exception:
        return False


def rendezvous(config: Path, options: list[str]) -> list[str]:
    """The options for how processes find each other that nobody has said."""

    def said(*names: str) -> bool:
        return any(find.option(options, name) is not None for name in names)

    text, restarts, more = config.read_text(errors="replace"), said("max_restarts"), []
    if restarts and not said("rdzv_backend"):
        more += ["--rdzv_backend", "c10d"]  # torch's static rendezvous cannot restart workers
    elsewhere = re.search(r"distributed_type\"?: *['\"]?NO|^ *\"?num_machines\"?: *([2-9]|1[0-9])", text, re.M)
    if not elsewhere and not said("main_process_ip", "machine_rank", "num_machines"):
        # One machine: take a free port, so that runs don't collide. Several machines must name theirs.
        if not re.search(r'^ *"?main_process_port"?: *[0-9]', text, re.M) and not said("main_process_port"):
            more += ["--main_process_port", "0"]
        if restarts:
            os.environ["PET_STANDALONE"] = "1"  # else c10d always uses port 29400
    return more


def options_missing(config: Path, options: list[str]) -> list[str]:
    """What a config and its options leave out: the GPUs there are, the threads of offloaded steps. Exits if this config
    cannot run here."""
    from tools import check, cli

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = cli.code_of(check.main, ["--quiet", str(config), *options])
    if code:
        sys.exit(code)
    return said.getvalue().split()


if __name__ == "__main__":
    main()
