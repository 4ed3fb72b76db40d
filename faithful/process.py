"""How a process ends: signals, one-line errors, exit codes.

Exit codes: 0 finished; 1 failed; 2 refused; 130 Ctrl-C; 143 stopped by SIGTERM.
"""

import atexit
import io
import os
import re
import signal
import sys
import time
import traceback

from faithful import config, launcher
from faithful.errors import Refused

stop_asked = False  # set by SIGTERM and Ctrl-C once there is something to save
interrupted = None  # when Ctrl-C came
left = None  # what sys.exit() raised, which an atexit handler cannot see otherwise


def told_to_stop():
    return stop_asked


def guard(current):
    """Installs the hooks that end a process. Called once, as early as possible. current(): the Accelerator whose record
    is closed when the process ends, or None."""
    launcher.end_with_the_launcher()
    sys.excepthook = lambda kind, problem, trace: leave(problem, current())
    sys.exit = leave_with
    atexit.register(lambda: leave(left, current()))


def leave_with(status=None):
    """sys.exit(), which keeps its code for leave()."""
    global left
    left = SystemExit(status if isinstance(status, int) else int(status is not None))  # Python prints messages
    raise SystemExit(status)


def finish_steps_first():
    """Makes SIGTERM and Ctrl-C stop the run after a checkpoint, not at once as before the first step. A script's own
    handler of Ctrl-C stays. A sys.exit() before a step did not end the process: the script caught it."""
    global left
    left = None
    if signal.getsignal(signal.SIGTERM) is not ask_to_stop:
        signal.signal(signal.SIGTERM, ask_to_stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def ask_to_stop(*_):
    global stop_asked
    stop_asked = True


def interrupt(*_):
    """Handles Ctrl-C: the first asks for a checkpoint, the second ends the process at once."""
    global stop_asked, interrupted
    now = time.monotonic()
    if interrupted and now > interrupted + 1:  # within a second it is the same Ctrl-C, sent on by the launcher
        raise KeyboardInterrupt
    if not interrupted and config.rank() == 0:  # os.write: the signal may have interrupted a print()
        os.write(2, b"\nCtrl-C: stopping after this step, with a checkpoint; Ctrl-C again stops at once\n")
    stop_asked, interrupted = True, interrupted or now


def leave(problem, run):
    """Prints the error, if any, closes the record and exits with the right code."""
    error, code = None, 0
    if isinstance(sys.stderr, io.StringIO):  # torch.distributed prints this buffer after us, but we exit first
        sys.stderr = sys.__stderr__
    if isinstance(problem, SystemExit):  # from `python -m faithful`
        code = problem.code if isinstance(problem.code, int) else int(problem.code is not None)
        if code and not isinstance(problem.code, int):
            print(problem.code, file=sys.stderr)
        error = f"the script exited with {code}" if code not in (0, 143) else None
    elif not isinstance(problem, Refused) and (words := what_the_strategy_lacks(str(problem), run)):
        return leave(Refused(words), run)
    elif hasattr(problem, "exit_code"):  # an error of this package, or of any with an exit code
        # An error of a loader's worker has a traceback in front.
        error, code = str(problem).rsplit(f"{type(problem).__name__}: ", 1)[-1].strip(), problem.exit_code
        own = getattr(problem, "of_one_process", False)  # whether only this process has it
        for line in error.splitlines() if own or may_speak() else ():
            print(f"{'refused' if code == 2 else 'error'}: {line}", file=sys.stderr, flush=True)
    elif isinstance(problem, KeyboardInterrupt) or (interrupted and problem is not None):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher sends a second SIGINT
        error, code = None if run and run.stopping else "interrupted", 130
        if error and config.rank() == 0:
            print(f"interrupted: {run.how_to_go_on() if run else 'nothing was saved'}", file=sys.stderr, flush=True)
    elif problem is not None:
        error, code = f"{type(problem).__name__}: {problem}", 1
        lost = lost_peer(problem, error)
        if lost is None:
            traceback.print_exception(problem)
        elif os.environ.get("LOCAL_RANK", "0") == "0":  # once per machine
            print(f"error: {lost}", file=sys.stderr, flush=True)
        error = lost or error
    try:
        code = run.close(error, code) if run else code
    except Exception:
        traceback.print_exc()
        code = code or 1
    sys.stdout.flush()
    sys.stderr.flush()
    # After gloo, torch can abort a normal exit ("terminate called without an active exception").
    if problem is not None or code or (run and run.closed):
        os._exit(code)


def lost_peer(problem, error):
    """A message for the user if torch's error means that another process is gone, else None."""
    # Messages of gloo, of data loaders, of NCCL and of the launcher's store.
    ended = "by peer|signal: Terminated|connectFullMesh|Connection was likely closed|remote process exiting"
    if re.search(ended + "|communicator was aborted", error):
        return "another process of this run ended"
    silent = re.search("Timed out waiting|Application timeout|Watchdog caught collective operation", error)
    if silent or type(problem).__name__ == "DistStoreError":
        waited = f"in {config.seconds_of_patience()} s (COLLECTIVE_TIMEOUT)"
        return f"no answer from another process {waited}: it, its machine or the link is gone"
    return None


def what_the_strategy_lacks(error, run):
    """A message for the user if a library's error means that the script needs what the config's strategy does not have,
    for example whole weights in fp32; else None."""
    if "LocalSGD is supported only" in error:
        return ("LocalSGD lets each process train a model of its own for some steps, but under FSDP2 and ZeRO no "
                "process has a whole model: leave it out, or use a single config")  # fmt: skip
    if "got mixed torch.Tensor and DTensor" in error:
        return ("the script computes with sharded weights and whole tensors together, perhaps in an average of weights "
                "(EMA) of its own, which FSDP2 does not allow: use a ddp config")  # fmt: skip
    other = "expected dtype float for `end`|Input type .* should be the same|must have the same dtype"
    other += "|unsupported ScalarType"
    if run and run.plan.strategy.startswith("zero") and re.search(other, error):
        return (f"under {run.plan.strategy} DeepSpeed holds the weights in 16 bit, without autocast, and the script "
                f"computes with fp32 tensors of its own beside them ({error}): use a ddp or fsdp config")  # fmt: skip
    return None


def may_speak():
    """Whether this rank prints an error that all ranks have. Rank 0 does. The others wait 20 s for it, because torch's
    launcher ends all ranks as soon as one exits, and print the error if they are still alive then."""
    if config.rank() == 0:
        return True
    patience = time.monotonic() + 20
    while "TORCHELASTIC_RUN_ID" in os.environ and not stop_asked:
        if time.monotonic() > patience:
            return True
        time.sleep(0.05)
    return False
