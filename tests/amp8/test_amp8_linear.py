"""The FP8 Linear multiplies in FP8, saves and records little, and runs compiled and checkpointed."""

import copy
import itertools
import math

import pytest
import torch
from amp8_helpers import linears, relative_error, seeded, seeded_model, start, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp8
from amp8 import scaling
from amp8.coded import PLAIN_APPLY, CodesRead, codes_of
from amp8.linear import FP8Conv1D, FP8Linear, fp8_weight
from amp8.recipes import RECIPES

E4M3, E5M2 = scaling.E4M3, scaling.E5M2
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def layer(level="O2", bias=True, **options):
    model, optimizer = start(linears(64, 48, bias=bias), level, **options)
    return model[0], optimizer


def rounded(x, dtype):
    """Returns x rounded to FP8 with in-time power-of-two scaling."""
    scale = scaling.power_of_two_scale(x.abs().max(), dtype)
    return scaling.dequantize(scaling.quantize(x, scale, dtype), scale)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_three_products_bit_for_bit(level):
    linear, _ = layer(level, exact=True)
    x = seeded(2, 16, 64, seed=1).requires_grad_()
    dy = seeded(2, 16, 48, seed=2) * 1e-3
    y = linear(x)
    y.backward(dy)
    x8, dy8 = rounded(x.detach().view(-1, 64), E4M3), rounded(dy.view(-1, 48), E5M2)
    w8 = linear.true_weight()
    if level == "O2":  # one fixed power of two below the fp16 codes
        scale = linear.weight_scale * 2**-8
        w8 = scaling.dequantize(scaling.quantize(w8, scale, E4M3), scale)
    assert torch.equal(y, (x8 @ w8.t()).view(2, 16, 48) + linear.bias)
    assert torch.equal(x.grad, (dy8 @ w8).view(2, 16, 64))
    dw = dy8.t() @ x8
    assert torch.equal(linear.gradient.value(), rounded(dw, E4M3))
    assert torch.equal(linear.bias.grad, dy.sum((0, 1)))
    assert torch.equal(linear.weight.grad, linear.gradient.value()) and linear.ports[torch.float32].grad is None


def test_it_takes_its_input_by_the_name_of_the_layer_that_it_was():
    """As torch's Linear and transformers' Conv1D name it."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    x = seeded(4, 64)
    for made, name in (
        (layer()[0], "input"),
        (start(nn.Sequential(conv1d(48, 64)))[0][0], "x"),
    ):
        assert type(made) not in (nn.Linear, conv1d) and torch.equal(made(**{name: x}), made(x))


def test_products_are_as_close_as_fp8_allows():
    plain = seeded_model(lambda: nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 64)))
    model, _ = start(copy.deepcopy(plain))
    x, y = seeded(512, 256), seeded(512, 64, seed=1)
    for net in (plain, model):
        (net(x) - y).square().mean().backward()
    assert 0.01 < relative_error(model(x), plain(x)) < 0.06
    for i in (0, 2):
        assert 0.01 < relative_error(model[i].gradient.value(), plain[i].weight.grad) < 0.12


@every_recipe
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_saves_one_byte_per_input_element_and_no_copy_of_the_weight(level, recipe, monkeypatch):
    monkeypatch.setattr(scaling, "operand", scaling.quantize)  # as on a GPU
    linear, _ = layer(level, recipe=recipe)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(seeded(128, 64).requires_grad_())
    fp8 = [t for t in saved if t.dtype == E4M3 and t.shape == (64, 128)]  # transposed
    assert len(fp8) == 1
    expected = {linear.weight.data_ptr(), fp8[0].data_ptr()}
    assert sum(t.nbytes for t in saved if t.data_ptr() not in expected) <= 64  # scales


@every_recipe
def test_a_frozen_weight_saves_no_input_and_gets_no_gradient(recipe):
    linear, optimizer = layer(recipe=recipe)
    linear.weight.requires_grad_(False)
    saved = []
    x = seeded(128, 64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = linear(x)
    assert not any(t.shape == (128, 64) for t in saved)
    y.sum().backward()
    assert linear.gradient.codes is None and x.grad is not None
    before = linear.codes.clone()
    optimizer.step()
    assert torch.equal(linear.codes, before) and not linear.weight.requires_grad


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_values_stay_visible(poison):
    linear, optimizer = layer()
    x = seeded(32, 64)
    x[3, 5] = poison
    assert not torch.isfinite(linear(x)).any()
    linear, optimizer = layer()
    y = linear(seeded(32, 64))
    dy = torch.ones_like(y)
    dy[2, 7] = poison
    y.backward(dy)
    assert linear.gradient.value().isnan().all()
    assert not torch.isfinite(amp8.clip_grad_norm_([linear.weight], 1.0))
    assert not torch.isfinite(amp8.clip_grad_norm_([linear.weight, linear.bias], 1.0))


def test_overflow_of_the_gradient_product_stays_visible():
    linear, _ = layer(bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(seeded(32, 64) * 1e30)
    y.backward(torch.full_like(y, 1e30))
    assert not torch.isfinite(amp8.clip_grad_norm_([linear.weight], 1.0))


def test_warm_up_is_in_time_then_the_window_decides():
    linear, optimizer = layer()
    for step in range(16):
        assert linear.updates.tolist() == [step, step]
        linear((seeded(32, 64) + step) * 2.0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert linear.updates.tolist() == [16, 16]
    largest = max(((seeded(32, 64) + step) * 2.0).abs().max() for step in range(16))
    assert linear.scale[0] == scaling.power_of_two_scale(largest, E4M3)
    # a small input is now rounded with the window's scale, which leaves little of it
    x = seeded(32, 64) * 1e-4
    x8 = scaling.dequantize(scaling.quantize(x, linear.scale[0], E4M3), linear.scale[0])
    w8 = scaling.dequantize(fp8_weight(linear.codes, linear.weight_scale, False), linear.weight_scale)
    linear.exact = True
    assert torch.equal(linear(x), x8 @ w8.t() + linear.bias)
    assert relative_error(x8, x) > 0.5


def test_a_step_records_the_largest_of_its_micro_batches():
    linear, optimizer = layer()
    for factor in (1.0, 5.0, 2.0):
        linear(seeded(32, 64) * factor).sum().backward()
    assert linear.amax_history[0, 0] == (seeded(32, 64) * 5.0).abs().max()
    optimizer.step()
    assert linear.amax_history[0, 0] == 0 and linear.amax_history[1, 0] == (seeded(32, 64) * 5.0).abs().max()


def test_an_overflow_sends_its_slot_back_to_warm_up():
    linear, optimizer = layer()
    for _ in range(3):
        linear(seeded(32, 64)).sum().backward()
        optimizer.step()
    y = linear(seeded(32, 64))
    y.backward(torch.full_like(y, math.inf))
    linear.gradient.clear()
    optimizer.step()
    assert linear.updates.tolist() == [4, 0]


@every_recipe
def test_evaluation_leaves_no_trace(recipe):
    linear, _ = layer(recipe=recipe)
    linear(seeded(32, 64)).sum().backward()
    before = {name: getattr(linear, name).clone() for name in linear.SCALING}
    with torch.no_grad():
        linear.eval()(seeded(32, 64) * 100)
        linear.train()(seeded(32, 64) * 100)
    for name, value in before.items():
        assert torch.equal(getattr(linear, name), value), name


@every_recipe
def test_autocast_decides_the_output_dtype(recipe):
    linear, _ = layer(recipe=recipe)
    x = seeded(32, 64)
    assert linear(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
        assert y.dtype == torch.bfloat16
        with amp8.high_precision(linear):
            assert linear(x).dtype == torch.bfloat16
    x16 = x.bfloat16().requires_grad_()
    linear(x16).sum().backward()
    assert linear(x16).dtype == torch.bfloat16 and x16.grad.dtype == torch.bfloat16


@every_recipe
def test_high_precision_is_the_product_of_true_weights_and_ends(recipe):
    linear, _ = layer(recipe=recipe)
    x = seeded(32, 64)
    with amp8.high_precision(linear), torch.no_grad():
        inside = linear(x)
    assert torch.equal(inside, nn.functional.linear(x, linear.true_weight(), linear.bias))
    assert not torch.equal(linear(x), inside)
    with pytest.raises(KeyError):
        with amp8.high_precision(linear):
            raise KeyError
    assert not linear.high_precision


def test_a_layer_called_twice_gets_the_sum():
    linear, _ = layer(exact=True)
    a, b = seeded(32, 64, seed=1), seeded(32, 64, seed=2)
    (linear(a).sum() + linear(b).sum()).backward()
    total = torch.ones(48, 32) @ (rounded(a, E4M3) + rounded(b, E4M3))
    assert torch.allclose(linear.gradient.value(), rounded(total, E4M3), rtol=0.07)
    assert relative_error(linear.gradient.value(), total) < 0.04


@every_recipe
def test_rows_and_batches_of_any_number(recipe):
    linear, _ = layer(recipe=recipe)
    for shape in ((64,), (1, 64), (7, 3, 64), (0, 64)):
        y = linear(seeded(*shape))
        assert y.shape == (*shape[:-1], 48)
        y.sum().backward()
        assert torch.isfinite(linear.gradient.value()).all()
        linear.gradient.clear()


@every_recipe
def test_conv1d_of_transformers(recipe):
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    conv, linear = seeded_model(Conv1D, 48, 64), nn.Linear(64, 48)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    a, _ = start(nn.Sequential(conv), exact=True, recipe=recipe)
    b, _ = start(nn.Sequential(linear), exact=True, recipe=recipe)
    assert type(a[0]) is FP8Conv1D and type(b[0]) is FP8Linear
    x, y = seeded(32, 64).requires_grad_(), seeded(32, 64).requires_grad_()
    out, other = a(x), b(y)
    assert torch.allclose(out, other, atol=1e-6)
    out.square().sum().backward()
    other.square().sum().backward()
    assert torch.allclose(x.grad, y.grad, atol=1e-5)
    assert torch.allclose(a[0].gradient.value(), b[0].gradient.value().t(), rtol=0.07, atol=1e-6)
    with amp8.high_precision(a), torch.no_grad():
        assert torch.allclose(a(x), x @ a[0].true_weight() + conv.bias, atol=1e-6)
    fresh = nn.Sequential(Conv1D(48, 64))
    fresh.load_state_dict(a.state_dict())
    assert torch.equal(fresh[0].weight, a[0].true_weight())


def start_block(level="O2", recipe="msamp"):
    return start(
        seeded_model(lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))),
        level,
        lr=1e-3,
        recipe=recipe,
    )


def losses_of(model, optimizer, run=None):
    """Trains for three steps. run: what is called instead of the model."""

    def loss_of(model, step):
        with torch.autocast("cpu", torch.bfloat16):
            return ((run or model)(seeded(32, 64, seed=step)) - 1).float().square().mean()

    return train(model, optimizer, loss_of, range(3))[0]


@pytest.mark.parametrize("level, recipe", [("O2", "msamp"), ("O3", "msamp"), ("O2", "fp4"), ("O3", "fp4")])
def test_compiles_in_one_graph_with_the_same_results(level, recipe, monkeypatch):
    eager, compiled = start_block(level, recipe), start_block(level, recipe)
    received = {1: [], 3: []}  # dtypes of weight gradients
    for i, model in itertools.product(received, (eager[0], compiled[0])):
        monkeypatch.setattr(
            model[i].gradient,
            "add",
            lambda new, i=i, add=model[i].gradient.add: [received[i].append(new.dtype), add(new)],
        )
    torch._dynamo.reset()
    run = torch.compile(compiled[0], fullgraph=True, backend="aot_eager")
    assert losses_of(*eager) == losses_of(*compiled, run)
    for i in (1, 3):
        assert received[i] == [torch.bfloat16] * 6, "a compiled graph casts to the dtype of what gets the gradient"
        assert torch.equal(eager[0][i].amax_history, compiled[0][i].amax_history)
        assert eager[0][i].amax_history[1].min() > 0
        assert torch.equal(eager[0][i].codes.view(torch.uint8), compiled[0][i].codes.view(torch.uint8))
    assert torch._dynamo.explain(compiled[0])(seeded(32, 64)).graph_break_count == 0


def test_compiled_it_may_be_called_twice_before_a_backward_pass():
    """As a siamese network is, and a policy on two answers."""
    eager, compiled = start_block(), start_block()
    run = torch.compile(compiled[0], fullgraph=True, backend="aot_eager")
    twice = [lambda x, run=run: run(x) + run(x.flip(0)) for run in (eager[0], run)]
    assert losses_of(*eager, twice[0]) == losses_of(*compiled, twice[1])
    assert torch.equal(eager[0][1].amax_history, compiled[0][1].amax_history)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["msamp", "fp4"])
def test_compiles_with_inductor(recipe):
    eager, compiled = start_block(recipe=recipe), start_block(recipe=recipe)
    run = torch.compile(compiled[0], fullgraph=True)
    assert losses_of(*eager) == pytest.approx(losses_of(*compiled, run), rel=5e-3)  # fused bf16 rounds elsewhere


@every_recipe
def test_checkpointing_gives_the_same_run_and_records_once(recipe):
    plain, recomputed = start_block(recipe=recipe), start_block(recipe=recipe)
    assert losses_of(*plain) == losses_of(*recomputed, lambda x: checkpoint(recomputed[0], x, use_reentrant=False))
    for i in (1, 3):
        assert torch.equal(plain[0][i].amax_history, recomputed[0][i].amax_history)
        assert torch.equal(plain[0][i].codes, recomputed[0][i].codes)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x, memory=None, between=lambda x: None):
        q = self.q(x)
        memory = x if memory is None else memory
        between(memory)
        k, v = self.k(memory), self.v(memory)
        return x + self.o(torch.softmax(q @ k.mT / 8, -1) @ v)


SHARED = {  # what a training pass gives the model -> casts of inputs in ten of them and two evaluations, of one input
    "one input": ({}, 10 * 2 + 2 + 2),
    "keys of another": ({"memory": seeded(2, 16, 64, seed=9)}, 10 * 3 + 2 + 3),  # in the second scales are apart
    "changed between": ({"between": lambda x: x.mul_(2)}, 10 * 3 + 2 + 3),
}


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("given", SHARED)
def test_layers_of_one_input_cast_it_once_and_train_as_if_each_did(monkeypatch, given, recipe, resumed):
    arguments, casts = SHARED[given]

    def trained(share):
        def model():
            torch.manual_seed(0)
            return start(Attention(), "O2", recipe=recipe)

        slots, real = [], amp8.linear.cast
        monkeypatch.setattr(amp8.linear, "cast", lambda *given: [slots.append(given[2]), real(*given)][1])
        net, optimizer = model()
        for i in range(12):
            if resumed and i == 6:
                state = amp8.exact_state(net, optimizer)
                net, optimizer = model()
                amp8.load_exact_state(net, optimizer, state)
            for layer in () if share else (net.q, net.k, net.v, net.o):
                layer.casts = None
            x, training = seeded(2, 16, 64, seed=i) + 0, i % 6 != 0
            if not training:
                with torch.no_grad():
                    net.eval()(x)
            else:
                net.train()(x, **arguments).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            del x
        monkeypatch.undo()
        assert net.amp8_state.last_cast is None  # nothing is kept that the script has freed
        return amp8.exact_state(net, optimizer), slots.count(amp8.linear.INPUT)

    (shared, few), (apart, many) = trained(True), trained(False)
    assert all(torch.equal(shared[key].float(), apart[key].float()) for key in apart)
    assert (few, many) == (casts, 12 * 4)


def test_te_recipe_casts_with_the_last_updates_scale():
    options = {"amax_history_len": 2, "amax_compute_algo": "most_recent", "margin": 1, "fp8_format": "E4M3"}
    linear, optimizer = layer(recipe="te_delayed", recipe_options=options, exact=True)
    x = seeded(32, 64)
    weight = linear.codes.float() / linear.weight_scale
    w8 = scaling.quantize(weight * linear.weight_scale * 2**-8, 1.0, E4M3).float() / (linear.weight_scale * 2**-8)
    first = linear(x)  # the scale starts at 1
    assert torch.equal(first, scaling.quantize(x, 1.0, E4M3).float() @ w8.t() + linear.bias)
    first.sum().backward()
    optimizer.step()
    assert linear.scale[0] == 448 / 2 / x.abs().max()
    assert linear.scale[1] == 448 / 2  # e4m3 for the gradient of ones
    linear(x).sum().backward()
    assert (E4M3, E4M3) in linear.operands and (E5M2, E4M3) not in linear.operands


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_a_copy_is_a_plain_layer_of_the_same_values(level):
    linear, _ = layer(level)
    twin, parameter = copy.deepcopy(linear), copy.deepcopy(linear.weight)
    assert type(twin) is nn.Linear and not dict(twin.named_buffers()) and not hasattr(twin, "gradient")
    for weight in (twin.weight, parameter):
        assert type(weight) is nn.Parameter and weight.dtype == torch.float32
        assert torch.equal(weight, linear.true_weight())
    assert torch.equal(twin.bias, linear.bias) and twin.bias is not linear.bias
    x = seeded(32, 64)
    twin(x).sum().backward()
    assert twin.weight.grad is not None


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_who_reads_a_weight_gets_its_values(level):
    linear, _ = layer(level)
    weight, value = linear.weight, linear.true_weight()
    assert weight.dtype == torch.float32 and codes_of(weight).dtype in (torch.float16, E4M3)
    assert not torch.equal(codes_of(weight).float(), value)
    average, averages = torch.zeros_like(value), [torch.zeros_like(value)]
    with torch.no_grad():
        assert torch.equal(weight.clone(), value) and torch.equal(weight + 0, value) and weight.norm() == value.norm()
        average.lerp_(weight, 0.25)
        torch._foreach_lerp_(averages, [weight], 0.25)
        assert torch.equal(average, 0.25 * value) and torch.equal(averages[0], average)
        assert torch.equal(torch.empty_like(average).copy_(weight), value)
    assert torch.equal(weight.detach().clone(), value) and torch.equal(weight.data.float(), value)
    assert torch.equal(weight.detach().cpu().flatten(), value.flatten()) and weight.numpy is not None
    assert weight.shape == value.shape and weight.requires_grad and weight.grad is None


class Product(torch.autograd.Function):
    """As fused losses: it reads a weight in its forward pass, and its backward pass returns the weight's gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with torch._C.DisableTorchFunctionSubclass():  # as a kernel, which takes the address of memory
            return x @ weight.to(x.dtype).t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize(
    "use",
    [
        lambda x, weight: Product.apply(x, weight),  # noqa: PLW0108
        nn.functional.linear,
        lambda x, weight: torch.cat([part @ weight.t() for part in x.chunk(4)]),
        lambda x, weight: weight.square(),
    ],
)
def test_a_loss_computed_from_a_weight_directly_trains_it(level, use):
    linear, optimizer = layer(level)
    x, value = seeded(32, 64), linear.true_weight().requires_grad_()
    loss, right = use(x, linear.weight).square().sum(), use(x, value).square().sum()
    assert torch.equal(loss, right)
    loss.backward()
    right.backward()
    assert torch.equal(linear.weight.grad, rounded(value.grad, E4M3))
    optimizer.step()
    assert not torch.equal(linear.true_weight(), value)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("thawed", [False, True])
def test_a_gradient_that_does_not_reach_the_layer_ends_the_run(level, thawed):
    """As of an `apply` that was taken before amp8 was imported."""
    model = linears(64, 48)
    model[0].weight.requires_grad_(not thawed)
    model, _ = start(model, level)
    weight = model[0].weight.requires_grad_()
    loss = PLAIN_APPLY.__get__(None, Product)(seeded(32, 64), weight).sum()
    with pytest.raises(CodesRead, match=r"^0.weight was used without calling 0, .* or import amp8 before"):
        loss.backward()


def test_a_moved_model_has_its_ports_there_and_compiles_in_one_graph():
    linear, optimizer = layer()
    before = linear.ports[torch.float32]
    linear._apply(torch.clone)
    assert linear.ports[torch.float32] is not before
    linear.to("meta")
    assert {port.device.type for port in linear.ports.values()} == {linear.weight.device.type} == {"meta"}
    linear, optimizer = layer()
    linear.to("cpu")
    torch._dynamo.reset()
    torch.compile(linear, fullgraph=True, backend="aot_eager")(seeded(32, 64)).sum().backward()
    assert linear.weight.grad.norm() > 0


def test_a_weight_is_changed_by_values_or_not_at_all():
    linear, _ = layer()
    before, kept = linear.true_weight(), linear.weight.detach().clone()
    for change in (
        lambda: linear.weight.mul_(2),
        lambda: linear.weight.data.add_(1),
        lambda: torch._foreach_mul_([linear.weight], 2),
        lambda: setattr(linear.weight, "data", before),
        lambda: torch.mul(before, 2, out=linear.weight.data),
        lambda: linear.weight.data[:8].zero_(),
        lambda: linear.weight.view(-1).view(48, 64).__imul__(0),
    ):
        with torch.no_grad(), pytest.raises(CodesRead, match="0.weight holds MS-AMP's codes.*load_state_dict"):
            change()
        assert torch.equal(linear.true_weight(), before)
    with torch.no_grad():
        linear.weight.data.copy_(before / 3)  # an average put in for an evaluation, and taken out again
        assert (linear.true_weight() * 3 - before).abs().max() <= 2**-10 * before.abs().max()
        linear.weight.copy_(kept)
    assert torch.equal(linear.true_weight(), before)


def test_under_o3_a_weight_put_in_for_an_evaluation_leaves_the_master_as_it_was():
    linear, optimizer = layer("O3")

    def put_in():
        kept = linear.weight.detach().clone()  # the master, rounded to e4m3
        linear.weight.data.copy_(kept / 3)
        linear.weight.data.copy_(kept / 5)
        assert (linear.true_weight() * 5 - kept).abs().max() <= 2**-4 * kept.abs().max()
        assert torch.allclose(linear.master.float() / linear.master_scale, kept / 5, rtol=2**-11)
        return kept

    with torch.no_grad():
        master, scale = linear.master.clone(), linear.master_scale.clone()
        kept = put_in()
        linear.weight.data.copy_(kept)
        assert torch.equal(linear.true_weight(), kept)
        assert torch.equal(linear.master, master) and torch.equal(linear.master_scale, scale)
        kept = put_in()
    linear(torch.randn(16, linear.in_features)).sum().backward()  # training goes on with the other weight
    optimizer.zero_grad()
    with torch.no_grad():
        linear.weight.data.copy_(kept)
    assert torch.equal(linear.true_weight(), kept) and not torch.equal(linear.master, master)
