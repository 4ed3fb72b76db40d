"""Turns a dataclass into a command line.

Each field is an option. Its default is the option's default, and the comment behind it is the help text:

    learning_rate: float = 2e-3  # peak, after the warm-up

Options are spelled with underscores or dashes. This module imports no torch, so that the start stays fast.
"""

import argparse
import dataclasses
import difflib
import inspect
import os
import re
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

if typing.TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker
    from accelerate.utils import GradScalerKwargs
    from torch.utils.data import DataLoader
    from tqdm.auto import tqdm

Options = typing.TypeVar("Options")  # the dataclass of a recipe's options
Schedule = typing.Literal["cosine", "linear", "constant_with_warmup"]  # of transformers' SchedulerType


class Refused(Exception):
    """A user's mistake: a message that says what was asked, what is there and what to do, printed without traceback.
    It may repeat what a file of anyone's says, so its lines are made printable."""

    exit_code = 2

    def __init__(self, *lines: object) -> None:
        super().__init__(*("\n".join(short(part, 2000) for part in str(line).split("\n")) for line in lines))


@dataclasses.dataclass
class Run:
    """Options of every recipe that don't change what is computed. A resumed run may change them."""

    config: str | None = None  # a YAML or JSON file of `option: value`; the command line wins
    output_dir: str | None = None  # default: runs/<recipe>-<config>-<time>
    resume_from_checkpoint: str | None = None  # latest (in output_dir), or a checkpoint folder
    logging_steps: int = 10  # optimizer steps
    eval_steps: int = 100  # optimizer steps; 0 means only at the end
    save_steps: int = 100  # optimizer steps; 0 means only when stopped by SIGTERM
    save_total_limit: int = 2  # complete checkpoints kept
    load_best_model_at_end: bool = False  # model/ is that of the best checkpoint, which is kept whatever its age
    metric_for_best_model: str | None = None  # a name of an evaluation; default: eval_loss
    greater_is_better: bool | None = None  # default: not for a loss or a perplexity
    per_device_eval_batch_size: int = 64  # samples per process
    dataloader_num_workers: int = 0  # processes that load data, per training process
    deterministic: bool = False  # GPU: kernels that give the same bits in each run, slower; torch refuses what has none
    report_to: str | None = None  # tensorboard, trackio or wandb; metrics.jsonl is always written
    push_to_hub: bool = False  # upload the finished model to the Hugging Face Hub; needs its token
    hub_model_id: str | None = None  # the repository: owner/name, or a name; default: the name of output_dir
    hub_private_repo: bool = False  # make that repository private


# The least and the greatest value of each option that is a number, in all recipes and in --grad_scaler. None: no bound
# that one would meet by mistake. An option of your own without a row takes every finite number.
RANGES: dict[str, tuple[float, float | None]] = {
    "logging_steps": (0, None), "eval_steps": (0, None), "save_steps": (0, None), "save_total_limit": (1, None),
    "per_device_eval_batch_size": (1, None), "per_device_train_batch_size": (1, None),
    "dataloader_num_workers": (0, 1024), "image_size": (1, 1 << 16), "freeze": (0, None), "layer_decay": (0, 1),
    "dropout": (0, 1), "label_dropout": (0, 1), "skip_broken": (0, None), "learning_rate": (0, None),
    "weight_decay": (0, None), "ema_decay": (0, 1), "warmup_steps": (0, None), "max_steps": (1, None),
    "num_train_epochs": (0.001, None), "temperature": (1e-3, None), "beta": (1e-6, None),
    "gradient_accumulation_steps": (1, None), "max_grad_norm": (0, None), "guidance": (0, None),
    "sequence_length": (1, 1 << 24), "vocab_size": (0, 1 << 24), "lora_rank": (0, 1 << 16), "lora_alpha": (1, None),
    "seed": (0, 2**31 - 1),  # NumPy takes 32 bits, and Accelerate may add the number of a process
    "init_scale": (1e-30, None), "growth_factor": (1.000001, None),
    "backoff_factor": (1e-30, 0.999999), "growth_interval": (1, None),
}  # fmt: skip
MOST = 2**31 - 1  # of a number without a bound
QUIET = 4  # seconds after which a log gets a line; who looks once a second leaves it without one for five


def number(kind: type[int] | type[float], least: float = -MOST, most: float | None = None) -> Callable[[str], float]:
    """The `type` of an option, for argparse: an int or a float from `least` to `most`."""
    greatest = most if most is not None else MOST if kind is int else sys.float_info.max
    words = f" from {least} to {most}" if most is not None else f", {least} or more" if least != -MOST else ""

    def parsed(text: str) -> float:
        try:
            value = kind(text) if len(text) < 30 else None  # Python refuses to read thousands of digits
        except ValueError:
            value = None
        if value is None or not least <= value <= greatest:  # nan is in no range
            raise argparse.ArgumentTypeError(f"{short(text)} is not a {'whole ' * (kind is int)}number{words}")
        return value

    return parsed


def short(text: str, most: int = 60) -> str:
    """The text on one line, of at most so many characters."""
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


class Parser(argparse.ArgumentParser):
    """All ranks parse the same line; only rank 0 prints what is wrong with it."""

    def __init__(self, description: str | None = None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, allow_abbrev=False, formatter_class=formatter)

    def error(self, message: str) -> typing.NoReturn:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {short(with_hint(self, message), 2000)} (--help lists the options)", file=sys.stderr)
        sys.exit(2)


def with_hint(parser: argparse.ArgumentParser, message: str) -> str:
    """The parser's message; if it does not know an option, with the one that ends so, or is spelled most like it."""
    option, known = "".join(message.split()[2:3]).split("=")[0], list(parser._option_string_actions)
    close = [name for name in known if name.endswith(f"_{option[2:]}")] or difflib.get_close_matches(option, known, 1)
    return f"{message}: did you mean {close[0]}?" if close and message.startswith("unrecognized") else message


def parse(cls: type[Options], argv: Sequence[str] | None = None) -> Options:
    """Fills the dataclass `cls` from `argv` (default: the command line). Exits with code 2 on a bad option."""
    args = cls(**values_of(parser_of(cls), sys.argv[1:] if argv is None else argv))
    if str(getattr(args, "dtype", None)).endswith("16"):
        os.environ.setdefault("FAITHFUL_KEEP_DTYPE", "1")  # faithful's word for: the parameters are meant to be so
    for name in ("push_to_hub", "hub_model_id", "hub_private_repo"):
        if value := getattr(args, name, None):
            os.environ[f"FAITHFUL_{name.upper()}"] = str(value)  # faithful's word for it: it pushes
            if "faithful" not in sys.modules:
                Parser().error(f"--{name}: not with Accelerate's own Accelerator; hf upload NAME RUN_FOLDER/model")
    if getattr(args, "deterministic", False):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it begins
    return args


def values_of(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, typing.Any]:
    """{option: value} of a command line, and of the file that its --config names."""
    values = vars(parser.parse_args(argv))
    if values.get("config"):
        values = vars(parser.parse_args([*words_of(values["config"], parser), *argv]))
    epochs, steps = values.get("num_train_epochs"), values.get("max_steps")
    if epochs is not None and steps != parser.get_default("max_steps"):
        parser.error(f"--num_train_epochs {epochs} and --max_steps {steps}: give one of them")
    if values.get("load_best_model_at_end"):
        evals, saves = values["eval_steps"], values["save_steps"]
        if not evals or not saves or saves % evals:
            parser.error(
                f"--load_best_model_at_end needs an evaluation of each checkpoint, and --save_steps {saves} is no "
                f"multiple of --eval_steps {evals}"
            )
    elif values.get("metric_for_best_model") or values.get("greater_is_better") is not None:
        parser.error("--metric_for_best_model and --greater_is_better need --load_best_model_at_end")
    return values


def words_of(file: str, parser: argparse.ArgumentParser) -> list[str]:
    """The options in a YAML or JSON file, as words of a command line: their values are the texts that stand there."""
    import yaml

    words, at = {}, Path(file)
    try:
        if not at.is_file() or at.stat().st_size > 1 << 16:  # a pipe would be waited for
            raise OSError("it is longer than 65,536 bytes" if at.is_file() else "no such file")
        lines = yaml.compose(at.read_text(), yaml.SafeLoader)  # pyrefly: ignore[bad-argument-type]
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        parser.error(f"--config {file} cannot be read: {' '.join(str(error).split())}")
    for key, value in lines.value if isinstance(lines, yaml.MappingNode) else [(None, None)]:
        if not isinstance(value, yaml.ScalarNode):
            parser.error(f"--config {file} does not hold `option: value` lines alone")
        option = f"--{key.value}"
        if option not in parser._option_string_actions or option in ("--config", "--help"):
            parser.error(f"unrecognized arguments: {option} in {file}")
        if option in words:
            parser.error(f"--config {file} has {key.value} twice")
        words[option] = f"{option}={value.value}"
        if isinstance(parser._option_string_actions[option], argparse.BooleanOptionalAction):
            words[option] = {"true": option, "false": f"--no-{key.value}"}.get(value.value.lower(), words[option])
        elif value.value in ("", "null", "~"):  # as if it were not there
            words[option] = ""
    return list(filter(None, words.values()))


def parser_of(cls: type, kind: type[Parser] = Parser) -> Parser:
    """The parser, of this kind, for the options of the dataclass `cls`: its own first, then those that it inherits."""
    source = "".join(map(inspect.getsource, cls.__mro__[:-1]))
    types_of = typing.get_type_hints(cls)
    parser = kind((sys.modules[cls.__module__].__doc__ or "").strip())
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__):
        comment = re.search(rf"^ +{field.name}\b[^#\n]*#(.*)$", source, re.M)
        help = f"{comment.group(1).strip() if comment else ''} (default: {field.default})".replace("%", "%%").strip()
        flags = sorted({f"--{field.name}", f"--{field.name.replace('_', '-')}"})
        of_type = types_of[field.name]
        if isinstance(of_type, types.UnionType):  # `int | None`
            of_type = next(member for member in of_type.__args__ if member is not type(None))
        if of_type is bool:
            how: dict[str, typing.Any] = {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(of_type) is typing.Literal:
            how = {"choices": typing.get_args(of_type)}
        else:
            of_text = number(of_type, *RANGES.get(field.name, (-MOST, None))) if of_type in (int, float) else of_type
            how = {"type": of_text, "metavar": of_type.__name__.upper()}
        parser.add_argument(*flags, default=field.default, help=help, **how)
    return parser


def that_count(args: Run) -> dict[str, typing.Any]:
    """{option: value} of the options that change what is computed."""
    return {key: value for key, value in dataclasses.asdict(args).items() if key not in Run.__annotations__}


def given(args: Run) -> dict[str, typing.Any]:
    """{option: value} of the options that have a value, for trackers and the record."""
    return {key: value for key, value in dataclasses.asdict(args).items() if value is not None}


def grad_scaler(text: str) -> "list[GradScalerKwargs]":
    """Accelerate's handlers for fp16's gradient scaler, from `"init_scale=1024,growth_interval=100"`; "" means none."""
    from accelerate.utils import GradScalerKwargs

    kinds = {"init_scale": float, "growth_factor": float, "backoff_factor": float, "growth_interval": int}
    try:
        pairs = [item.split("=") for item in text.split(",") if item]
        values: dict[str, typing.Any] = {key: number(kinds[key], *RANGES[key])(value) for key, value in pairs}
    except argparse.ArgumentTypeError as error:
        Parser().error(f"--grad_scaler {short(text)}: {error}")  # there is no Accelerator yet
    except (KeyError, ValueError):
        keys = ", ".join(f"{key}={kind.__name__}" for key, kind in kinds.items())
        Parser().error(f"--grad_scaler {short(text)!r} is not one of {keys}")
    return [GradScalerKwargs(**values)] if values else []


def trackers(report_to: str | None) -> "list[GeneralTracker | str]":
    """The trackers for `accelerator.log`: the console and, if --report_to names one, a tracker of Accelerate."""
    from accelerate.tracking import GeneralTracker
    from tqdm.auto import tqdm

    class Console(GeneralTracker):
        name, requires_logging_directory, tracker = "console", False, None

        def log(self, values: dict[str, typing.Any], step: int | None = None, **kwargs: object) -> None:
            Lines.logged = time.monotonic()
            tqdm.write(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))

    return [Console(), *([report_to] if report_to else [])]


class Lines:
    """Where a bar goes in a log: a line of it whenever nothing was logged for QUIET seconds."""

    logged = time.monotonic()  # of all of them, and the console

    def write(self, text: str) -> None:
        if text.strip() and time.monotonic() - Lines.logged >= QUIET:
            Lines.logged = time.monotonic()
            print(text.strip(), file=sys.stderr, flush=True)


def bar(what: str, total: int, main: bool, step: int = 0, samples: int = 0) -> "tqdm":
    """A progress bar, on the main process. step: where it begins. samples: of one of its steps, over all processes."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        @property
        def format_dict(self) -> dict[str, typing.Any]:
            values = super().format_dict
            steps_per_second = values["rate"] or (values["n"] - values["initial"]) / max(values["elapsed"], 1e-9)
            return {**values, "speed": f", {samples * steps_per_second:.0f} samples/s" if samples else ""}

    terminal = sys.stderr.isatty()
    style = "{l_bar}{bar}| " if terminal else "{desc}: "
    style += "{n_fmt}/{total_fmt} [{elapsed}<{remaining}{speed}{postfix}]"
    if samples:
        Lines.logged = time.monotonic()  # how long the start took is no matter of training
    how: dict[str, typing.Any] = {"disable": not main or os.environ.get("TQDM_DISABLE", "") not in ("", "0")}
    how |= {"bar_format": style, "leave": terminal and samples > 0, "file": sys.stderr if terminal else Lines()}
    return Bar(desc=what, total=total, initial=step, delay=1e-3, **how)  # not before the first step, which prints


def with_bar(loader: "DataLoader", main: bool) -> Iterator[typing.Any]:
    """The batches of an evaluation, with a bar."""
    with bar("evaluation", len(loader), main) as shown:
        for batch in loader:
            yield batch
            shown.update()
