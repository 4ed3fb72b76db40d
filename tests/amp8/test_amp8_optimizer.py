"""amp8's Adam trains weights and moments that are scaled low-precision tensors."""

import math
import warnings

import pytest
import torch
from amp8_helpers import assert_equal, linears, relative_error, seeded, seeded_model, start, train
from torch import nn

import amp8
from amp8 import convert, gradients, optimizer as module, rounding, scaling


def net():
    return seeded_model(lambda: nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64), nn.Linear(64, 6)))


def loss_of(model, step=0):
    return model(seeded(8, 64, seed=step)).square().sum()


def put(layer, gradient):
    """Sets the gradient, as a backward pass would. Returns it as it is rounded."""
    layer.gradient.clear()
    layer.gradient.store(gradient.clone())
    return layer.gradient.value()


ADAMS = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"maximize": True, "betas": (0.8, 0.95), "eps": 1e-4}),
]


@pytest.mark.parametrize("kind, options", ADAMS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_follows_torchs_adam(level, kind, options):
    """Given the same gradients for 30 steps, amp8's Adam differs from torch's by the formats' rounding only.

    e4m3's last bit is 6% to 12% of a number. Stochastic rounding is off by 0.4 of it (root mean square), and a step of
    beta1 = 0.9 passes an error on to 9 more. Over 30 steps that is 0.037 * 9 * sqrt(30) = 1.8 in units of |m| / sqrt(v),
    which add up to 30 in the movement itself: 0.06. The second moment adds nothing to speak of.
    """
    model, optimizer = start(net(), level, kind, **options)
    layer = model[0]

    def precise_weight():
        return layer.master.float() / layer.master_scale if level == "O3" else layer.true_weight()

    plain, first = nn.Parameter(precise_weight()), precise_weight()
    reference = kind([plain], **{"lr": 1e-2, **options})
    for step in range(30):
        plain.grad = put(layer, seeded(96, 64, seed=step) + 0.5)
        reference.step()
        optimizer.step()
    # the error of the movement
    assert relative_error(precise_weight() - first, plain.detach() - first) < (2e-3 if level == "O1" else 0.06)
    state, exact = optimizer.state[layer.weight], reference.state[plain]
    m, v = state["exp_avg"].float(), state["exp_avg_sq"].float()
    if level != "O1":
        assert state["exp_avg"].dtype == scaling.E4M3 and state["exp_avg_sq"].dtype == torch.float16
        m, v = m / state["exp_avg_scale"], v / state["exp_avg_sq_scale"]
    # errors of 0.037 that decay by 0.9 in a step: 0.037 / sqrt(1 - 0.81)
    assert relative_error(m, exact["exp_avg"]) < (1e-4 if level == "O1" else 0.085)
    assert relative_error(v, exact["exp_avg_sq"]) < 1e-3
    if level == "O3":
        assert relative_error(layer.true_weight(), precise_weight()) < 0.04


def test_unconverted_parameters_are_torchs_own_adam_bit_for_bit():
    plain = net()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model, optimizer = start(net(), "O1")
    for step in range(5):
        for i in (1, 3):
            for p, q in zip(model[i].parameters(), plain[i].parameters(), strict=True):
                p.grad = seeded(*p.shape, seed=step)
                q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(model[1].weight, plain[1].weight) and torch.equal(model[3].weight, plain[3].weight)


def test_low_precision_parameters_outside_linear_layers_train():
    model = nn.Sequential(nn.Embedding(200, 64), nn.Linear(64, 64)).to(torch.bfloat16)
    model, optimizer = start(model, lr=1e-1)
    before = [p.detach().clone() for p in (model[0].weight, model[1].bias)]
    model(torch.arange(200)).float().square().sum().backward()
    optimizer.step()
    for p, old in zip((model[0].weight, model[1].bias), before, strict=True):
        assert p.dtype == torch.bfloat16 and (p - old).abs().max() > 0.05
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].dtype == scaling.E4M3 and "amax" not in optimizer.state[model[1].bias]


def test_channels_last_parameters():
    conv = nn.Conv2d(32, 64, 3).to(memory_format=torch.channels_last)
    assert not conv.weight.is_contiguous()
    model, optimizer = start(nn.Sequential(conv, nn.Linear(16, 16)), lr=1e-3)
    other = nn.Parameter(conv.weight.detach().clone().contiguous())
    reference = torch.optim.AdamW([other], lr=1e-3)
    for step in range(3):
        gradient = seeded(64, 32, 3, 3, seed=step)
        conv.weight.grad, other.grad = gradient.clone(), gradient.clone()  # not channels_last
        optimizer.step()
        reference.step()
    assert optimizer.state[conv.weight]["exp_avg"].dtype == scaling.E4M3
    assert torch.allclose(conv.weight, other, atol=4e-4)


def test_shares_the_callers_groups_and_schedulers_work_without_warnings():
    model = net()
    caller = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2:].parameters()}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(caller, lambda step: 0.5**step)
    model, optimizer = amp8.initialize(model, caller, "O2")
    assert all(a is b for a, b in zip(optimizer.param_groups, caller.param_groups, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(seeded(8, 64)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_lr_may_be_a_tensor():
    results = []
    for lr in (1e-2, torch.tensor(1e-2)):
        model, optimizer = start(net(), lr=lr)
        loss_of(model).backward()
        optimizer.step()
        results.append(model[0].true_weight())
    assert torch.equal(*results)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_fused_and_foreach_optimizers(options):
    model, optimizer = start(net(), lr=1e-3, **options)
    before = model[0].true_weight(), model[1].weight.detach().clone()
    loss_of(model).backward()
    optimizer.step()
    assert (model[0].true_weight() - before[0]).abs().max() > 9e-4 and (model[1].weight - before[1]).abs().max() > 9e-4


def test_closure_and_zero_grad():
    model, optimizer = start(net(), lr=1e-3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    optimizer.zero_grad()
    assert model[0].gradient.codes is None and model[1].weight.grad is None


def test_step_hooks_fire():
    model, optimizer = start(net())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    model(seeded(8, 64)).sum().backward()
    optimizer.step()
    assert calls == ["before", "after"]


def test_a_step_uses_up_the_gradients_even_where_the_model_clears_them():
    model, optimizer = start(net(), lr=1e-3)
    for _ in range(2):
        model(seeded(8, 64)).sum().backward()
        optimizer.step()
        once = model[0].gradient.value()
        model.zero_grad()
    model(seeded(8, 64)).sum().backward()
    assert model[0].gradient.value().norm() < 1.5 * once.norm()
    before = model[0].weight.clone()
    optimizer.step()
    optimizer.step()  # nothing new
    again = model[0].weight.clone()
    optimizer.step()
    assert not torch.equal(before, again) and torch.equal(model[0].weight, again)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_state_dict_keeps_dtypes_and_values(level, tmp_path):
    model, optimizer = start(net(), level)
    train(model, optimizer, loss_of, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    other, fresh = start(net(), level)
    fresh.load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_equal(optimizer.state[p], fresh.state[q])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_plain_adam_takes_over_its_moments(level):
    """As a run that goes on in bf16: codes would be taken for values."""
    model, optimizer = start(net(), level)
    train(model, optimizer, loss_of, range(2))
    plain = net()
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    adam.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        ours, theirs = optimizer.state[p], adam.state[q]
        for name in ("exp_avg", "exp_avg_sq"):
            true = ours[name].float() / ours.get(f"{name}_scale", 1)
            assert theirs[name].equal(true.view(q.shape)) and true.any()
        q.grad = torch.ones_like(q)
    adam.step()


def test_takes_over_the_moments_of_a_plain_adam():
    model = net()
    caller = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model).backward()
    caller.step()
    saved = caller.state_dict()
    exact = caller.state[model[0].weight]["exp_avg"].clone()
    model, optimizer = amp8.initialize(model, caller, "O2")
    other, fresh = start(net())
    fresh.load_state_dict(saved)
    for weight, adam in ((model[0].weight, optimizer), (other[0].weight, fresh)):
        state = adam.state[weight]
        assert state["step"] == 1 and state["exp_avg"].dtype == scaling.E4M3
        assert 0 < relative_error(state["exp_avg"].float() / state["exp_avg_scale"], exact) < 0.04
        assert state["amax"][0] == exact.abs().max()
    assert not caller.state


def test_refuses_what_it_cannot_do():
    model = net()
    for kind, options, error in (
        (torch.optim.SGD, {}, "needs torch.optim.AdamW or Adam"),
        (torch.optim.NAdam, {}, "not NAdam"),
        (torch.optim.AdamW, {"amsgrad": True}, "no amsgrad"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            amp8.initialize(model, kind(model.parameters(), lr=1e-3, **options))
    model, optimizer = start(net())
    with pytest.raises(ValueError, match="groups of"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})


@pytest.mark.parametrize("unscale", [False, True])
def test_a_loss_scaler_is_refused_instead_of_half_working(unscale):
    model, optimizer = start(net())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(seeded(8, 64)).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="GradScaler does not reach FP8 gradients"):
        scaler.step(optimizer)
    model, optimizer = start(net())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(model(seeded(8, 64)).sum()).backward()
    scaler.step(optimizer)
    assert optimizer.state[model[0].weight]["step"] == 1


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_slices_do_not_change_the_result(monkeypatch, level, stochastic):
    states = []
    for chunk in (1 << 20, 1000):
        monkeypatch.setattr(module, "SLICE", chunk)
        model, optimizer = start(net(), level, stochastic_rounding=stochastic)
        train(model, optimizer, loss_of, range(3))
        states.append(amp8.exact_state(model, optimizer))
    assert_equal(*states)


def test_small_updates_stall_under_nearest_and_arrive_under_stochastic_rounding():
    moved = {}
    for stochastic in (False, True):
        model, optimizer = start(net(), lr=2e-6, weight_decay=0.0, stochastic_rounding=stochastic)
        with torch.no_grad():
            model[0].write(torch.full((96, 64), 0.03))
        for _ in range(50):
            put(model[0], torch.ones(96, 64))
            optimizer.step()
        moved[stochastic] = 0.03 - model[0].true_weight().mean().item()
    # an fp16 step at 0.03 is 1.5e-5, an update 2e-6
    assert abs(moved[False]) < 2e-5 and moved[True] == pytest.approx(50 * 2e-6, rel=0.15)


def test_rounding_to_nearest_is_reported():
    for stochastic in (True, False):
        model, optimizer = start(net(), stochastic_rounding=stochastic)
        notes = amp8.report(model, optimizer)["notes"]
        assert any("rounded to nearest" in note for note in notes) is not stochastic


@pytest.mark.parametrize("dtype, below", [(torch.float16, 2.0**-16), (scaling.E4M3, 2.0**-7)])
def test_stochastic_rounding_is_unbiased_repeatable_and_saturates(dtype, below):
    """Takes values in the normal range and among the subnormals. `below` is one, whose last bit is not its binade's."""
    info = torch.finfo(dtype)

    def rounded(x, seed=1, start=0):
        noise = rounding.random_noise(len(x), seed, start)
        return rounding.round_stochastically(x.clone(), dtype, noise)

    for low, step in ((1.0, info.eps), (-2.0 + info.eps, info.eps), (below, info.smallest_normal * info.eps)):
        x = torch.full((200_000,), low + 0.3 * step)
        a = rounded(x)
        assert set(a.unique().tolist()) == {low, low + step}
        assert ((a.mean(dtype=torch.float64) - low) / step).item() == pytest.approx(0.3, abs=0.005)
        assert torch.equal(a, rounded(x)) and not torch.equal(a, rounded(x, seed=2))
        assert torch.equal(a[1000:], rounded(x[1000:], start=1000))
        on_grid, extremes = torch.full((200_000,), low), torch.tensor([-(2.0**31), 2.0**31]).repeat(100_000)
        assert torch.equal(rounded(on_grid), on_grid)
        assert torch.equal(rounding.round_stochastically(on_grid.clone(), dtype, extremes), on_grid)
    edge = rounded(torch.tensor([info.max * 1.001, 1e9, -1e9, math.nan, 0.0, math.inf]), seed=0)
    assert edge[:3].tolist() == [info.max, info.max, -info.max] and edge[3].isnan() and edge[4] == 0
    assert edge[5] == info.max


def test_random_bits_are_uniform_and_differ_between_steps_tensors_and_elements():
    seeds = [t * 1_000_003 + n * 7919 for t in (1, 2) for n in (0, 1)]
    bits = torch.stack([rounding.random_bits(1 << 16, seed) for seed in seeds]).double()
    assert (bits / 2**31).mean(1).abs().max() < 5 / math.sqrt(3 * (1 << 16))  # five standard errors
    off = torch.corrcoef(torch.cat([bits, bits[:1].roll(1), bits[:1].roll(64)])) - torch.eye(6)
    assert off.abs().max() < 5 / math.sqrt(1 << 16)
    whole = rounding.random_bits(100, seeds[0], (1 << 33) + 7)  # an index beyond 32 bits
    assert torch.equal(whole[30:], rounding.random_bits(70, seeds[0], (1 << 33) + 37))


@pytest.mark.parametrize("level, betas", [("O2", (0.9, 0.95)), ("O2", (0.95, 0.999)), ("O3", (0.9, 0.95))])
def test_weights_without_gradient_come_to_rest_as_under_fp32(level, betas):
    """Half of the rows of an embedding and of a Linear get a gradient in the first five steps only.
    Rounded to nearest, the first moment stays at e4m3's smallest numbers while the second decays: at (0.9, 0.95) the
    rows move 100 times as far in 500 steps. Rounded stochastically, they move as far as fp32's on average; the factor
    of 1.2 allows for the spread."""
    gradients = [seeded(64, 64, seed=step) for step in range(8)]
    resting = torch.ones(64, 1)
    resting[32:] = 0
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 64), "linear": nn.Linear(64, 64, bias=False)})
    plain = [nn.Parameter(layer.weight.detach().clone()) for layer in model.values()]
    options = {"lr": 1e-3, "betas": betas, "weight_decay": 0.0}
    reference = torch.optim.AdamW(plain, **options)
    model, optimizer = start(model, level, **options)

    def weights():
        masters = amp8.master_state_dict(model)
        return [masters["embedding.weight"].clone(), masters["linear.weight"]]

    before = weights(), [p.detach().clone() for p in plain]
    for step in range(500):
        gradient = gradients[step % 8] * (1 if step < 5 else resting)
        put(model["linear"], gradient)
        model["embedding"].weight.grad = gradient.clone()
        for p in plain:
            p.grad = gradient.clone()
        optimizer.step()
        reference.step()
    for now, first, p, origin in zip(weights(), before[0], plain, before[1], strict=True):
        moved, in_fp32 = (now - first)[32:].abs().mean(), (p.detach() - origin)[32:].abs().mean()
        assert 0.8 < moved / in_fp32 < 1.2, (moved / 1e-3, in_fp32 / 1e-3)


def test_a_moment_that_outlives_its_variance_does_not_explode():
    # A gradient spike stretches v's range for a thousand steps and m's for ten: then small elements have v = 0, m > 0.
    model, optimizer = start(net(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    gradient = torch.full((96, 64), 1e-4)
    spike = gradient.clone()
    spike[0, 0] = 1e3
    before = model[0].true_weight()
    for step in range(60):
        put(model[0], spike if step == 0 else gradient * (1 if step < 40 else 1e-3))
        optimizer.step()
    assert torch.isfinite(model[0].true_weight()).all()
    assert (model[0].true_weight() - before).abs().max() < 60 * 3.2e-3


def test_weights_grow_beyond_their_first_scale():
    model, optimizer = start(net(), lr=10.0, weight_decay=0.0)
    first = model[0].weight_scale.item()
    for _ in range(20):
        put(model[0], -torch.ones(96, 64))
        optimizer.step()
    assert model[0].true_weight().mean().item() == pytest.approx(200, rel=0.02)
    assert model[0].weight_scale.item() < first / 100
    assert model[0].codes.float().abs().max() <= 65504
    assert model[0].weight_amax == pytest.approx(model[0].true_weight().abs().max().item(), rel=1e-3)


def test_a_cast_model_is_refused():
    model, optimizer = start(net())
    model.to(torch.bfloat16)
    put(model[0], torch.ones(96, 64))
    with pytest.raises(RuntimeError, match="don't cast the model"):
        optimizer.step()


def test_sparse_gradients_are_refused():
    model, optimizer = start(nn.Sequential(nn.Embedding(100, 64, sparse=True), nn.Linear(64, 64)))
    model(torch.arange(5)).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


# Clipping ------------------------------------------------------------------------------------------------------------


def test_clip_is_the_global_norm_and_leaves_codes_alone():
    model, optimizer = start(net())
    loss_of(model).backward()
    exact = [model[i].gradient.value() for i in (0, 2)]
    exact += [p.grad for p in model.parameters() if not hasattr(p, "amp8_linear")]
    norm = torch.cat([g.flatten() for g in exact]).norm()
    codes, plain = model[0].gradient.codes, model[1].weight.grad.clone()
    before = codes.view(torch.uint8).clone()
    assert amp8.clip_grad_norm_(iter(list(model.parameters())), 0.5) == pytest.approx(norm.item(), rel=1e-5)
    assert model[0].gradient.codes is codes and torch.equal(codes.view(torch.uint8), before)
    assert torch.allclose(model[0].gradient.value(), exact[0] * 0.5 / norm, rtol=1e-5)
    assert torch.allclose(model[1].weight.grad, plain * 0.5 / norm, rtol=1e-5)
    assert amp8.clip_grad_norm_(model, 10.0) == pytest.approx(0.5, rel=1e-4)
    assert amp8.clip_grad_norm_(model[0].weight, 10.0) == pytest.approx((exact[0].norm() * 0.5 / norm).item(), rel=1e-4)


def test_clip_counts_both_parts_of_complex_gradients():
    plain = nn.Parameter(torch.zeros(2, dtype=torch.cfloat))
    plain.grad = torch.tensor([3 + 4j, 12j])
    assert amp8.clip_grad_norm_([plain], 6.5) == 13
    assert torch.allclose(plain.grad, torch.tensor([1.5 + 2j, 6j]))


def test_clip_multiplies_all_at_once_as_one_after_the_other():
    """Bit for bit: gradients of two dtypes, and the scales of FP8 ones."""
    model, optimizer = start(net())
    loss_of(model).backward()
    extra = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    extra.grad = seeded(40).bfloat16()
    gradients, scales = [model[i].gradient for i in (0, 2)], [model[i].gradient.scale.clone() for i in (0, 2)]
    plain = [extra, *(p for p in model.parameters() if not hasattr(p, "amp8_linear"))]
    before = [parameter.grad.clone() for parameter in plain]
    factor = 0.5 / (amp8.clip_grad_norm_([*model.parameters(), extra], 0.5) + 1e-6)
    assert len(plain) > 3 and factor < 1
    assert all(torch.equal(p.grad, b * factor.to(b.dtype)) for p, b in zip(plain, before, strict=True))
    assert all(torch.equal(g.scale, b / factor) for g, b in zip(gradients, scales, strict=True))


def test_clip_agrees_with_torch_on_ordinary_models():
    plain, other = net(), net()
    for model in (plain, other):
        loss_of(model).backward()
    a = amp8.clip_grad_norm_(plain.parameters(), 1.0)
    b = torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    assert a == pytest.approx(b.item(), rel=1e-6)
    assert torch.allclose(plain[0].weight.grad, other[0].weight.grad)
    assert amp8.clip_grad_norm_([], 1.0) == 0
    with pytest.raises(ValueError, match="2-norm"):
        amp8.clip_grad_norm_(plain.parameters(), 1.0, norm_type=1)
    plain[0].weight.grad[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="norm is nan"):
        amp8.clip_grad_norm_(plain.parameters(), 1.0, error_if_nonfinite=True)


# Accumulation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate, how", [("high", "no_sync"), ("high", "attach"), ("fp8", "no_sync"), ("high", "")])
def test_accumulation_in_one_process(accumulate, how):
    model, optimizer = start(linears(64, 64, bias=False), accumulate=accumulate)
    last = False
    if how == "attach":
        amp8.attach(model, lambda: last)
    parts = []
    for micro in range(4):
        last = micro == 3
        x = seeded(16, 64, seed=micro)
        parts.append(x.t().sum(1).expand(64, 64))
        if how == "no_sync" and not last:
            with amp8.no_sync(model):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
        in_fp32 = accumulate == "high" and (not last if how else micro > 0)
        assert (model[0].gradient.fp32 is not None) == in_fp32
    once = accumulate == "high"  # rounded once after four products, or with each
    assert relative_error(model[0].gradient.value(), sum(parts)) < (0.04 if once else 0.08)


def test_an_ordinary_loop_of_256_micro_batches_rounds_twice_at_most():
    """Rounding to e4m3 is off by 2.6%; the first micro-batch of identical ones has 1/256 of the sum, the others none of
    it. When each sum was rounded, identical micro-batches ended at 9% of the true norm."""
    model, optimizer = start(linears(64, 64, bias=False))
    x, target = seeded(16, 64), seeded(16, 64, seed=1)
    nn.functional.mse_loss(model(x), target).backward()
    once = model[0].gradient.value()
    optimizer.zero_grad()
    for _ in range(256):
        (nn.functional.mse_loss(model(x), target) / 256).backward()
    notes = amp8.report(model, optimizer)["notes"]
    assert any("4.0 more bytes per parameter" in note for note in notes)
    model.amp8_state.finish()
    assert relative_error(model[0].gradient.value(), once) < 0.035
    assert model[0].gradient.fp32 is None and model[0].gradient.codes.dtype == scaling.E4M3


def test_a_step_without_a_last_micro_batch_loses_nothing():
    model, optimizer = start(net())
    with amp8.no_sync(model):
        model(seeded(8, 64)).sum().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 1 and model[0].gradient.fp32 is None


def test_a_gradient_of_zeros_does_not_erase_the_moments():
    model, optimizer = start(net())

    def first_moment():
        state = optimizer.state[model[0].weight]
        return scaling.dequantize(state["exp_avg"], state["exp_avg_scale"])

    put(model[0], 1e-5 * seeded(96, 64))
    optimizer.step()
    before = first_moment()
    put(model[0], torch.zeros(96, 64))
    optimizer.step()
    assert (first_moment() - 0.9 * before).norm() < 0.1 * before.norm()


@pytest.mark.slow
def test_what_an_update_computes_for_all_layers_is_the_same_compiled():
    """As on a GPU, whatever their number."""
    numbers, updated, descaled, clipping = (
        torch.compile(function.__wrapped__, dynamic=True)
        for function in (module.numbers_of, convert.updated, gradients.descaled, gradients.clipping)
    )
    draw = torch.Generator().manual_seed(0)
    uniform = lambda *shape: torch.rand(*shape, generator=draw)  # noqa: E731
    scales = lambda *shape: 2.0 ** torch.randint(-9, 9, shape, generator=draw).float()  # noqa: E731
    for n, masked in ((5, 0.0), (9, 1.0)):
        of_step = torch.tensor([[0.1, 0.3, 0.9, 0.999, 0.1, 0.001, 30.0, 1e-8, 0.1, 1e-3]]).repeat(n, 1)
        of_weights = (scales(n), scales(n), scales(n)), (uniform(n), uniform(n))
        of_moments = scales(n), scales(n), uniform(n, 2)
        for of_some in (of_weights, (None, (None, uniform(n)))):  # converted weights; ordinary parameters
            given = of_step, None, *of_some, of_moments, torch.tensor(masked), False, False
            assert torch.equal(numbers(*given), module.numbers_of(*given))
        states = torch.cat([scales(n, 1, 2), uniform(n, 1 + 16, 2)], 1)
        scaling.parts(states)[1].copy_(torch.randint(30, (n, 2), generator=draw))
        states[0, scaling.HISTORY, 1] = math.inf
        delayed = states, (scaling.E4M3, scaling.E5M2)
        assert torch.equal(*(f(*delayed).view(torch.int32) for f in (updated, convert.updated)))
        assert scaling.parts(convert.updated(*delayed))[1].max() == scaling.parts(states)[1].max() + 1
        squares, scale = 1e6 * uniform(n), scales(n)
        torch.testing.assert_close(descaled(squares, scale), gradients.descaled(squares, scale))
        torch.testing.assert_close(clipping(squares, 3.0 * n), gradients.clipping(squares, 3.0 * n))
