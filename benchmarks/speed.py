"""What FP8 costs a GPU beside its products, as far as it can be known without one.

    python benchmarks/speed.py --output results/speed.json [--only layers compiled launches]

layers    a Linear layer's forward and backward pass, and an update of AdamW, on the pretended GPU of
          tests/pretend.py: launches of torch's operators, compiled functions (MS-AMP's kernels count as such, each
          once), bytes read and written for each element of x, y and w, and bytes of copies by torch that transpose
compiled  kernels of an MS-AMP layer's two passes in the code that torch's compiler generates for an H100; those of
          the whole layer alone, which are fewer in a block, where casts are part of the kernels before them.
          And of an update of any number of layers, beside the one of Adam
launches  kernels, copies and fills of a whole step under O2, of fp8_speed.py's Llama and ViT with compiled blocks:
          in the code of the blocks and of amp8's compiled functions, amp8's own kernels, and torch's operators, one
          each. What libraries launch inside of one operator is not seen (an H200: a fill for each FP8 product, and
          one for each sum of the compiler's code). `garbled`: of the code that this test of triton#11111 finds
"""

import contextlib
import functools
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

from harness import ROOT, arguments, command, made, save

WAYS = ("bf16", "O1", "O2", "O3")
M, K, N = 512, 256, 384
SHAPES = [(M, K, N), (2 * M, K, N), (M, 2 * K, N), (M, K, 2 * N)]  # of x [M, K] and w [N, K]


# ------------------------------------------------------------------------------------------------------------- layers


def layers():
    """{way: its figures}. Replaces CUDA in this process."""
    import pretend  # before torch

    pretend.wear()
    return {way: of_layer(way) for way in WAYS}


def of_layer(way):
    first, *others = (of_shape(way, *shape) for shape in SHAPES)
    found = {part: {key: first[part][key] for key in ("launches", "compiled", "waits", "turned")} for part in first}
    # What a pass moves is a MK + b MN + c NK + a constant: twice M doubles the first two, and so on.
    for part, figures in found.items():
        whole = first[part]["bytes"]
        by_m, by_k, by_n = (other[part]["bytes"] - whole for other in others)
        mk, mn, nk = (by_m + by_k - by_n) / 2, (by_m + by_n - by_k) / 2, (by_k + by_n - by_m) / 2
        figures["bytes"] = {"x": round(mk / (M * K), 2), "y": round(mn / (M * N), 2), "w": round(nk / (N * K), 2)}
    return found


def of_shape(way, m, k, n):
    """{part: what it counts in one step} of a layer with x [m, k] and w [n, k] in the dtypes of bf16 autocast."""
    import pretend
    import torch

    import amp8

    layer = torch.nn.Linear(k, n, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    if way != "bf16":
        layer, optimizer = amp8.initialize(layer, optimizer, way)
        # As in training, which stops before a loss that is not finite reaches the weights.
        optimizer.found_inf = torch.zeros((), device="cuda")
    layer.cuda()
    x, dy = (torch.ones(m, width, device="cuda", dtype=torch.bfloat16) for width in (k, n))
    x.requires_grad_()

    def counted(function):
        pretend.steps[:] = [pretend.nothing_yet()]
        function()
        return pretend.steps[0] | {"waits": sum(len(step["waits"]) for step in pretend.steps)}

    def passes():
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x)
        y.backward(dy)
        x.grad = None

    for _ in range(2):  # the first makes the optimizer's state
        found = {"passes": counted(passes), "update": counted(optimizer.step)}
        optimizer.zero_grad()
    return found


# ---------------------------------------------------------------------------------------------------- generated code


def compiled():
    """{level: {pass: its kernels}} of a layer with a bias, and of an update {function: its kernels}. There is no GPU:
    tensors have no values, nothing runs."""
    without_a_driver()
    return {level: generated(level) for level in ("O2", "O3")} | {"update": updating()}


def without_a_driver():
    import pretend  # before torch: autograd asks its driver for devices
    import torch

    torch._C._ensureCUDADeviceGuardSet()
    torch.ones(1, requires_grad=True).sum().backward()
    pretend.DRIVER.set_devices(100)
    torch.autograd.set_multithreading_enabled(False)


def generated(level, rows=8192, width=4096, after=lambda x: x):
    """after: what is computed of x before the layer."""
    import torch
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    from amp8 import kernels, linear, scaling

    kernels.register()
    mode, found = FakeTensorMode(), {}
    with mode, torch.device("cuda"):
        x = torch.empty(rows, width, dtype=torch.bfloat16, requires_grad=True)
        port = torch.empty((), dtype=torch.bfloat16).expand(width, width).detach().requires_grad_()
        bias = torch.empty(width, requires_grad=True)
        codes = torch.empty(width, width, dtype=scaling.E4M3 if level == "O3" else torch.float16)
        address = torch.empty(1, dtype=torch.int64)
        scale = torch.empty(())

    def layer(x, port, bias, codes, scale, address):
        x, delayed = after(x), (None, address)
        with torch.no_grad():
            x8 = linear.cast(x.detach(), delayed, linear.INPUT, scaling.E4M3, 16)
        settings = 16, scaling.E5M2, False, False, torch.bfloat16
        return linear.Products.apply(x, port, bias, codes, scale, *x8, delayed, settings, set())

    def compiler(name):
        def compile(graph, inputs):
            found[name] = kernels_of(graph, inputs, mode)
            return make_boxed_func(graph.forward)

        return compile

    with mode, compiling():
        passes = {"fw_compiler": compiler("forward"), "bw_compiler": compiler("backward")}
        function = aot_function(layer, **passes, partition_fn=min_cut_rematerialization_partition,
                            decompositions=select_decomp_table(), keep_inference_input_mutations=True)  # fmt: skip
        y = function(x, port, bias, codes, scale, address)
        y.backward(torch.empty_like(y))
    return found


@contextlib.contextmanager
def compiling():
    """Code is compiled, for an H100."""
    import torch

    for_an_h100()
    nothing = {"get_rng_state": lambda *_: torch.empty(0), "set_rng_state": lambda *_: None}
    is_compiling = mock.patch.object(torch.compiler, "is_compiling", lambda: True)
    with is_compiling, mock.patch.multiple(torch.cuda, **seen(), **nothing):
        yield


def for_an_h100():
    """Triton makes its code for one."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = types.SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    driver.set_active(target)


def updating(layers=225, window=16):
    """{function: its kernels} of what an update computes for all layers beside Adam itself."""
    import torch
    from functorch.compile import aot_function, make_boxed_func
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    from amp8 import convert, optimizer, scaling

    def kernels(function, *inputs):
        found = []

        def compile(graph, example):
            found.extend(kernels_of(graph, example, mode))
            return make_boxed_func(graph.forward)

        with mode, torch.no_grad(), compiling():
            aot_function(function, compile, decompositions=select_decomp_table())(*inputs)
        return found

    mode = FakeTensorMode()
    with mode, torch.device("cuda"):
        each = lambda *more: torch.empty(layers, *more)  # noqa: E731
        step = each(10), None, (each(), each(), each()), (each(), each()), (each(), each(), each(2)), torch.empty(())
        states = each(scaling.HISTORY + window, 2)
    numbers = lambda *inputs: optimizer.numbers_of.__wrapped__(*inputs, False, False)  # noqa: E731
    scales = lambda *inputs: convert.updated.__wrapped__(*inputs, (scaling.E4M3, scaling.E5M2))  # noqa: E731
    return {"numbers of Adam": kernels(numbers, *step), "delayed scales": kernels(scales, states)}


def seen():
    """What torch asks a GPU: an H100's answers."""
    card = {"name": "H100", "major": 9, "minor": 0, "total_memory": 80 << 30, "multi_processor_count": 132,
            "warp_size": 32, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
            "regs_per_multiprocessor": 65536, "L2_cache_size": 50 << 20, "shared_memory_per_block": 49152,
            "shared_memory_per_block_optin": 232448, "gcnArchName": ""}  # fmt: skip
    return {"get_device_properties": lambda *_: types.SimpleNamespace(**card), "is_available": lambda *_: True,
            "current_device": lambda *_: 0, "get_device_capability": lambda *_: (9, 0)}  # fmt: skip


def kernels_of(graph, inputs, mode):
    """Names of the kernels that Inductor's code for a graph launches."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    answers = {key: answer for key, answer in seen().items() if key != "get_device_capability"}
    interface = mock.patch.multiple(CudaInterface, **answers, is_triton_capable=lambda *_: True)
    with interface, V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        post_grad_passes(graph, is_inference=False)
        lowered = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env)
        with V.set_graph_handler(lowered):
            lowered.run(*inputs)
            code = lowered.codegen()[0]
    code = getattr(code, "value", code)
    GARBLED.extend(garbled(code))
    called = r"(\w+)\.run\(|extern_kernels\.(\w+)\(|= torch\.ops\.aten\.(\w+)\.\w+\(|\.(sum)\("
    return ["".join(names) for names in re.findall(called, code[code.rindex("def call") :])]


GARBLED = []  # names of all kernels so far that ptxas 12.9 compiles wrongly (triton#11111)


def garbled(code):
    """The names of the kernels that write FP8 codes in two places and have a min or max that hands on NaN."""
    kernels = [part.partition("''', device_str")[0] for part in code.split("async_compile.triton(")[1:]]
    wrong = [
        text for text in kernels if len(re.findall(r"'(?!in_ptr)\w+': '\*fp8", text)) > 1 and "PropagateNan" in text
    ]
    return [re.match(r"'(\w+)'", text)[1] for text in wrong]


# ----------------------------------------------------------------------------------------------------------- launches


def launches():
    """{model: {where launches come from: their number}}. As in `compiled`, nothing runs."""
    without_a_driver()
    import torch

    import amp8
    from amp8 import kernels

    nothing = {"get_rng_state": lambda *_: torch.empty(0), "set_rng_state": lambda *_: None,
               "is_current_stream_capturing": lambda: False, "_exchange_device": lambda *_: 0,
               "_maybe_exchange_device": lambda *_: 0}  # fmt: skip
    cuda = mock.patch.multiple(torch.cuda, **seen(), **nothing)
    with cuda, mock.patch.object(torch.accelerator, "is_available", lambda: False):
        return {model: of_step(model, torch, amp8, kernels) for model in ("llama", "vit")}


COUNTED, COUNTING = {}, [False]  # of a step, also by functions that are compiled once for both models


def of_step(model, torch, amp8, kernels):
    import fp8_speed
    import pretend
    from torch._inductor import compile_fx, config
    from torch._inductor.fx_passes import joint_graph
    from torch._subclasses.fake_tensor import FakeTensorMode

    for_an_h100()
    found, counting = COUNTED, COUNTING
    found.update(dict.fromkeys(("compiled", "own", "torch", "products"), 0))
    real = {"dispatch": FakeTensorMode.dispatch, "tensor": torch.tensor, "item": torch.Tensor.item}

    def dispatch(mode, func, types, args=(), kwargs=None):
        out = real["dispatch"](mode, func, types, args, kwargs or {})
        if counting[0] and isinstance(func, torch._ops.OpOverload) and not func.is_view:
            name = func._schema.name.split("::")[1]
            tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            if name not in pretend.FREE | {"device"} and any(t.is_cuda for t in tensors):
                found["torch"] += pretend.launches(name, args)
        return out

    def inner(graph, inputs, **_):
        copy = torch.fx.GraphModule(graph, torch.fx.Graph())
        copy.graph.output(copy.graph.graph_copy(graph.graph, {}))
        for node, other in zip(graph.graph.nodes, copy.graph.nodes, strict=True):
            other.meta = dict(node.meta)
        compile_fx.record_original_output_strides(copy)
        names = kernels_of(copy, inputs, torch._guards.detect_fake_mode(inputs))

        def run(args):
            found["compiled"] += len(names) * counting[0]
            found["products"] += names.count("_scaled_mm") * counting[0]
            before, counting[0] = counting[0], False
            try:
                return graph.forward(*args)
            finally:
                counting[0] = before

        run._boxed_call = True
        return run

    def backend(graph, inputs):
        return compile_fx.compile_fx(graph, inputs, inner_compile=inner)

    def launch(name, grid, *args, **constants):
        found["own"] += counting[0]

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[0]

    def item(tensor):  # of numbers on the host: a step's, and a rate of dropped paths
        torchs = "site-packages/torch/" in sys._getframe(1).f_code.co_filename
        return real["item"](tensor) if torchs else float(counting[0])

    def on_the_host(data, *rest, device=None, **more):
        host = device is None or torch.device(device).type != "cuda"
        return real["tensor"](data, *rest, device=device if host and device else "cpu", **more)

    def places(sizes, starts, which, device):
        return torch.empty(8, 2, dtype=torch.int32, device=device)

    compiler = functools.partial(torch.compile, backend=backend)
    mode, head = FakeTensorMode(allow_non_fake_inputs=True), ("lm_head", "head")
    with contextlib.ExitStack() as patches:
        for module, name, value in (
            (FakeTensorMode, "dispatch", dispatch), (torch, "tensor", on_the_host), (torch, "compile", compiler),
            (torch.Tensor, "item", item), (torch.Tensor, "data_ptr", lambda _: 0),
            (torch.Tensor, "pin_memory", lambda tensor: tensor),
            (torch._C, "_select_conv_backend", lambda *_, **__: torch._C._ConvBackend.Cudnn),
            (torch._C, "_conv_determine_backend_memory_format", lambda *_, **__: torch.contiguous_format),
            (torch.nn.functional, "scaled_dot_product_attention", attention),
            (kernels, "launch", launch), (kernels, "chunks", places), (joint_graph, "lazy_init", lambda *_: None),
            (joint_graph, "constant_fold_uniform_value", lambda _: None),
            (config, "joint_graph_constant_folding", False),
        ):  # fmt: skip
            patches.enter_context(mock.patch.object(module, name, value))
        patches.enter_context(mode)
        with torch.device("cuda"):
            net, blocks, loss_of = fp8_speed.MODELS[model](False)
        skip = [name for name, _ in net.named_modules() if name in head]
        net, optimizer = amp8.initialize(net, torch.optim.AdamW(net.parameters(), 1e-4, fused=True), "O2", skip=skip)
        for block in blocks:
            block.compile(fullgraph=True)
        for counting[0] in (False, True):  # the first step makes the optimizer's state
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(net)
            loss.backward()
            amp8.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        counting[0] = False
    return {"all": found["compiled"] + found["own"] + found["torch"], **found, "garbled": len(GARBLED)}


PARTS = {"layers": layers, "compiled": compiled, "launches": launches}


def part(name):
    """The figures of a part, from a process of its own: some replace CUDA in theirs."""
    line = [sys.executable, __file__, "--here", name]
    return json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts")
    parser.add_argument("--here", choices=PARTS, help="print the figures of this part, from this process")
    args = parser.parse_args()
    if args.here:
        sys.path.append(str(ROOT / "tests"))
        return print(json.dumps(PARTS[args.here]()))
    found = made(args.output)
    for name in args.only or PARTS:
        found[name] = part(name)
        for row, figures in found[name].items():
            print(f"{name} {row}: {json.dumps(figures)}", flush=True)
    if args.output:
        parts = {name: found[name] for name in PARTS if name in found}
        save(args.output, {"command": command(found.get("command")), **parts}, ["triton", "transformers", "timm"])


if __name__ == "__main__":
    main()
