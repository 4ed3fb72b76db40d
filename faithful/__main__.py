"""Runs an unchanged Accelerate script with faithful's Accelerator in place of Accelerate's.

    accelerate launch --config_file accelerate_configs/fsdp_fp8.yml -m faithful train.py --epochs 3
    accelerate launch --config_file accelerate_configs/ddp_bf16.yml -m faithful -m trl.scripts.sft --max_steps 100

The option --config_wins, given before the script, drops arguments of the script's Accelerator(...) that contradict
the config, and prints a line for each. Without it such a run is refused.
"""

import os
import runpy
import sys
from pathlib import Path

import faithful
from faithful import ending
from faithful.config import settings
from faithful.errors import Refused
from faithful.launch import process


def main(words: list[str]) -> None:
    if words[:1] in (["-h"], ["--help"], ["--version"]):
        print(f"faithful {faithful.__version__}" if words[0] == "--version" else str(__doc__).strip())
        return
    while words and words[0].startswith("--"):
        if words[0] != "--config_wins":
            raise Refused(
                f"python -m faithful {words[0]}: options before a script are --config_wins, --help, --version"
            )
        os.environ["FAITHFUL_CONFIG_WINS"] = "1"
        words = words[1:]
    module = words[:1] == ["-m"]
    words = words[1:] if module else words
    if not words:
        raise Refused("python -m faithful [--config_wins] SCRIPT [its arguments], or -m MODULE [its arguments]")
    if not module and not Path(words[0]).is_file():
        raise Refused(f"python -m faithful: no file {words[0]} in {os.getcwd()}")
    config = take_its_place()
    sys.argv = words
    try:
        if module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            root = str(Path(faithful.__file__).parents[1])  # of a clone, where amp8 is: perhaps `python -m`'s folder
            sys.path[:] = dict.fromkeys([str(Path(words[0]).resolve().parent), *sys.path[1:], root])
            runpy.run_path(words[0], run_name="__main__")
    finally:
        problem = sys.exc_info()[1]
        if config and not ending.made and getattr(problem, "code", problem) in (None, 0) and settings.rank() == 0:
            print("note: the script has made no Accelerator, so nothing has run as its config says", flush=True)


def take_its_place() -> str | None:
    """Replaces `Accelerator` by faithful's in each module that has imported it. Returns the config's name, if any."""
    import accelerate.accelerator

    from faithful import patches, plan
    from faithful.accelerator import Accelerator
    from faithful.scripts import trainer

    patches.silence_torchao()
    trainer.change()  # again, if a run of this process has ended
    if settings.ONCE not in os.environ:  # the script may use weights of models before, or without, `prepare`
        patches.set_environment(settings.ONCE, "0")
    made = plan.resolve()  # before the script asks torch or transformers for the device
    if made.rehearsal and made.strategy.startswith("zero"):  # TrainingArguments start DeepSpeed before an Accelerator
        from faithful.strategies.deepspeed.zero import compile_nothing

        compile_nothing()
    Accelerator.async_save = False  # the script may read what it has just saved
    Accelerator.model_card = False  # and knows what else it leaves
    original = accelerate.accelerator.Accelerator
    for name, module in list(sys.modules.items()):
        if getattr(module, "Accelerator", None) is original and not name.startswith("faithful"):
            module.Accelerator = Accelerator  # pyrefly: ignore[missing-attribute]
    return made.config


if __name__ == "__main__":
    process.install_hooks(ending.newest)
    try:
        main(sys.argv[1:])
    except SystemExit as left:
        process.left = left
        raise
