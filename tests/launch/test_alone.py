"""Which methods one process may call alone, and that none of them hides a collective: the other processes may be in
another one, and would get its bytes, or wait forever.

The table was found by calling each method of Accelerate's Accelerator; the test does it again, for theirs and ours.
"""

import os
import time

import accelerate
import pytest
import torch
from conftest import Ranks, free_port
from test_kept import START

from faithful import __main__ as door
from faithful.launch import launcher, rank_sync

# Methods in which Accelerate's processes communicate.
TOGETHER = (
    "gather gather_for_metrics reduce pad_across_processes check_trigger wait_for_everyone join_uneven_inputs "
    "main_process_first local_main_process_first prepare prepare_model"
)
# Methods that Accelerate lets one process call under DDP: they make no collective.
ALONE = (
    "accumulate autocast clear clip_grad_norm_ clip_grad_value_ end_training free_memory get_state_dict "
    "get_tracker init_trackers log maybe_context_parallel no_sync on_last_process on_local_main_process "
    "on_local_process on_main_process on_process prepare_data_loader prepare_optimizer prepare_scheduler print "
    "register_for_checkpointing register_load_state_pre_hook register_save_state_pre_hook save save_model "
    "save_state set_trigger skip_first_batches split_between_processes trigger_sync_in_backward "
    "unscale_gradients unwrap_model verify_device_map"
)
OTHERS = {
    "backward": "DDP's own hooks communicate",
    "load_state": "Accelerate makes no collective here; ours agree on the checkpoint, as one that loads it alone would "
    "train a model of its own",
    "profile": "communicates only where ProfileKwargs names a folder for its traces; ours is Accelerate's",
    "lomo_backward": "needs the package lomo",
    "deepspeed_ulysses_dl_adapter": "needs DeepSpeed's sequence parallel",
}

CALLS = """
import contextlib
from torch.utils._python_dispatch import TorchDispatchMode
from accelerate.tracking import GeneralTracker


class Watch(TorchDispatchMode):
    "Counts collectives, or does not let them happen."
    def __init__(self, allowed):
        super().__init__()
        self.allowed, self.seen = allowed, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            assert self.allowed, f"a collective, {function}"
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Lines(GeneralTracker):
    name, requires_logging_directory, tracker = "lines", False, None
    def store_init_configuration(self, values): pass
    def log(self, values, step=None, **kwargs): pass


class Cursor:
    def state_dict(self): return {"at": 1}
    def load_state_dict(self, state): pass


def entered(context):
    with context: pass


folder.mkdir(exist_ok=True)
accelerator = Accelerator(project_dir=folder, log_with=Lines())
model = torch.nn.Sequential(linear(), torch.nn.BatchNorm1d(16))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(torch.randn(32, 16), 4))
a, x = accelerator, torch.ones(2, 2)
alone = {
    "init_trackers": lambda: a.init_trackers("mine", {"a": 1}),
    "log": lambda: a.log({"a": torch.ones(())}, step=0),
    "get_tracker": lambda: a.get_tracker("lines"),
    "print": lambda: a.print("x"),
    "autocast": lambda: entered(a.autocast()),
    "accumulate": lambda: entered(a.accumulate(model)),
    "no_sync": lambda: entered(a.no_sync(model)),
    "get_state_dict": lambda: a.get_state_dict(model),
    "unwrap_model": lambda: a.unwrap_model(model),
    "save": lambda: a.save({"x": x}, folder / "x.bin"),
    "save_model": lambda: a.save_model(model, folder / "model"),
    "save_state": lambda: a.save_state(folder / "saved"),
    "on_main_process": lambda: a.on_main_process(print)("x"),
    "on_local_main_process": lambda: a.on_local_main_process(print)("x"),
    "on_last_process": lambda: a.on_last_process(print)("x"),
    "on_process": lambda: a.on_process(print, process_index=0)("x"),
    "on_local_process": lambda: a.on_local_process(print, local_process_index=0)("x"),
    "split_between_processes": lambda: entered(a.split_between_processes([1, 2, 3])),
    "unscale_gradients": lambda: a.unscale_gradients(),
    "clip_grad_norm_": lambda: a.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda: a.clip_grad_value_(model.parameters(), 1.0),
    "maybe_context_parallel": lambda: entered(a.maybe_context_parallel()),
    "verify_device_map": lambda: a.verify_device_map(model),
    "register_save_state_pre_hook": lambda: a.register_save_state_pre_hook(lambda *_: None),
    "register_load_state_pre_hook": lambda: a.register_load_state_pre_hook(lambda *_: None),
    "register_for_checkpointing": lambda: a.register_for_checkpointing(Cursor()),
    "set_trigger": lambda: a.set_trigger(),
}
at_the_end = {
    "skip_first_batches": lambda: a.skip_first_batches(loader, 1),
    "trigger_sync_in_backward": lambda: entered(a.trigger_sync_in_backward(model)),
    "prepare_data_loader": lambda: a.prepare_data_loader(torch.utils.data.DataLoader([1])),
    "prepare_optimizer": lambda: a.prepare_optimizer(torch.optim.SGD(linear().parameters())),
    "prepare_scheduler": lambda: a.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)),
    "free_memory": lambda: a.free_memory(),
    "clear": lambda: a.clear(),
    "end_training": lambda: a.end_training(),
}
together = {
    "gather": lambda: a.gather(x),
    "gather_for_metrics": lambda: a.gather_for_metrics(x),
    "reduce": lambda: a.reduce(x),
    "pad_across_processes": lambda: a.pad_across_processes(x),
    "check_trigger": lambda: a.check_trigger(),
    "wait_for_everyone": lambda: a.wait_for_everyone(),
    "main_process_first": lambda: entered(a.main_process_first()),
    "local_main_process_first": lambda: entered(a.local_main_process_first()),
    "prepare": lambda: a.prepare(linear()),
    "prepare_model": lambda: a.prepare_model(linear()),
    "join_uneven_inputs": lambda: entered(a.join_uneven_inputs([model], even_batches=False)),
}
tried = {*alone, *at_the_end, *together}
store = torch.distributed.distributed_c10d._get_default_store()


def main_process(calls, times=[]):
    times.append(0)
    if not accelerator.is_main_process:
        return store.get(f"alone/{len(times)}")
    for name, call in calls.items():
        try:
            with Watch(False):
                call()
        except Exception as problem:
            print(f"{name} failed: {type(problem).__name__}: {problem}", flush=True)
            raise
    store.set(f"alone/{len(times)}", "done")


buffer = accelerator.unwrap_model(model)[1].running_var.clone()
main_process({name: call for name, call in alone.items() if name not in ("clip_grad_norm_", "clip_grad_value_")})
assert accelerator.unwrap_model(model)[1].running_var.equal(buffer)
for _ in range(2):
    step(model, optimizer)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
main_process(alone)
for name, call in together.items():
    with Watch(True) as watch:
        call()
    if accelerator.is_main_process:
        print(name, "communicates" if watch.seen else "does not communicate", watch.seen, flush=True)
accelerator.trackers.clear()
if accelerator.is_main_process:
    print("tried:", *sorted(tried), flush=True)
    for name, call in at_the_end.items():
        with Watch(False):
            call()
else:
    accelerator.on_main_process(print)("never")
print("came to its end", flush=True)
"""


def impatient(ours):
    rank_sync.COMES = 0.2
    if ours:
        door.take_its_place()


@pytest.mark.parametrize("ours", [False, True])
def test_no_method_that_one_process_may_call_makes_a_collective(tmp_path, ours):
    (tmp_path / "mine.py").write_text(START + CALLS)
    began = Ranks("ddp_fp32", ["--output_dir", str(tmp_path / "run")], script=tmp_path / "mine.py",
                  env={} if ours else {"ACCELERATE_USE_CPU": "true"}, before=lambda rank: impatient(ours))  # fmt: skip
    assert set(began.wait(60)) == {0}, began.text()
    text = began.text()
    assert text.count("came to its end") == 2
    communicate = {line.split()[0] for line in text.splitlines() if " communicates [" in line}
    [tried] = [set(line.split()[1:]) for line in text.splitlines() if line.startswith("tried:")]
    assert tried == {*ALONE.split(), *TOGETHER.split()}
    assert communicate == set(TOGETHER.split()) - {"join_uneven_inputs"}, "on a CPU Accelerate's does nothing"


def test_every_method_is_in_the_table():
    """A method that a new version of Accelerate has is tried, or has a reason."""
    kind = accelerate.Accelerator
    methods = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    assert methods == {*TOGETHER.split(), *ALONE.split(), *OTHERS}


# ---- whether all processes make a call ----


def answers(main, other, comes=0.5):
    """(what all_ranks_called answered, seconds) in each of two processes. main, other: what they do, with `rank_sync`."""
    port, ends, others = str(free_port()), os.pipe(), os.pipe()
    for rank, does in enumerate((main, other)):
        if os.fork() == 0:
            try:
                if rank == 0:
                    os.close(others[1])
                rank_sync.COMES = comes
                os.environ |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "COLLECTIVE_TIMEOUT": "2",
                }
                torch.distributed.init_process_group("gloo")
                began = time.monotonic()
                answer = does()
                os.write(ends[1], f"{rank} {answer} {time.monotonic() - began}\n".encode())
                if rank == 0:  # it has the store, so it stays until the other process has ended
                    os.read(others[0], 1)
            finally:
                os._exit(0)
    os.close(others[1]), os.wait(), os.wait(), os.close(ends[1]), os.close(others[0])
    rows = [line.split() for line in os.fdopen(ends[0]).read().splitlines()]
    return {int(rank): (answer == "True", float(seconds)) for rank, answer, seconds in rows}


def comes(name="saves", needed=False, after=0.0):
    time.sleep(after)
    return rank_sync.all_ranks_called(name, needed)


def then(*steps):
    return lambda: [step() for step in steps][-1]


ONE = {  # (what the main process does, what the other does, the answers, the longest time that the main process waits)
    "all come": (comes, comes, True, 0.4),
    "a little late": (comes, lambda: comes(after=0.3), True, 0.45),
    "too late": (comes, lambda: comes(after=1), False, 0.9),
    "too late, but needed": (lambda: comes(needed=True), lambda: comes(after=1), True, 2),
    "in another call": (lambda: comes(needed=True), lambda: comes("ends"), False, 0.4),
    "at its end": (lambda: comes(needed=True), lambda: rank_sync.tell("ended"), False, 0.4),
    "nowhere": (comes, lambda: None, False, 0.9),
    "nowhere, but needed": (lambda: comes(needed=True), lambda: None, False, 2.3),
}


@pytest.mark.parametrize("case", ONE)
def test_whether_all_come(case):
    """A slow process is waited for; one that has gone on is not."""
    main, other, answer, longest = ONE[case]
    elsewhere = case == "in another call"
    if elsewhere:  # to which the main process comes next
        main = then(main, lambda: not rank_sync.all_ranks_called("ends"))
    found = answers(main, other)
    assert found[0][0] == answer and found[0][1] < longest, found
    assert found[1][0] == (answer or elsewhere), found


def test_waiting_in_vain_is_shorter_the_next_time():
    """Where nothing shows where the others are."""
    twice = then(lambda: comes("saves/1"), lambda: comes("saves/2"))
    assert 2.4 < answers(twice, lambda: None, comes=1.5)[0][1] < 2.9


def test_the_store_lives_until_all_have_read_it():
    """The main process serves the store. Its script may end right after the processes have met: in save_model, say."""
    port, store, codes = str(free_port()), launcher.store, []

    def late():
        time.sleep(0.5)
        return store()

    for rank in range(2):
        if os.fork() == 0:
            code = 1
            try:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                torch.distributed.init_process_group("gloo")
                if rank:
                    launcher.store = late
                code = int(launcher.wait_for_all("meet", rank) != [0, 1])
            finally:
                os._exit(code)
    for _ in range(2):
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    assert codes == [0, 0]
