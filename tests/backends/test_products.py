"""16-bit products on a CPU without fast 16-bit kernels: the fp32 kernels, given the same values."""

import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import launched
from test_kept import run

from faithful.backends import cpu_matmul

EVERYTHING = {kind: list(cpu_matmul.DTYPES) for kind in cpu_matmul.OPERATORS}


@pytest.fixture
def replaced():
    undo = cpu_matmul.replace(EVERYTHING)
    yield
    undo()


def linear(x, w):
    return F.linear(x, w, w[:, 0])


def out(x, w):
    return torch.mm(x, w.t(), out=x.new_empty(0))


def in_place(x, w):
    return x.new_zeros(len(x), len(w)).addmm_(x, w.t(), beta=0.5)


def attention(x, w):
    q = x.view(2, 2, 8, 16)
    return F.scaled_dot_product_attention(q, q + 1, q, attn_mask=x.new_zeros(8, 8).tril(), dropout_p=0.0)


def convolution(x, w):
    return F.conv2d(x.view(2, 4, 8, 8), w[:12].reshape(8, 4, 3, 2), padding=1, stride=2)


PRODUCTS = {
    "linear": linear,
    "matmul": lambda x, w: x.view(4, 8, 16) @ w.t(),
    "bmm": lambda x, w: torch.bmm(x.view(4, 8, 16), x.view(4, 8, 16).mT),
    "baddbmm": lambda x, w: torch.baddbmm(
        x.new_full((4, 8, 8), torch.nan), x.view(4, 8, 16), x.view(4, 8, 16).mT, beta=0
    ),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "attention": attention,
    "convolution": convolution,
}


def results(product, dtype):
    """The output, and the gradients of both inputs where they have any."""
    torch.manual_seed(0)
    x, w = torch.randn(32, 16), torch.randn(16, 16)
    x, w = (one.to(dtype).requires_grad_() for one in (x, w))
    y = product(x, w)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype))
    return [one for one in (y.detach(), x.grad, w.grad) if one is not None]


@pytest.mark.parametrize("dtype", cpu_matmul.DTYPES.values(), ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_are_those_of_the_16_bit_kernels(name, dtype, request):
    """They differ in the order of a sum, so in the last bit of some elements."""
    own = results(PRODUCTS[name], dtype)
    request.getfixturevalue("replaced")
    for expected, found in zip(own, results(PRODUCTS[name], dtype), strict=True):
        assert found.dtype == dtype and found.shape == expected.shape
        assert torch.allclose(found.float(), expected.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-2)


@pytest.mark.parametrize("product", [out, in_place])
def test_what_writes_to_a_given_tensor(product, replaced):
    x, w = torch.randn(32, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    assert torch.equal(product(x, w), (x.float() @ w.float().t()).bfloat16())


def test_fp32_and_float64_take_torchs_own_kernels(replaced):
    x = torch.randn(64, 64)
    assert torch.equal(x @ x, cpu_matmul.torch.library.get_kernel("aten::mm", "CPU").call_boxed(
        torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), x, x))  # fmt: skip
    assert (x.double() @ x.double()).dtype == torch.float64


def conv_of_two(x, w):
    return F.conv2d(x.view(2, 4, 8, 8).float(), w[:12].reshape(8, 4, 3, 2), w[0, :8])


@pytest.mark.parametrize(
    "product", [lambda x, w: F.linear(x.float(), w, w[:, 0]), lambda x, w: x @ w.float(), conv_of_two]
)
def test_two_dtypes_are_torchs_error(product, request):
    """As on a GPU: the script would end there."""
    tensors = torch.randn(32, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    with pytest.raises(RuntimeError) as own:
        product(*tensors)
    request.getfixturevalue("replaced")
    with pytest.raises(RuntimeError) as found:
        product(*tensors)
    assert str(found.value) == str(own.value)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_kernels_of_autograd_autocast_and_compile_are_these(replaced, monkeypatch, compiled):
    """Each of them reaches the kernel below, in the forward and in the backward pass: two of a product's tensors are
    cast in the forward pass, with the bias a third, and four in the backward pass."""
    seen = []
    monkeypatch.setattr(torch.Tensor, "float", lambda self: seen.append(self.dtype) or self.to(torch.float32))
    model = torch.nn.Linear(16, 16)
    model = torch.compile(model) if compiled else model
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(8, 16, requires_grad=True))
    forward = len(seen)
    y.sum().backward()
    assert forward == 3 and len(seen) == forward + 4 and set(seen) == {torch.bfloat16}


def test_they_are_restored():
    before = torch.library.get_kernel("aten::mm", "CPU")
    x = torch.randn(64, 64).bfloat16()
    expected = x @ x
    cpu_matmul.replace(EVERYTHING)()
    assert torch.equal(x @ x, expected) and before is not None and not cpu_matmul.active


def test_what_is_slow_is_what_onednn_has_no_kernels_for():
    """On AVX2 every product of 16 bit, whatever this CPU has besides, and the same in every run."""
    code = "from faithful.backends import cpu_matmul as products; print(products.slow())"
    env = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    found = launched(sys.executable, "-c", code, env=env).stdout
    assert found == "{'products': ['bf16', 'fp16'], 'attention': ['bf16', 'fp16']}\n"


@pytest.mark.parametrize("amx", [False, True])
def test_attention_is_slow_where_there_is_no_amx_too(monkeypatch, amx):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx, "amx_fp16": amx})
    assert cpu_matmul.slow() == {"products": ["fp16"], "attention": ["fp16"] if amx else ["bf16", "fp16"]}


STEP = """
from faithful.backends import cpu_matmul as products
import torch.nn.functional as F
products.slow = lambda: {"products": ["bf16"], "attention": []}
plain = torch.library.get_kernel("aten::mm", "CPU")
accelerator = Accelerator(project_dir=folder)
model = torch.nn.Sequential(linear(), linear(), linear())
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
step(model, optimizer)
accelerator.end_training()
print("left", products.active)
"""


@pytest.mark.parametrize(
    ("config", "kinds"), [("single_bf16", "products"), ("single_fp16", ""), ("fsdp_bf16", "products")]
)
def test_the_run_says_so(tmp_path, config, kinds):
    text = run(tmp_path, STEP, config)
    said = " (products in fp32 from bf16 values: this CPU has no fast bf16 kernels)" if kinds else ""
    assert f"{config[-4:]} compute{said}" in text and "left {}" in text
    assert "this CPU has" in text or not kinds
