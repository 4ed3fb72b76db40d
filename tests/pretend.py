"""A pretended CUDA device: on a machine without a GPU, the lines that only a GPU reaches are executed, with values.

A tensor of this device says `cuda:0` and holds its values in a plain CPU tensor. Every operator comes by `dispatch`,
which refuses what a GPU would refuse (`refuse`: each rule with its source), computes on the CPU, and counts kernel
launches and waits for the device. Process groups say `nccl` and are gloo. No line of the program under test is changed.

What passes here has been executed, with values, on the branches that a card takes. It has not run on a card, and of
CUDA's rules only those written below are known. What a card could still refuse, or do otherwise:

- Streams: there is one, in which everything has happened. Races between streams, and memory that is used again too
  early, are not seen. `torch.cuda.device(...)` changes nothing. Autograd runs in the caller's thread; on a card it has
  threads of its own, with other modes and contexts.
- NCCL is gloo, and each collective is waited for at once. An order of collectives or of communicators that hangs NCCL
  is not seen. A lost process is an error in Python here, where NCCL waits or aborts. Runs have up to four processes:
  what is different with eight is not seen.
- Compiled code: a block is traced by torch's own compiler at its first call, under FSDP2 with the weights that it has
  gathered, forward and backward in one graph each, with tensors without values, which must not fail. What runs is the
  function as it is. Other compiled functions are not traced, recompilations and a missing C compiler are not seen.
  Triton's kernels are replaced by the functions that say what they compute.
- Kernels are the CPU's: the same bits in every run, no TF32, and torch's plain attention, so nothing is learned about
  which attention kernel a card would take or refuse. Random numbers are the CPU's too; `torch.cuda.manual_seed` and
  `set_rng_state` do nothing.
- Memory: amounts are constants, and it never runs out. Pinned memory is never freed.
- The card itself: a driver that fits torch, and a constant utilization.
- Replaced in torch: `module.to()` and `.data = ` keep every parameter the same object, also where torch would make a
  new one or refuse; DDP's clock and log do nothing.

    import pretend      # before torch
    pretend.wear()      # from here on this process has one GPU

`python tests/pretend.py` forks runs of the recipes on the device, see `serve`; tests/backends/test_pretend.py asks it to.
"""

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]


def driver():
    """A library in the place of the driver's, loaded before torch, or the reason why there is none.

    Autograd asks torch's CUDA library how many devices there are, and the first loaded library that has a symbol wins.
    The driver's own functions need only be there: they say that there is no device.
    """
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None or not shutil.which("nm"):
        return "a pretended GPU needs a C compiler and nm: install gcc (it brings binutils)"
    if "torch" in sys.modules:
        return "pretend must be imported before torch"
    nvrtc = Path(importlib.util.find_spec("torch").submodule_search_locations[0], "lib", "libcaffe2_nvrtc.so")
    if not nvrtc.exists():
        return "a pretended GPU needs a torch that was built with CUDA"
    undefined = subprocess.run(["nm", "-D", "-u", nvrtc], capture_output=True, text=True, check=True).stdout.split()
    named = {word for word in undefined if word[:2] == "cu" and word[2:3].isupper()} - {"cuDevicePrimaryCtxGetState"}
    lines = [f"int {name}(void) {{ return 100; }}" for name in sorted(named)]  # CUDA_ERROR_NO_DEVICE
    lines += [
        "static signed char devices;",
        "void set_devices(int count) { devices = count; }",
        "signed char _ZN3c104cuda12device_countEv(void) { return devices; }",  # c10::cuda::device_count()
        "int cuDevicePrimaryCtxGetState(int i, unsigned *flags, int *active) { *flags = *active = 0; return 0; }",
    ]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "driver.c"), Path(folder, "driver.so")
        source.write_text("\n".join(lines) + "\n")
        line = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source]
        subprocess.run(line, check=True, capture_output=True)
        return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


DRIVER = driver()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._meta_registrations import _check_scaled_mm_sizes  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass, transform_subclass  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402
from torch.utils.data._utils import pin_memory as data_pinning  # noqa: E402

CPU, FP8, E8M0 = torch.device("cpu"), (torch.float8_e4m3fn, torch.float8_e5m2), torch.float8_e8m0fnu
CUDA = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))  # a process has one GPU, as under the launcher


class Refused(RuntimeError):
    """What a GPU would not do, or not do right."""


class Current:
    """The index of the device that `cuda` without an index means: 0 until torch.cuda.set_device is called."""

    index = 0

    def set(self, device):
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.index = self.index if device.index is None else device.index

    def check(self, device=None):
        """Raises Refused unless `device`, or a collective's device, is the one of this process. torch's C++ makes 0 of
        no index here, because its guard does nothing: 0 counts as no index."""
        index = (device.index if device is not None else None) or self.index
        if index != CUDA.index:
            raise Refused(f"the process of cuda:{CUDA.index} uses cuda:{index}: was torch.cuda.set_device called?")


current = Current()
real_compile = torch.compile


# ---------------------------------------------------------------------------------------------------------- the tensor


class CudaTensor(torch.Tensor):
    """Says `cuda:0`; `held` is a plain CPU tensor of the same shape and strides."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, **layout, device=CUDA)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, types, args, kwargs or {})

    # What torch answers in C++ without asking the dispatcher.

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self, **_):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host first"
        )

    def data_ptr(self):
        return self.held.data_ptr()

    def untyped_storage(self):
        return Memory(self.held)

    def record_stream(self, stream):
        pass

    def __repr__(self):
        return f"CudaTensor({self.held})"

    def __deepcopy__(self, memo):
        made = CudaTensor(self.held.clone()).requires_grad_(self.requires_grad)
        made._is_param = getattr(self, "_is_param", False)
        return memo.setdefault(id(self), made)

    def set_data(self, value):
        self.held = value.held
        torch._C.TensorBase.data.__set__(self, value)

    data = property(lambda self: torch._C.TensorBase.data.__get__(self), set_data)


class Memory:
    """The storage of a CudaTensor. FSDP2 frees memory by resizing it to nothing, and fills it anew: here it stays, and
    what was freed is not a number in any floating dtype, so that whoever reads it is seen."""

    def __init__(self, held):
        self.storage = held.untyped_storage()
        self.size = self.nbytes = self.storage.size
        self.data_ptr = self.storage.data_ptr

    def resize_(self, size):
        if size == 0:
            self.storage.fill_(255)


def move(parameter, value):
    """`parameter.data = value` from a CPU to the device: the same object, attributes and hooks, other values. Buffers,
    too."""
    if not isinstance(value, CudaTensor) or isinstance(parameter, CudaTensor):
        return torch._C.TensorBase.data.__set__(parameter, value)
    hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
    moved, is_parameter = (
        CudaTensor(value.held).requires_grad_(parameter.requires_grad),
        type(parameter) is not torch.Tensor,
    )
    torch._C._swap_tensor_impl(parameter, moved)
    parameter.__class__ = CudaTensor
    parameter.held = value.held
    if is_parameter:
        parameter._is_param = True
    for hook in hooks:
        parameter.register_post_accumulate_grad_hook(hook)


# -------------------------------------------------------------------------------------------------------- the operators

pinned = {}  # address of the memory -> a tensor that keeps it, so that no other gets the address


def is_pinned(tensor):
    return tensor.untyped_storage().data_ptr() in pinned


def pin(tensor):
    pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # without values: a GPU has no part in it
        return dispatch(func, types, args, kwargs or {})


lost_process, has_fp64 = None, True  # see `wear`
ORDINARY = torch.Tensor.__torch_dispatch__


def dispatch(func, kinds, args, kwargs):
    if any(kind is not CudaTensor and kind.__torch_dispatch__ is not ORDINARY for kind in kinds):
        return NotImplemented  # a DTensor, say: it goes first, and what it holds comes by here
    leaves = [*flat(args), *flat(kwargs.values())]
    name, collective = names(func)
    device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    mine = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
    if not mine and not collective and (device is None or device.type != "cuda"):
        return on_the_host(func, name, args, kwargs)
    here = bool(mine) if device is None else device.type == "cuda"  # where the result is
    if device is not None and device.type == "cuda":
        current.check(device)
    refuse(func, name, args, kwargs, leaves)
    if collective and lost_process and len(steps) > 2:
        raise dist.DistBackendError(lost_process)
    to_host_later = count(func, name, args, kwargs, here)
    if name == "is_pinned":
        return False
    traffic = compiled[0] if compiled else Traffic((args, kwargs))
    traffic.writes(func, args, kwargs)
    given = {id(leaf.held): leaf for leaf in mine}  # an operator in place gives back what it was given
    inside = bytewise if names(func)[1] else bare
    with after_copies(leaves[name == "copy_" :]):  # whose first is written
        out = (scaled_mm if name == "_scaled_mm" else func)(
            *(each(inside, value) for value in args), **{key: each(inside, value) for key, value in kwargs.items()}
        )
    if here and not has_fp64 and any(getattr(leaf, "dtype", None) == torch.float64 for leaf in flat([out])):
        raise Refused(f"{func}: Cannot convert a MPS Tensor to float64 dtype")
    if to_host_later:
        postpone(out)
    out = each(lambda value: given[id(value)] if id(value) in given else wrapped(value, here), out)
    if not compiled and not (collective or name in FREE or func.is_view):
        traffic.done(out)
        source = args[1] if name == "copy_" else args[0] if args else None
        if isinstance(source, CudaTensor) and isinstance(out, CudaTensor) and turns(name, source.held, out.held):
            steps[-1]["turned"] += in_memory(source.held) + in_memory(out.held)
    return each(functools.partial(done, out), out) if func.namespace == "c10d" else out


@functools.cache
def names(func):
    return func._schema.name.split("::")[1], func.namespace in ("c10d", "_c10d_functional")


def flat(values):
    """The values and those in lists of them, which is as deep as operators' arguments go."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


def each(function, value):
    if isinstance(value, (list, tuple)):
        return type(value)(each(function, item) for item in value)
    return function(value)


def wrapped(value, here):
    return CudaTensor(value) if here and isinstance(value, torch.Tensor) else value


def on_the_host(func, name, args, kwargs):
    """Of a plain CPU tensor all is as ever, but pinned memory, which torch refuses to make without a GPU."""
    if name == "is_pinned":
        return is_pinned(args[0])
    if name == "_pin_memory":
        return pin(args[0].clone())
    if kwargs.get("pin_memory"):
        return pin(func(*args, **kwargs | {"pin_memory": False}))
    return func(*args, **kwargs)


def bare(leaf):
    if isinstance(leaf, CudaTensor):
        return leaf.held
    if isinstance(leaf, torch.device):
        return CPU
    if isinstance(leaf, torch.ScriptObject) and group_name(leaf) in twins:
        return twins[group_name(leaf)].boxed()
    if not isinstance(leaf, str) or leaf not in twins:
        return leaf
    if layer := sys.modules.get("deepspeed.sequence.layer"):  # Ulysses' exchange finds its group by the name
        layer._all_to_all_groups[f"{leaf} on gloo"] = twins[leaf]
    return f"{leaf} on gloo"


def bytewise(leaf):
    """For collectives: gloo knows no FP8, which NCCL moves as bytes."""
    held = bare(leaf)
    return held.view(torch.uint8) if isinstance(leaf, CudaTensor) and held.dtype in FP8 else held


def done(out, leaf):
    """A collective's work, waited for: gloo's would hand CPU tensors to DDP."""
    if not isinstance(leaf, torch.ScriptObject):
        return leaf
    dist.Work.unbox(leaf).wait()
    future = torch.futures.Future()
    future.set_result([value for value in flat([out]) if isinstance(value, torch.Tensor)])
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()


def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    """The exact product in fp32, rounded once."""
    if scale_a.dtype == E8M0:
        out = of_blocks(a, scale_a) @ of_blocks(b.t(), scale_b).t()
    else:
        out = (a.float() @ b.float()) * (scale_a * scale_b)
    return (out if bias is None else out + bias.float()).to(out_dtype or a.dtype)


def of_blocks(codes, scales):
    """The values of MX codes [rows, columns]: their scales lie as cuBLAS documents it under "1D block scaling factors
    layout", in tiles of 128 rows and 4 blocks."""
    (rows, columns), blocks = codes.shape, -(-codes.shape[1] // 128) * 4
    tiles = scales.view(torch.uint8).view(-1, blocks // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    exponents = tiles.reshape(-1, blocks)[:rows, : columns // 32].float() - 127
    return codes.float() * exponents.exp2().repeat_interleave(32, 1)


# ------------------------------------------------------------------------------------------------ what a GPU would refuse

NCCL_DTYPES = {torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
               torch.float64, *FP8}  # fmt: skip
SUMS = {"allreduce_", "allreduce_coalesced_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_", "all_reduce",
        "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced_", "all_reduce_coalesced"}  # fmt: skip
COPIES = {"copy_", "_to_copy", "_foreach_copy_", "record_stream"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
TAKE_A_NUMBER = {
    "fill_",
    "masked_fill",
    "masked_fill_",
    "_foreach_mul_",
    "_foreach_mul",
    "_foreach_div_",
    "where",
    "lerp_",
}


def refuse(func, name, args, kwargs, leaves):
    """Raises Refused for what a GPU would not do. Sources are files of PyTorch's repository."""

    def need(met, what):
        if not met:
            raise Refused(f"{func}: {what}")

    def described(tensors):
        return ", ".join(f"{str(tensor.dtype)[6:]} {list(tensor.shape)}" for tensor in tensors)

    host = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, CudaTensor)]
    mine = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
    if func.namespace in ("c10d", "_c10d_functional"):
        name_of_group = next((leaf for leaf in map(group_name, leaves) if leaf in twins), None)
        if name_of_group is None or (not mine and CPU in c10d._resolve_process_group(name_of_group)._device_types):
            return  # a group of gloo, or one that has gloo for tensors of the CPU
        # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, check_gpu_single_tensor
        need(
            not any(tensor.numel() for tensor in host),
            f"tensors must be CUDA and dense, not on the CPU: {described(host)}",
        )
        need(all(tensor.is_contiguous() for tensor in mine), f"tensors must be contiguous: {described(mine)}")
        current.check()  # NCCL makes a communicator on the current device
        # torch/csrc/distributed/c10d/NCCLUtils.hpp, ncclDataType
        odd = [tensor for tensor in mine if tensor.dtype not in NCCL_DTYPES]
        need(not odd, f"data type not supported by NCCL: {described(odd)}")
        # ProcessGroupNCCL.cpp: "Unsupported Float8 type for NCCL reduction"
        odd = [tensor for tensor in mine if tensor.dtype in FP8 and name in SUMS]
        need(not odd, f"NCCL does not reduce FP8: {described(odd)}")
    elif name.startswith(("_fused_adam", "_fused_sgd")):
        # aten/src/ATen/native/cuda/fused_adam_impl.cu: a kernel reads all lists, the step counters too, by their address
        need(not host, f"a fused optimizer reads device memory, this is on the CPU: {described(host)}")
    elif name == "_scaled_mm":
        # aten/src/ATen/native/cuda/ScaledBlas.cpp
        need(not host, f"all operands on the device: {described(host)}")
        need(torch.cuda.get_device_capability() >= (8, 9), "needs compute capability 8.9 or 9.0 on")
        need(args[0].dtype in FP8 and args[1].dtype in FP8, f"operands are FP8, not {described(args[:2])}")
        need({args[0].dtype, args[1].dtype} != {torch.float8_e5m2}, "two e5m2 operands are not supported")
        try:
            with Mode():
                _check_scaled_mm_sizes(*args, **kwargs)  # torch's own rules of shapes, layouts and scales on a GPU
        except (RuntimeError, ValueError) as error:
            raise Refused(f"{func}: {error}") from None
        names = ("scale_a", "scale_b", "bias", "scale_result", "out_dtype")
        given = dict(zip(names, args[2:], strict=False)) | kwargs
        rowwise = max(given[name].numel() for name in ("scale_a", "scale_b")) > 1
        need(not rowwise or given.get("out_dtype") == torch.bfloat16, "scales per row give bf16 only")
        blocks = given["scale_a"].dtype == E8M0
        need(not blocks or torch.cuda.get_device_capability() >= (10, 0), "MX scales need compute capability 10.0")
        need(not blocks or not args[0].shape[1] % 32, "MX scales need columns in multiples of 32")
    elif name not in COPIES and mine:
        if name in INDEXED:  # indices may stay on the CPU. aten/src/ATen/native/TensorAdvancedIndexing.cpp
            host = [tensor for tensor in host if not any(tensor is index for index in args[1])]
        # aten/src/ATen/TensorIterator.cpp, compute_types: one device, but for numbers in elementwise operators, and
        # nothing is written from the device into a tensor of the CPU
        number = torch.Tag.pointwise in func.tags or name in TAKE_A_NUMBER | INDEXED
        odd = [tensor for tensor in host if tensor.dim() or not number]
        writes = func._schema.arguments and func._schema.arguments[0].is_write and any(args[0] is t for t in host)
        need(
            not odd and not writes,
            f"expected all tensors to be on the same device, on the CPU are {described(odd or host)}",
        )


def group_name(leaf):
    """Of a process group among a collective's arguments, or None."""
    if isinstance(leaf, torch.ScriptObject):
        with contextlib.suppress(RuntimeError):
            return dist.ProcessGroup.unbox(leaf).group_name
    return leaf if isinstance(leaf, str) else None


# ------------------------------------------------------------------------------------------ what a GPU's time is lost to

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_pinned", "lift_fresh", "set_"}
ASK = {
    "_local_scalar_dense",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}


def nothing_yet():
    """What happened in a step. launches: of operators outside of compiled functions; in_compiled: inside, where a
    compiler makes fewer of them; compiled: calls of compiled functions, as which amp8's Triton kernels count. bytes: that
    operators and compiled functions read from the device's memory and write to it. turned: bytes of copies in which
    another dimension becomes the innermost, as in a matrix's transpose, which torch makes at a tenth of the memory's
    rate. behind: waits for what was asked of the device in an earlier step; the device has work meanwhile."""
    return {"launches": 0, "in_compiled": 0, "compiled": 0, "bytes": 0, "turned": 0, "waits": [], "behind": [],
            "traced": []}  # fmt: skip


steps = [nothing_yet()]  # from one optimizer step to the next; the last one is the one in progress
compiled = []  # the Traffic of the functions in which we are that a GPU would run compiled, the outermost first


late = []  # (tensor on the host, its values) of copies for which nobody has waited yet


def postpone(tensor):
    """A copy to the host that is not waited for: until the next wait it holds no values."""
    if tensor.dtype != torch.bool:
        late.append((tensor, tensor.clone()))
        hide(tensor)


def hide(tensor):
    tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


@contextlib.contextmanager
def after_copies(leaves):
    """The device does in order what it is asked for: of the host's memory it reads what it has copied there before."""
    hosts = [each for each in leaves if type(each) is torch.Tensor and each.device == CPU] if late else []
    memory = {each.untyped_storage().data_ptr() for each in hosts}
    read = [copy for copy in late if copy[0].untyped_storage().data_ptr() in memory]
    for tensor, values in read:
        tensor.copy_(values)
    yield
    for tensor, _ in read:
        hide(tensor)


def arrive(copies=late):
    """The host waits: these copies to it are complete."""
    for copy in [copy for copy in late if any(copy is each for each in copies)]:
        copy[0].copy_(copy[1])
        late[:] = [each for each in late if each is not copy]


def launches(name, args):
    """Of an operator: one, but an operator on lists launches one for each tensor if the lists do not lie alike.
    aten/src/ATen/native/ForeachUtils.h, _check_tensors_share_sizes_and_strides."""
    lists = [each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], torch.Tensor)]
    if not name.startswith("_foreach_") or not lists:
        return 1
    layouts = [[(each.shape, each.stride()) for each in tensors] for tensors in lists]
    dense = all(torch.ops.aten.is_non_overlapping_and_dense(each) for each in lists[0])
    return 1 if dense and all(layout == layouts[0] for layout in layouts) else len(lists[0])


class Traffic:
    """The bytes that a call reads and writes: what it is given, what of it is written, and what it returns."""

    def __init__(self, given):
        self.given = {id(leaf): leaf for leaf in tree_leaves(given) if isinstance(leaf, CudaTensor)}
        self.written = set()  # storages

    def writes(self, func, args, kwargs):
        arguments = zip(func._schema.arguments, args, strict=False)
        named = {argument.name: argument for argument in func._schema.arguments}
        found = [value for argument, value in arguments if argument.is_write and argument.name != "grads"]  # of Adam
        found += [value for key, value in kwargs.items() if named[key].is_write]
        self.written |= {
            leaf.held.untyped_storage()._cdata for leaf in tree_leaves(found) if isinstance(leaf, CudaTensor)
        }

    def done(self, returned):
        """Adds them to those of the step."""
        storages = {leaf.held.untyped_storage()._cdata for leaf in self.given.values()}
        written = [leaf for leaf in self.given.values() if leaf.held.untyped_storage()._cdata in self.written]
        made = {id(leaf): leaf for leaf in tree_leaves(returned) if isinstance(leaf, CudaTensor)}.values()
        made = [leaf for leaf in made if leaf.held.untyped_storage()._cdata not in storages]
        steps[-1]["bytes"] += sum(in_memory(leaf.held) for leaf in (*self.given.values(), *written, *made))


def in_memory(tensor):
    """The bytes of a tensor, those that it repeats once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def innermost(tensor):
    """The dimension whose elements lie side by side, None if there is none."""
    return next((i for i in reversed(range(tensor.dim())) if tensor.stride(i) == 1 and tensor.shape[i] > 1), None)


def turns(name, source, made):
    """Whether an operator is a copy in which another dimension becomes the innermost."""
    return (
        name in ("clone", "copy_", "_to_copy")
        and innermost(source) is not None
        and innermost(source) != innermost(made)
    )


def count(func, name, args, kwargs, here):
    """A launch for each operator that computes or copies, and a wait where the host needs what the device computes:
    CUDA's documentation, "API synchronization behavior": a copy is asynchronous from and to pinned memory only. Returns
    whether it is a copy to the host without a wait."""
    if name in FREE or func.is_view:
        return False
    now = steps[-1]
    now["in_compiled" if compiled else "launches"] += launches(name, args)
    waits, to_host = name in ASK, False
    if name in ("_to_copy", "copy_"):
        source, there = (args[1], isinstance(args[0], CudaTensor)) if name == "copy_" else (args[0], here)
        asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2])
        to_host = isinstance(source, CudaTensor) and not there
        if to_host:  # torch makes what _to_copy returns pinned
            waits = not (asynchronous and (name == "_to_copy" or is_pinned(args[0])))
        elif there and not isinstance(source, CudaTensor):
            waits = not (asynchronous and is_pinned(source))
    if name in INDEXED:
        masks = (torch.bool, torch.uint8)
        waits = any(index is not None and index.dtype in masks for index in args[1])  # nonzero() of each
    if waits:
        now["waits"].append([name, place()])
        arrive()
    return to_host and not waits


def place():
    """The innermost line of this repository on the stack, and the library's line that waited for it."""
    frame, inner = sys._getframe(2), None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(f"{ROOT}/") and "site-packages" not in file and file != __file__:
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}" + (f" by {inner}" if inner else "")
        if inner is None and "site-packages" in file and "/torch/_" not in file:  # Dynamo's way to here
            inner = f"{file.split('site-packages/')[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return inner


# -------------------------------------------------------------------------------------------------------- the disguise

twins = {}  # name of a process group that says nccl -> the same ranks for CPU tensors


def nccl(options, backend_options):
    """In the place of ProcessGroupNCCL's constructor."""
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    twin = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    twin._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    twin._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
    twin._set_group_name(f"{options.group_id} on gloo")
    torch._C._distributed_c10d._register_process_group(f"{options.group_id} on gloo", twin)
    twins[options.group_id] = twin
    return gloo


class Stream:
    """One queue, in which everything has already happened."""

    device, device_index, device_type, stream_id, cuda_stream = CUDA, CUDA.index, 1, 0, 0

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def query(self):
        return True

    def is_capturing(self):
        return False

    def elapsed_time(self, other):
        return 1.0

    def synchronize(self):
        steps[-1]["waits"].append(["synchronize", place()])
        arrive()

    wait = wait_stream = wait_event = lambda self, *_: None


class Event(Stream):
    """Has happened when all that was asked for before is done."""

    step, copies = 0, ()

    def record(self, stream=None):
        self.step, self.copies = len(steps), list(late)

    def synchronize(self):
        steps[-1]["waits" if self.step == len(steps) else "behind"].append(["synchronize", place()])
        arrive(self.copies)


def properties(capability=(9, 0), name="NVIDIA H100 (pretended)"):
    """What torch.cuda.get_device_properties returns."""
    return types.SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=80 << 30, multi_processor_count=132,
        warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
        shared_memory_per_block_optin=232448, gcnArchName="",
    )  # fmt: skip


def wear(capability=(9, 0), name="NVIDIA H100 (pretended)", count=8, utilization=None, lost=None, fp64=True, hip=None):
    """Puts the device in the place of CUDA, for the rest of this process.

    utilization: what torch.cuda.utilization returns; None: it raises, as NVML does for a slice of a card. lost: what
    NCCL says in every collective after the second optimizer step, as if another process had ended. fp64: whether the
    device has it, as CUDA's have and MPS has not.
    """
    capability = tuple(capability)
    global lost_process, has_fp64
    lost_process, has_fp64, torch.version.hip = lost, fp64, hip
    if isinstance(DRIVER, str):
        raise SystemExit(DRIVER)
    importlib.import_module("torch._dynamo")  # makes a table of torch's functions, of those of CUDA too
    nothing, queue, here = lambda *_, **__: None, Stream(), lambda *_, **__: current.index
    torch._C._ensureCUDADeviceGuardSet()  # while there is no device yet, so that torch takes a guard that does nothing
    torch.ones(1, requires_grad=True).sum().backward()  # nor autograd a thread for each
    DRIVER.set_devices(100)  # autograd asks for some that are not there
    torch.autograd.set_multithreading_enabled(False)
    for kernels in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernels}_sdp")(False)

    class NotSupported(Exception):
        """NVML's, from a package that need not be there."""

    def asked_for_utilization(device=None):
        if utilization is None:
            raise NotSupported("Not Supported")
        return utilization

    card = properties(capability, name)
    for module, names in {
        torch.cuda: {
            "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": nothing, "device_count": lambda: count,
            "current_device": here, "set_device": current.set, "synchronize": lambda *_: queue.synchronize(), "empty_cache": nothing,
            "get_device_capability": lambda *_: capability, "get_device_name": lambda *_: name,
            "get_device_properties": lambda *_: card, "is_bf16_supported": lambda *_, **__: True,
            "manual_seed": nothing, "manual_seed_all": nothing, "utilization": asked_for_utilization,
            "get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": nothing,
            "is_current_stream_capturing": lambda: False, "Stream": Stream, "Event": Event,
            "current_stream": lambda *_: queue, "default_stream": lambda *_: queue, "stream": lambda *_: Stream(),
            "device": lambda *_: contextlib.nullcontext(), "max_memory_allocated": lambda *_: 1 << 20,
            "memory_allocated": lambda *_: 1 << 20, "memory_reserved": lambda *_: 1 << 20, "reset_peak_memory_stats": nothing,
            "mem_get_info": lambda *_: (70 << 30, 80 << 30),
        },
        torch.accelerator: {
            "is_available": lambda: True, "current_accelerator": lambda *_, **__: torch.device("cuda"),
            "device_count": lambda: count, "current_device_index": here, "current_stream": lambda *_: queue,
            "synchronize": lambda *_: queue.synchronize(), "max_memory_allocated": lambda *_: 1 << 20, "reset_peak_memory_stats": nothing,
        },
        torch: {"compile": compile, "tensor": moved(torch.tensor), "as_tensor": moved(torch.as_tensor), "_has_compatible_shallow_copy_type": lambda tensor, other: True},
        torch.Tensor: {"data": property(lambda self: torch._C.TensorBase.data.__get__(self), move)},
        data_pinning: {"_pin_memory_loop": in_mode(data_pinning._pin_memory_loop)},
        # Both time themselves by CUDA's events.
        dist.Reducer: {"prepare_for_forward": nothing},
        dist.Logger: {"set_runtime_stats_and_log": nothing},
    }.items():  # fmt: skip
        for key, value in names.items():
            if getattr(value, "__name__", "") == "<lambda>":  # Dynamo wants another object for each name
                value = types.FunctionType(value.__code__, value.__globals__, key, None, value.__closure__)
            setattr(module, key, value)
    replace_kernels()
    c10d.Backend._ensure_backend_registered("nccl")
    c10d.Backend._plugins["NCCL"] = c10d.Backend._BackendPlugin(nccl, True)
    register_optimizer_step_post_hook(lambda *_: steps.append(nothing_yet()))
    Mode().__enter__()


def in_mode(function):
    """What a thread runs, in a `Mode` too: a mode counts only in the thread that entered it."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with Mode():
            return function(*args, **kwargs)

    return call


def moved(make):
    """torch.tensor and its like copy to the device in C++, unseen: here they make a CPU tensor, which is then moved."""

    @functools.wraps(make)
    def call(data, *args, device=None, **kwargs):
        if device is None or torch.device(device).type != "cuda":
            return make(data, *args, device=device, **kwargs)
        return make(data, *args, device="cpu", **kwargs).to(device)

    return call


def compile(function=None, **options):
    """torch.compile, which runs the function as it is, and counts apart what is in it."""
    if function is None:
        return lambda function: compile(function, **options)
    if isinstance(function, torch.nn.Module):
        return function

    block = getattr(function, "__self__", None)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if isinstance(block, torch.nn.Module) and type(block) not in traced_kinds and torch.is_grad_enabled():
            traced_kinds.add(type(block))
            if hasattr(block, "unshard"):  # its parameters are there when FSDP2's hook has gathered them
                trace_in_forward(block)
            else:
                trace(function, block, args, kwargs)
        compiled.append(Traffic((args, kwargs)))
        try:
            out = function(*args, **kwargs)
        finally:
            traffic = compiled.pop()
        if not compiled:
            steps[-1]["compiled"] += 1
            traffic.done(out)
        return out

    return call


traced_kinds = set()  # of blocks, each in a process once: they share their code
real_kernels = {}  # what `replace_kernels` has replaced, by name


@contextlib.contextmanager
def as_compiled():
    """amp8's own kernels are there, and Triton compiles for an H100."""
    from amp8 import kernels

    if kernels.HAS_TRITON:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        h100 = GPUTarget("cuda", 90, 32)
        driver.set_active(types.SimpleNamespace(get_current_target=lambda: h100, get_current_device=lambda: 0))
    with mock.patch.multiple(kernels, **real_kernels):
        yield


def trace_in_forward(block):
    """Traces a block at its next call, inside its hooks."""
    forward = block.forward

    def once(*args, **kwargs):
        del block.forward
        trace(forward, block, args, kwargs)
        return forward(*args, **kwargs)

    block.forward = once


def trace(function, block, args, kwargs):
    """Traces a block's forward and backward pass with torch's own compiler, in one graph, with tensors that say cuda and
    have no values, in the place of the block's own. An exception is one that a GPU would raise."""
    fakes, put_back = {}, []
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf):
        if is_traceable_wrapper_subclass(leaf):  # FP8 weights that torchao's FSDP2 gathers
            return transform_subclass(leaf, lambda _, inner: fake(inner))
        if not isinstance(leaf, CudaTensor):
            return leaf
        if id(leaf) not in fakes:
            made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=CUDA)
            made.requires_grad_(leaf.requires_grad)
            fakes[id(leaf)] = (
                torch.nn.Parameter(made, leaf.requires_grad) if getattr(leaf, "_is_param", False) else made
            )
        return fakes[id(leaf)]

    with torch.utils._python_dispatch._disable_current_modes(), mode, as_compiled():
        for module in block.modules():
            for holder in (vars(module), module._parameters, module._buffers, getattr(module, "ports", {})):
                for key, value in holder.items():
                    if isinstance(value, CudaTensor) or is_traceable_wrapper_subclass(value):
                        put_back.append((holder, key, value))
                        holder[key] = fake(value)
        try:
            out = real_compile(function, fullgraph=True, backend="aot_eager")(
                *tree_map(fake, args), **tree_map(fake, kwargs)
            )
            sum(leaf.float().sum() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)).backward()
        finally:
            for holder, key, value in put_back:
                holder[key] = value
    steps[-1]["traced"].append(type(block).__name__.removeprefix("FSDP"))


def replace_kernels():
    """amp8's Triton kernels, as the functions that say what they compute."""
    sys.path.append(str(ROOT))
    from amp8 import kernels, linear, optimizer, scaling

    def cast_delayed(x, dtype, state, slot, window, recording, transposed):
        scale, updates, history = scaling.parts(state)
        amax = scaling.amax(x)
        scale = linear.cast_scale(amax, scale[slot], updates[slot], dtype, window)
        if recording:
            scaling.record_(history[:, slot], amax)
        codes = scaling.quantize(x, scale, dtype)
        return codes, codes.t().contiguous() if transposed else None, scale, scale.reciprocal()

    def adam(flats, numbers, seeds, starts, decoupled, noisy, found_inf=None):
        found, tensors = [], [t for w, _, *others in flats for t in (w, *others) if t is not None]
        before = [tensor.clone() for tensor in tensors] if found_inf is not None else []
        for flat, row, *place in zip(flats, numbers, seeds, starts, strict=True):
            slice_of = functools.partial(optimizer.adam_slice, *flat, row.unbind())
            found.append(slice_of(place if noisy else None, decoupled) if len(flat[0]) else torch.zeros_like(row[:3]))
        for tensor, old in zip(tensors, before, strict=False):
            bits = torch.uint8 if tensor.element_size() == 1 else tensor.dtype
            tensor.view(bits).copy_(torch.where(found_inf.reshape(()) != 0, old.view(bits), tensor.view(bits)))
        return torch.stack(found)

    def round_gradients(values, codes, scales):
        for x, code, scale in zip(values, codes, scales, strict=True):
            scale.copy_(scaling.gradient_scale(scaling.amax(x)))
            code.copy_(scaling.quantize(x, scale, scaling.E4M3))

    def cast_weight(weight, scale, transposed, bias=None, dtype=torch.bfloat16, after=None):
        factor = 1.0 if weight.dtype == scaling.E4M3 else kernels.FP16_TO_E4M3
        codes = (weight.float() * factor).to(scaling.E4M3)
        codes = codes.t().contiguous() if transposed else codes
        return codes, (scale * factor).reciprocal(), None if bias is None else bias.to(dtype)

    def squares(codes):
        return torch.stack([tensor.float().square().sum() for tensor in codes])

    for function in (cast_delayed, adam, round_gradients, cast_weight, squares):
        real_kernels[function.__name__] = getattr(kernels, function.__name__)
        setattr(kernels, function.__name__, compile(function))


# ---------------------------------------------------------------------------------------------------------------- runs


def serve():
    """Runs for who asks on stdin: a line of JSON in, {"exit_codes": [...], "text": ...} out, a line each.

    config, name, argv, processes, env: as of conftest.Ranks, which forks the recipe's own main; wear: arguments of
    `wear`; imports: modules of this folder whose `install()` is called in the forked process; script: a path, run as
    `python -m faithful` would, in place of a recipe. Each rank leaves what it counted as <output_dir>.rank<i>.json.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if isinstance(DRIVER, str):
        return out.write(json.dumps({"missing": DRIVER}) + "\n")
    sys.path.insert(0, str(Path(__file__).parent))
    for name in ("timm", "transformers", "torchao.float8"):  # once for all runs
        importlib.import_module(name)
    import conftest
    from conftest import Ranks

    conftest.IMPORTED_ONCE = ["datasets"]  # others look for a GPU when they are imported, which is in the forks
    sys.modules["pretend"] = sys.modules["__main__"]
    out.write(json.dumps({"missing": None}) + "\n")
    for line in sys.stdin:
        job = json.loads(line)
        chosen = {key: job.get(key) for key in ("processes", "env", "script")}
        before = functools.partial(begin, job)
        ranks = Ranks(job["config"], job["argv"], job.get("name", "vit"), **chosen, before=before)
        codes = ranks.wait(job.get("timeout", 240))
        out.write(json.dumps({"exit_codes": codes, "text": ranks.text()}) + "\n")


def begin(job, rank):
    """In a forked rank, before its run."""
    global CUDA
    CUDA, leave = torch.device("cuda", rank), os._exit
    Stream.device, Stream.device_index = CUDA, rank
    counts = Path(f"{job['argv'][job['argv'].index('--output_dir') + 1]}.rank{rank}.json")

    def counted(code):
        counts.write_text(json.dumps(steps))
        leave(code)

    os._exit = counted
    try:
        for module in job.get("imports", ()):
            importlib.import_module(module).install()
        wear(**job.get("wear", {}))
        if job.get("script"):
            from faithful.__main__ import take_its_place

            sys.path.append(str(Path(job["script"]).parent))
            take_its_place()
    except BaseException:
        traceback.print_exc()
        raise


if __name__ == "__main__":
    serve()
