"""How a process ends: signals, one-line errors, exit codes.

Exit codes: 0 finished; 1 failed; 2 refused; 130 Ctrl-C; 143 stopped by SIGTERM; or the script's own.

Python's own exit ends a process, so that the exit code is the script's and its exit handlers run. Only after an error
in a run of several processes os._exit does, because torch may wait for the others, or abort, in a normal exit.
"""

import atexit
import builtins
import contextlib
import dis
import functools
import io
import multiprocessing.util
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from faithful.config import settings
from faithful.errors import Gone, OutOfSharedMemory, Refused, working_folder_is_gone
from faithful.launch import deadline, launcher, printing, rank_sync
from faithful.launch.deadline import Run

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]  # a sys.excepthook
Printer = Callable[[BaseException], object]
Newest = Callable[[], Run | None]  # the run of the newest Accelerator

stop_asked = False  # set by SIGTERM and Ctrl-C once there is something to save
interrupted: float | None = None  # when Ctrl-C came
left: SystemExit | None = None  # of the newest sys.exit(), exit() or quit(), or that `python -m faithful` has seen
too_late = False  # whether a thread ends this process
guarded: int | None = None  # the id of the process that `install_hooks` has prepared
ended = False  # whether its record is closed
scripts_handlers: set[signal.Signals] = set()  # signals whose handler is the script's own


SPEAKS = 20  # seconds in which rank 0 is to print an error that all ranks have, before another one does
ENDED, SILENT = "another process of this run ended", "no answer from another process"  # how `lost_peer` begins
EACH_PART = (
    "use every part of the model in each process, if need be times 0, or a ddp config with find_unused_parameters"
)


class Unseen(SystemExit):
    """Stands for an end that exit handlers cannot see: by SystemExit, raised without sys.exit(), or in a thread."""


def told_to_stop() -> bool:
    return stop_asked


def install_hooks(newest: Newest) -> None:
    """Installs what ends a process well, once in each process. The first Accelerator() calls it, so that a program
    which makes none ends as if this package were not imported. newest: returns the run whose record is closed."""
    global guarded, ended
    if guarded == os.getpid():
        return
    guarded, ended = os.getpid(), False
    printing.survive()
    launcher.end_with_the_launcher()
    hook = sys.excepthook
    sys.excepthook = functools.partial(excepthook, newest, hook)
    names = [] if interactive() else [(sys, "exit"), (builtins, "exit"), (builtins, "quit")]
    exits = [(where, name, getattr(where, name)) for where, name in names if hasattr(where, name)]
    for where, name, _ in exits:
        setattr(where, name, exit_and_note)
    if multiprocessing.parent_process() is None:
        atexit.register(at_exit, newest, main_frame())
    else:  # its children end with os._exit, after these
        multiprocessing.util.Finalize(None, at_exit, (newest, None), exitpriority=0)

    def undo() -> None:
        """Makes a forked child a process of its own: it neither closes the record nor waits for a checkpoint."""
        sys.excepthook = hook
        for where, name, original in exits:
            setattr(where, name, original)
        restore_signals()
        deadline.forget()
        unblock()

    # A signal that comes before `undo` has run waits for it: Python would lose it in a new child.
    masks = []
    unblock = lambda: signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())  # noqa: E731
    os.register_at_fork(
        before=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])),
        after_in_parent=unblock,
        after_in_child=undo,
    )


def interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)


def main_frame() -> FrameType | None:
    """The frame of the script, or None outside the main thread. At exit it shows whether the script came to its end."""
    if threading.current_thread() is not threading.main_thread():
        return None
    frame = sys._getframe()
    while frame.f_back:
        frame = frame.f_back
    return frame


def problem_at_exit(script: FrameType | None) -> BaseException | None:
    """The exception that ends this process, or None. script: what `main_frame` has returned."""
    if multiprocessing.parent_process() is not None:  # an exception passes through its exit handlers
        return sys.exc_info()[1]
    if script is None:
        return Unseen()
    # A frame keeps the instruction at which it was left: a RETURN if the script came to its end, else where it raised.
    if dis.opname[script.f_code.co_code[script.f_lasti]].startswith("RETURN"):
        return None
    # Python sets sys.last_value and sys.last_traceback before it calls sys.excepthook, whoever has put one there.
    trace = getattr(sys, "last_traceback", None)
    if trace is not None and trace.tb_frame is script and trace.tb_lasti == script.f_lasti:
        return sys.last_value  # the script has replaced sys.excepthook
    return left or Unseen()


def at_exit(newest: Newest, script: FrameType | None) -> None:
    """Closes the record at Python's exit."""
    if os.getpid() != guarded:  # a child that the script has forked
        return
    launcher.end_loader_processes()
    if ended:  # sys.excepthook has closed it
        return
    problem = problem_at_exit(script)
    exits = isinstance(problem, SystemExit) and not isinstance(problem, Unseen)
    code = exit_code_of(problem, newest(), traceback.print_exception if exits else None)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        rank_sync.stop()
        wait_for_gloo()
    # checkpoints could not be written, or a script went on after it was told to stop, or has caught a refusal
    if code and (problem is None or (exits and not problem.code)):
        os._exit(code)


def wait_for_gloo() -> None:
    """Waits, 5 s at most, until gloo's threads sleep. One may still hold tensors of the last collective, and needs
    Python's lock to release them. If it asks for the lock once Python shuts down, the process aborts."""
    looks, end = 0, time.monotonic() + 5
    while looks < 2 and time.monotonic() < end:
        time.sleep(0.01)  # without the lock: a thread that has waited for it is not asleep now
        looks = looks + 1 if set(states_of_gloo()) <= {"S"} else 0


def states_of_gloo() -> Iterator[str]:
    """The state of each thread of gloo, as Linux names it: S sleeps."""
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):
            if "gloo" in (thread / "comm").read_text():
                yield (thread / "stat").read_text().rpartition(")")[2].split()[0]


def excepthook(
    newest: Newest,
    before: Hook,
    kind: type[BaseException],
    problem: BaseException,
    trace: TracebackType | None,
) -> None:
    """The sys.excepthook. before: the previous one, which prints what has no message of one line."""
    if interactive():  # the session goes on
        return before(kind, problem, trace)
    if issubclass(kind, KeyboardInterrupt):
        ignore_ctrl_c()
    if launcher.is_distributed():
        threading.Thread(target=end_in_time, daemon=True).start()
    code = exit_code_of(problem, newest(), lambda problem: print_with_rank(before, kind, problem, trace))
    if launcher.is_distributed():
        # os._exit runs no exit handlers, so the script's run here. No error of theirs may keep the process alive.
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(code)
    raise SystemExit(code)  # Python then exits with this code


def end_in_time() -> None:
    """Ends this process if its end takes too long: it asks a store whose machine, or the link to it, is gone. torch has
    no limit for that, and the kernel's is a quarter of an hour."""
    time.sleep(settings.timeout_seconds())
    while launcher.state["writing"]:
        time.sleep(1)
    os._exit(1)


def print_with_rank(
    before: Hook, kind: type[BaseException], problem: BaseException, trace: TracebackType | None
) -> None:
    """Prints an error in one write, each line with the rank, as torch.distributed does, so that the errors of several
    processes do not mix. before: a sys.excepthook."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        before(kind, problem, trace)
    lines = printing.plain(printed.getvalue()).splitlines(keepends=True)
    rank = f"[rank{settings.rank()}]: " if launcher.is_distributed() else ""
    sys.stderr.write("".join(line if line.startswith(rank) else rank + line for line in lines))


def exit_and_note(status: Any = None) -> NoReturn:
    """sys.exit(), which keeps its code for the record."""
    global left
    left = SystemExit(status)
    raise left


def handle_signals(note: Callable[[str], None], newest: Newest) -> None:
    """Makes SIGTERM and Ctrl-C stop the run after a checkpoint, not at once as before the first step. A script's own
    handlers stay. note: prints and keeps a line."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python allows handlers in the main thread only
    for number, default, ours in HANDLED:
        now = signal.getsignal(number)
        if now is default:
            signal.signal(number, ours)
        elif now is not ours and number not in scripts_handlers:
            scripts_handlers.add(number)
            if callable(now) or number == signal.SIGTERM:  # shells ignore Ctrl-C for programs in the background
                note(f"{number.name} has another handler, which stays: it does not stop this run with a checkpoint")
    if not interactive():
        deadline.watch(asks_to_stop, newest, functools.partial(end_late, newest))


def watch_others(newest: Newest) -> None:
    """Ends this process when no process can go on, from the time at which there is a model: a forward pass of the main
    process alone, of a sample say, may come before the first step."""
    if not interactive():
        rank_sync.watch(functools.partial(end_stuck, newest))


def asks_to_stop(number: int) -> bool:
    return signal.getsignal(number) in (on_sigterm, on_sigint)


def end_late(newest: Newest, number: int, seconds: float) -> None:
    """Ends this process after a signal, when its main thread has not."""
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    end_here(newest(), f"{name}: the run did not stop in {seconds:.0f} s", "", 128 + number)


def end_stuck(newest: Newest) -> None:
    """Ends this process when no process can go on."""
    advice = f"; make each such call on every process, and {EACH_PART}. What was trained since is lost"
    end_here(newest(), "the processes wait for each other, and none can go on", advice, 1)


def end_here(run: Run | None, said: str, advice: str, code: int) -> None:
    """Ends this process while its main thread waits. Says where each process stands."""
    global too_late
    if too_late:
        return
    too_late, stands, go_on = True, [], []
    deadline.within(2 * deadline.ANSWERS, lambda: stands.append(deadline.stands()))
    if run:
        deadline.within(deadline.ANSWERS, lambda: go_on.append(run.how_to_go_on()))
    where = (stands or [None])[0] or deadline.stand()
    line = f"{said}: {where}; {(go_on or ['no new checkpoint is saved'])[0]}{advice}"
    if stands != [None]:
        end_the_line_of_a_bar()
        printing.at_once(f"error: {printing.plain(line)}\n")
    deadline.end_the_stopped()
    deadline.within(deadline.ANSWERS, lambda: close_record(run, line, 1), sys.stdout.flush, sys.stderr.flush)
    if stands != [None] and launcher.is_distributed():
        time.sleep(1)  # the others may still read the store, which the main process serves
    os._exit(code)


def restore_signals() -> None:
    """Undoes `handle_signals`."""
    for number, default, ours in HANDLED:
        if signal.getsignal(number) is ours and threading.current_thread() is threading.main_thread():
            signal.signal(number, default)


def on_sigterm(*_: object) -> None:
    """Handles SIGTERM. torch's launcher sends it after a second Ctrl-C."""
    global stop_asked
    if interrupted and time.monotonic() > interrupted + 1:
        raise KeyboardInterrupt
    stop_asked = True


def on_sigint(*_: object) -> None:
    """Handles Ctrl-C: the first asks for a checkpoint, the second ends the process at once."""
    global stop_asked, interrupted
    now = time.monotonic()
    if interrupted and now > interrupted + 1:  # within a second it is the same Ctrl-C, sent on by the launcher
        raise KeyboardInterrupt
    if not interrupted and settings.rank() == 0:
        printing.at_once("\nCtrl-C: stopping after this step, with a checkpoint; Ctrl-C again stops at once\n")
    stop_asked, interrupted = True, interrupted or now


# What Python has for these signals where nobody has set a handler: none for SIGTERM, so the kernel ends the process,
# and for SIGINT one that raises KeyboardInterrupt.
HANDLED = (
    (signal.SIGTERM, signal.SIG_DFL, on_sigterm),
    (signal.SIGINT, signal.default_int_handler, on_sigint),
)


def exit_code_of(
    problem: BaseException | None,
    run: Run | None,
    print_error: Printer | None = traceback.print_exception,
) -> int:
    """What a process does last, with the functions below: says why it ends, closes the record, returns the exit code.
    print_error: prints what has no message of one line; None: the message was printed before."""
    if isinstance(sys.stderr, io.StringIO):  # torch.distributed prints this buffer after us, but we exit first
        sys.stderr = sys.__stderr__
    if too_late:  # and this is what comes of the end of the others
        time.sleep(launcher.GRACE)
    if isinstance(problem, KeyboardInterrupt):
        ignore_ctrl_c()
    try:
        return report_end(problem, run, print_error)
    except KeyboardInterrupt as second:  # Ctrl-C while the process ends
        ignore_ctrl_c()
        return report_end(second, run, print_error)


def ignore_ctrl_c() -> None:
    """The process ends already, and the launcher sends Ctrl-C on, too."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def report_end(problem: BaseException | None, run: Run | None, print_error: Printer | None) -> int:
    problem = as_refusal(last_step(problem, run), run)
    error, code = outcome(problem, run)
    print_error_line(problem, error, run, print_error)
    code = close_record(run, error, code)
    # os._exit may follow, which writes no buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def last_step(problem: BaseException | None, run: Run | None) -> BaseException | None:
    """`problem`, or if that is none, that the last step, which the host may not have looked at, was not finite."""
    if run is not None and (problem is None or (isinstance(problem, SystemExit) and not problem.code)):
        try:
            run.settle()
        except Exception as found:
            return found
    return problem


def as_refusal(problem: BaseException | None, run: Run | None) -> BaseException | None:
    """`problem`, or a Refused in its place if a library's error, or one that the script catches to exit, means that it
    needs what the config's strategy does not have, for example whole weights in fp32."""
    if isinstance(problem, SystemExit) and isinstance(problem.__context__, Exception):  # as ema_pytorch's EMA exits
        caught = as_refusal(problem.__context__, run)
        return caught if isinstance(caught, Refused) else problem
    if isinstance(problem, Refused):
        return problem
    if isinstance(problem, Exception) and isinstance(caught := problem.__context__, Refused):  # neither is hidden
        later = str(problem).partition("\n")[0]
        caught.args = (f"{caught}; while the script handled it: {type(problem).__name__}: {later}",)
        return caught
    if run is None or isinstance(problem, SystemExit):
        return problem
    if isinstance(problem, FileNotFoundError) and working_folder_is_gone():
        return Gone()
    errors = f"{problem} {getattr(problem, '__cause__', '')}"  # the cause: why a data loader's worker was killed
    if full := re.search("shared memory.*(No space left|Cannot allocate)|out of shared memory", errors):
        return OutOfSharedMemory(full[1] or full[0])
    if explained := run.explain(str(problem)):
        frames = traceback.extract_tb(problem.__traceback__ if problem else None)
        for at in [each for each in frames if not each.filename.startswith(deadline.OTHERS)][-1:]:
            explained.args = (f"{explained} (at {os.path.basename(at.filename)}:{at.lineno}, {(at.line or '')[:80]})",)
    return explained or problem


def outcome(problem: BaseException | None, run: Run | None) -> tuple[str | None, int]:
    """(what the record says of `problem`, or None; the exit code)."""
    stopped = run is not None and run.stopping  # with a checkpoint
    if problem is None:
        return None, 0
    if isinstance(problem, Unseen):
        unknown = "the script ended before accelerator.end_training(), and its exit code is not known here"
        return (None, 0) if stopped else (unknown, 1)
    if isinstance(problem, SystemExit):
        code = problem.code if isinstance(problem.code, int) else int(problem.code is not None)
        return (None if code in (0, 143) else f"the script exited with {code}"), code
    if hasattr(problem, "exit_code"):  # an error of this package, or of any with an exit code
        # An error of a loader's worker has a traceback in front.
        return str(problem).rsplit(f"{type(problem).__name__}: ", 1)[-1].strip(), problem.exit_code
    if isinstance(problem, KeyboardInterrupt) or interrupted:
        return None if stopped else "interrupted", 130
    error = f"{type(problem).__name__}: {problem}"
    return lost_peer(problem, error) or error, 1


def print_error_line(
    problem: BaseException | None, error: str | None, run: Run | None, print_error: Printer | None
) -> None:
    """Prints why this process ends, if the script has not asked for it. error: what the record says."""
    if problem is None or isinstance(problem, SystemExit):
        return
    settings.tell_launcher("asked", "ended")  # it says no more what takes time
    end_the_line_of_a_bar()
    if hasattr(problem, "exit_code"):
        here_alone = getattr(problem, "of_one_process", False)
        prints = first_of_machine if getattr(problem, "of_each_machine", False) else may_print
        if print_error and (here_alone or prints()):
            for line in (error or "").splitlines():
                what = "refused" if problem.exit_code == 2 else "error"
                print(f"{what}: {printing.plain(line)}", file=sys.stderr, flush=True)
    elif isinstance(problem, KeyboardInterrupt) or interrupted:
        if print_error:
            ignore_ctrl_c()
        if settings.rank() == 0 and not (run and run.stopping):
            how = run.how_to_go_on() if run else "nothing was saved"
            print(f"interrupted: {how}", file=sys.stderr, flush=True)
    elif error and error.startswith((ENDED, SILENT)):
        if first_of_machine():
            print(f"error: {error}", file=sys.stderr, flush=True)
    elif print_error:
        print_error(problem)


def first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def end_the_line_of_a_bar() -> None:
    """Begins a new line if a progress bar (tqdm) is open, which leaves its own line open."""
    bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
    streams = (sys.stdout, sys.stderr)
    if any(getattr(bar, "fp", None) in streams and not getattr(bar, "disable", False) for bar in list(bars)):
        print(file=sys.stderr, flush=True)


def close_record(run: Run | None, error: str | None, code: int) -> int:
    """Closes the record of `run`, if there is one. Returns the exit code: another one if checkpoints were not written,
    or the record cannot be."""
    global ended
    try:
        code = run.close(error, code) if run else code
    except Exception:
        traceback.print_exc()
        code = code or 1
    ended = True
    return code


def lost_peer(problem: BaseException, error: str) -> str | None:
    """A message for the user if torch's error means that another process is gone, else None."""
    # Messages of gloo, of data loaders, of NCCL and of the launcher's store.
    over = "by peer|signal: Terminated|connectFullMesh|Connection was likely closed|remote process exiting"
    if re.search(over + "|communicator was aborted", error):
        return ENDED
    silent = re.search("Timed out waiting|Application timeout|Watchdog caught collective operation", error)
    if silent or type(problem).__name__ == "DistStoreError":
        waited = f"in {settings.timeout_seconds()} s (COLLECTIVE_TIMEOUT)"
        return f"{SILENT} {waited}: it, its machine or the link is gone"
    return None


def may_print() -> bool:
    """Whether this rank prints an error that all ranks have. Rank 0 does. The others wait for it, because torch's
    launcher ends all ranks as soon as one exits, and print the error if they are still alive then."""
    if settings.rank() == 0:
        return True
    deadline = time.monotonic() + SPEAKS
    while "TORCHELASTIC_RUN_ID" in os.environ and not stop_asked:
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False
