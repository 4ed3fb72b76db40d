"""What third-party code does to a converted weight or its gradient has torch's effect, or is refused in one line."""

import copy
import io
import pickle

import pytest
import torch
import torch._dynamo  # fully_shard imports it: once here, not in each of the forked ranks
import torch.distributed as dist
from amp8_helpers import assert_equal, on_ranks, relative_error, run_ranks, seeded, seeded_model, start, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import amp8
from amp8.coded import CodesRead

# FP8 rounds a gradient by 3% to 6%. Two computations of one gradient differ by twice as much at most.
NEAR = 0.1


def net():
    return seeded_model(lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)))


def loss_of(model, scale=1.0, seed=0, target=1):
    return scale * nn.functional.mse_loss(model(seeded(16, 32, seed=seed)), seeded(16, 32, seed=target))


def pair(level="O2"):
    """Returns a plain model, and one on a level with its optimizer. Both have the gradients of one loss."""
    plain, (model, optimizer) = net(), start(net(), level)
    for each in (plain, model):
        loss_of(each, 1e3).backward()
    return plain, model, optimizer


def near(value, exact):
    return (value - exact).norm() <= NEAR * exact.norm() + 1e-7


CHANGES = {
    "p.grad.mul_": lambda model: [p.grad.mul_(0.5) for p in model.parameters()],
    "p.grad *= 0.5": lambda model: [p.grad.__imul__(0.5) for p in model.parameters()],
    "p.grad.data.mul_": lambda model: [p.grad.data.mul_(0.5) for p in model.parameters()],
    "p.grad.data = tensor": lambda model: [setattr(p.grad, "data", p.grad * 0.5) for p in model.parameters()],
    "p.grad[:16] = 0": lambda model: [p.grad.__setitem__(slice(0, 16), 0) for p in model.parameters()],
    "p.grad.view(-1)[::2] = 0": lambda model: [p.grad.view(-1)[::2].zero_() for p in model.parameters()],
    "p.grad = p.grad * 0.5": lambda model: [setattr(p, "grad", p.grad * 0.5) for p in model.parameters()],
    "torch._foreach_mul_": lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 5.0),
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_norm_, norm_type=inf": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, float("inf")),
    "zero_grad(set_to_none=False)": lambda model: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_a_gradient_reaches_it(change, level):
    plain, model, optimizer = pair(level)
    for each in (plain, model):
        CHANGES[change](each)
    for p, exact in zip(model.parameters(), plain.parameters(), strict=True):
        assert near(p.grad, exact.grad)
    model.amp8_state.finish()  # rounds what has been changed, as a step does
    assert near(model[0].gradient.value(), plain[0].weight.grad)
    optimizer.step()


def test_a_change_after_the_step_is_added_to_by_the_next_backward_pass():
    """As in torch. A gradient that nobody has changed is dropped."""
    for change in (True, False):
        plain, model, optimizer = pair()
        optimizer.step()
        for each in (plain, model):
            _ = [p.grad.mul_(0.5) for p in each.parameters() if change]
        exact = [p.grad.clone() * change for p in plain.parameters()]
        plain, weights = net(), model.state_dict()
        plain.load_state_dict(weights)
        for each in (plain, model):
            loss_of(each, 1e3).backward()
        assert near(model[0].weight.grad, plain[0].weight.grad + exact[0])


DROPS = {
    "model.zero_grad()": lambda model: model.zero_grad(),
    "p.grad = None": lambda model: [setattr(p, "grad", None) for p in model.parameters()],
    "del p.grad": lambda model: [delattr(p, "grad") for p in model.parameters()],
}


@pytest.mark.parametrize("drop", [*DROPS, "optimizer.zero_grad()"])
def test_a_dropped_gradient_is_gone(drop):
    """Training leaves out a batch whose loss is not finite, say."""
    model, optimizer = start(net())
    loss_of(model, float("nan")).backward()
    DROPS[drop](model) if drop in DROPS else optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters()) and model[0].gradient.codes is None
    loss_of(model).backward()
    other, _ = start(net())
    loss_of(other).backward()
    assert torch.equal(model[0].weight.grad, other[0].weight.grad)
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_reading_a_gradient_makes_no_copy_that_stays():
    _, model, _ = pair()
    gradient = model[0].weight.grad
    assert gradient.dtype == torch.float32 and gradient.norm() > 0 and (gradient + 0).shape == gradient.shape
    assert model[0].gradient.fp32_bytes() == 0
    gradient.mul_(2)
    assert model[0].gradient.fp32_bytes() == 4 * gradient.numel()
    with pytest.raises(RuntimeError, match=r"0.weight is \[64, 32\], and was assigned a gradient of \[3\]"):
        model[0].weight.grad = torch.ones(3)


def test_hooks_of_a_weight_are_called():
    """One hook applies a mask, as pruning does, and one comes after accumulation."""
    calls, grads = [], []
    for converted in (False, True):
        model, mask = net(), torch.zeros(64, 1)
        mask[:32] = 1
        model[0].weight.register_hook(lambda gradient, mask=mask: gradient * mask)
        if converted:
            model, _ = start(model)
        model[2].weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.norm() > 0))
        handle = model[2].weight.register_hook(lambda gradient: calls.append("removed"))
        handle.remove()
        loss_of(model).backward()
        grads.append(model[0].weight.grad + 0)
    assert calls == [True, True] and near(grads[1], grads[0]) and not grads[1][32:].any()


def test_a_second_derivative_is_refused():
    model, _ = start(net())
    x = seeded(16, 32).requires_grad_()
    with pytest.raises(CodesRead, match="has no derivative .create_graph=True, a gradient penalty or a Hessian"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_functional_call_uses_the_weights_that_it_is_given():
    plain, (model, _) = net(), start(net())
    x = seeded(16, 32)
    other = {name: (value * 2).requires_grad_() for name, value in plain.state_dict().items()}
    exact, output = (torch.func.functional_call(each, other, (x,)) for each in (plain, model))
    assert torch.equal(output, exact)
    output.sum().backward()
    assert other["0.weight"].grad is not None and model[0].weight.grad is None
    assert not torch.equal(model(x), output)


def of_weights(model, make, transform):
    """A transform of the loss as a function of the weights."""
    return transform(lambda weights: torch.func.functional_call(model, weights, (seeded(16, 32),)).square().mean())(
        {name: make(parameter) for name, parameter in model.named_parameters()}
    )


TRANSFORMS = {
    "grad of detached": lambda model: of_weights(model, lambda p: p.detach(), torch.func.grad),
    "grad of parameters": lambda model: of_weights(model, lambda p: p, torch.func.grad),
    "grad of the input": lambda model: torch.func.grad(lambda x: model(x).sum())(seeded(16, 32)),
    "vmap": lambda model: torch.func.vmap(lambda x: model(x[None])[0])(seeded(16, 32)),
    "jvp": lambda model: torch.func.jvp(model, (seeded(16, 32),), (seeded(16, 32, seed=1),)),
    "jacrev": lambda model: torch.func.jacrev(lambda x: model(x[None])[0])(seeded(32)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_transforms_of_torch_func_are_refused(transform, level):
    """They took codes for values."""
    model, _ = start(net(), level)
    with pytest.raises(CodesRead, match=r"is called inside torch.func .grad, vmap, jvp., .* clones of the values"):
        TRANSFORMS[transform](model)


def test_clones_of_values_can_be_transformed():
    plain, (model, _) = net(), start(net())
    exact, found = (of_weights(each, lambda p: p.detach().clone(), torch.func.grad) for each in (plain, model))
    assert all((found[name] - exact[name]).norm() < 0.01 * exact[name].norm() for name in exact)


def test_functional_call_with_detached_parameters_trains_nothing():
    plain, (model, _) = net(), start(net())
    x = seeded(16, 32).requires_grad_()
    for each in (plain, model):
        each_out = torch.func.functional_call(each, {n: p.detach() for n, p in each.named_parameters()}, (x,))
        each_out.sum().backward()
        assert all(p.grad is None for p in each.parameters())
    assert (each_out - plain(x)).norm() < 0.01 * each_out.norm()


def test_an_assigned_weight_is_used_and_trained():
    model, _ = start(net())
    model[0].weight = nn.Parameter(torch.zeros(64, 32))
    assert torch.equal(model[0](seeded(16, 32)), model[0].bias.expand(16, 64))
    model(seeded(16, 32)).sum().backward()
    assert type(model[0].weight.grad) is torch.Tensor and not model.state_dict()["0.weight"].any()


SETTERS = {
    "nn.init.constant_": lambda w: nn.init.constant_(w, 0.25),
    "nn.init.normal_": nn.init.normal_,
    "nn.init.uniform_": nn.init.uniform_,
    "nn.init.kaiming_uniform_": nn.init.kaiming_uniform_,
    "nn.init.xavier_normal_": nn.init.xavier_normal_,
    "nn.init.zeros_": nn.init.zeros_,
    "fill_": lambda w: w.detach().fill_(3.0),
    "data.clamp_": lambda w: w.data.clamp_(-0.05, 0.05),
    "w.data[:8] = 0": lambda w: w.data.__setitem__(slice(0, 8), 0.0),
}


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("how", SETTERS)
def test_values_that_are_set_are_the_weights(how, level):
    plain, (model, _) = net(), start(net(), level)
    for each in (plain, model):
        torch.manual_seed(1)
        SETTERS[how](each[0].weight)
    assert (model[0].weight - plain[0].weight).norm() <= (2**-10 if level == "O2" else 0.04) * plain[0].weight.norm()


def clamp_in_forward(model):
    for layer in (model[0], model[2]):
        layer.register_forward_pre_hook(lambda layer, _: [layer.weight.data.clamp_(-1, 1)] and None)


NOTHING = {
    "clamp_ after each step": lambda model: [p.data.clamp_(-1, 1) for p in model.parameters()],
    "copy_ after each step": lambda model: [p.data.copy_(p.detach() + 0) for p in model.parameters()],
    "clamp_ in forward": None,
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("how", NOTHING)
def test_a_setter_that_changes_no_value_changes_no_training(how, level):
    """Under O3 a step adds less than e4m3 holds of a weight: the master must stay as it is."""
    weights = []
    for each in (None, how):
        model, optimizer = start(net(), level, lr=1e-4)
        if each and not NOTHING[each]:
            clamp_in_forward(model)
        for step in range(8):
            loss_of(model, seed=step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if each and NOTHING[each]:
                NOTHING[each](model)
        weights.append(amp8.master_state_dict(model))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_rows_that_are_set_leave_the_masters_of_the_others():
    model, optimizer = start(net(), "O3", lr=1e-4)
    before = amp8.master_state_dict(model)["0.weight"].clone()
    for _ in range(2):  # the second finds the rows set
        model[0].weight.data[:8] = 0.0
    after = amp8.master_state_dict(model)["0.weight"]
    assert not after[:8].any() and torch.equal(after[8:], before[8:])


def test_reset_parameters():
    plain, (model, _) = net(), start(net())
    for each in (plain, model):
        torch.manual_seed(1)
        each[0].reset_parameters()
    assert relative_error(model[0].weight, plain[0].weight) < 2**-10


@pytest.mark.parametrize("how", [nn.init.orthogonal_, lambda w: w.view(-1).mul_(0), lambda w: w.data.T[:4].zero_()])
def test_a_view_of_a_weight_refuses_changes(how):
    model, _ = start(net())
    before = model[0].true_weight()
    with torch.no_grad(), pytest.raises(CodesRead, match="a view of 0.weight holds MS-AMP's codes"):
        how(model[0].weight)
    assert torch.equal(model[0].true_weight(), before)


def test_each_of_two_optimizers_moves_its_own_layers():
    model = net()
    first, second = (torch.optim.AdamW(part.parameters(), 1e-2) for part in (model[0], model[2]))
    model, first = amp8.initialize(model, first, "O2")
    second = amp8.optimizer_of(model, second)
    before = [layer.true_weight() for layer in (model[0], model[2])]
    for _ in range(2):
        loss_of(model).backward()
        first.step()
        first.zero_grad()
        assert model[0].weight.grad is None and model[2].weight.grad is not None
        second.step()
        second.zero_grad()
    for layer, old in zip((model[0], model[2]), before, strict=True):
        assert (layer.true_weight() - old).abs().max() > 0.01


def test_an_optimizer_of_torch_that_would_change_codes_raises():
    _, model, _ = pair()
    with pytest.raises(CodesRead, match="can't be changed by"):
        torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16, torch.float32])
def test_a_cast_leaves_codes_and_scales_alone(cast):
    model, optimizer = start(net())
    loss_of(model).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        before, weight = model(seeded(16, 32)), model[0].true_weight()
        model.to(cast)
        after = model(seeded(16, 32).to(cast))
    assert after.dtype == cast and torch.equal(model[0].true_weight(), weight)
    assert relative_error(after.float(), before) < 0.05
    if cast == torch.float32:  # an fp32 model stays one
        loss_of(model).backward()
        optimizer.step()


@pytest.mark.parametrize("size", [1e20, 1e30])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_training_goes_on_after_gradients_whose_square_overflows(level, size):
    model, optimizer = start(net(), level, lr=1e-3)
    for step in range(6):
        (model(seeded(16, 32)).sum() * size if step == 3 else loss_of(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss_of(model).isfinite()
    assert all(p.isfinite().all() for p in model.parameters())


class CastsToTheWeight(nn.Module):
    """Casts its activations to the dtype of a weight, as T5's feed-forward layer and peft's LoRA do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(self.up(x).relu().to(self.down.weight.dtype))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_has_the_dtype_of_its_values(level, dtype):
    model, optimizer = start(CastsToTheWeight().to(dtype), level)
    assert model.down.weight.dtype == model.down.weight.detach().clone().dtype == dtype
    out = model(1e6 * seeded(16, 32).to(dtype))
    assert out.dtype == dtype and out.isfinite().all() and out.abs().max() > 65504
    out.sum().backward()
    optimizer.step()


def thawed(rank, world):
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = start(model, "O3")
    model[0].requires_grad_(True)
    before = amp8.master_state_dict(model)["0.weight"]
    loss_of(model).backward()
    optimizer.step()
    after = amp8.master_state_dict(model)["0.weight"]
    return {"moved": (after - before).abs().max(), "weight": model[0].true_weight(), "before": before}


def test_o3_keeps_a_frozen_weight_as_it_was_until_it_thaws():
    plain = net()
    results = run_ranks(2, thawed)
    for result in results:
        assert relative_error(result["before"], plain[0].weight) < 2**-11
        assert 0.005 < result["moved"] < 0.02 and torch.equal(result["weight"], results[0]["weight"])
    plain[0].requires_grad_(False)
    model, optimizer = start(plain, "O3")
    before = model[0].true_weight()
    assert model[0].codes.dtype == torch.float16 and model[2].codes.dtype == torch.float8_e4m3fn
    saved = {key: value.clone() for key, value in amp8.exact_state(model, optimizer).items()}
    amp8.load_exact_state(model, optimizer, saved)
    assert torch.equal(model[0].true_weight(), before)
    model(seeded(16, 32)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].true_weight(), before)
    model[0].requires_grad_(True)
    model(seeded(16, 32)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].true_weight(), before)


def test_a_layer_of_integers_raises():
    model, _ = start(net())
    with pytest.raises(CodesRead, match="0 gets an input in int64"):
        model(torch.ones(2, 32, dtype=torch.long))


def test_a_pickle_holds_the_plain_model():
    model, optimizer = start(net())
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded[0]) is nn.Linear and torch.equal(loaded[0].weight, model[0].true_weight())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)[2].weight, model[2].true_weight())
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="amp8's optimizer can't be copied or pickled"):
            copied(optimizer)
    again, _ = start(copy.deepcopy(model))  # a copy is a plain model, which can be put on a level
    assert isinstance(again[0], amp8.FP8Linear)


def test_hooks_of_load_state_dict_are_called():
    _, optimizer = start(net())
    calls = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after"]


def test_a_layer_that_is_first_used_after_the_warm_up_gets_its_whole_gradient():
    model, optimizer = start(nn.ModuleDict({"used": nn.Linear(32, 32), "late": nn.Linear(32, 32)}))
    x, y = seeded(4096, 32), seeded(4096, 32, seed=1)
    train(model, optimizer, lambda model, _: nn.functional.mse_loss(model["used"](x), y), range(19))
    plain = nn.Linear(32, 32)
    plain.load_state_dict(model["late"].state_dict())
    for layer in (model["late"], plain):
        nn.functional.mse_loss(layer(x), y).backward()
    assert near(model["late"].weight.grad, plain.weight.grad)


def copied_under_ddp(rank, world):
    def loss(model, seed):
        return model(seeded(16, 32, seed=seed)).square().mean()

    twin = copy.deepcopy(start(net())[0])
    adam = torch.optim.AdamW(twin.parameters(), 1e-2)
    train(DistributedDataParallel(twin), adam, loss, range(rank, 6, 2))
    model, optimizer = start(net(), ddp=True)
    loss(model, rank).backward()
    mean = model.module[0].weight.grad.clone()
    dist.all_reduce(model.module[0].weight.grad)  # no operator of torch says that it changes its tensor
    model.module[0].weight.grad.div_(world)
    again = model.module[0].weight.grad.clone()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    with model.join(), pytest.raises(CodesRead, match=r"join\(\) can't stand in"):
        model(seeded(16, 32)).sum().backward()
    return {"copy": twin[0].weight.detach(), "mean": mean, "again": again, "norm": norm}


def test_under_ddp_a_copy_trains_alike_on_all_ranks_and_grad_is_the_mean():
    first, second = run_ranks(2, copied_under_ddp)
    assert_equal(first, second)
    plain = net()
    for rank in range(2):
        (plain(seeded(16, 32, seed=rank)).square().mean() / 2).backward()
    assert first["norm"] > 1e-3 and near(first["mean"], plain[0].weight.grad)
    assert torch.equal(first["again"], first["mean"])


@on_ranks(2)
def test_under_o3_grad_says_that_it_is_on_its_owner(rank, world):
    model, _ = start(net(), "O3")
    model(seeded(16, 32)).sum().backward()
    with pytest.raises(CodesRead, match="is on one rank alone under O3: clip with amp8.clip_grad_norm_"):
        for p in model.parameters():
            p.grad.mul_(1) if p.grad is not None else None
    with pytest.raises(CodesRead, match="is on one rank alone under O3: it can't be assigned"):
        model[0].weight.grad = torch.zeros(64, 32)


# Under fully_shard, `.grad` is the DTensor of this rank's rows that it is without amp8 --------------------------------


def sharded(level):
    """Returns a model under fully_shard and its optimizer, on a level or plain (None)."""
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    return start(model, level) if level else (model, torch.optim.AdamW(model.parameters(), 1e-2))


def rank_loss(model, seed, scale=1e3):
    return loss_of(model, scale, seed, target=9)


def rows_of(gradient):
    return None if gradient is None else gradient.to_local() + 0


SHARDED_CHANGES = (
    CHANGES
    | DROPS
    | {
        "nothing": lambda model: None,
        "p.grad.to_local() *= 0.5": lambda model: [p.grad.to_local().mul_(0.5) for p in model.parameters()],
        "p.grad *= 3": lambda model: [p.grad.mul_(3) for p in model.parameters()],
        "one rank looks": lambda model: (
            [p.grad.to_local().norm() for p in model.parameters()] if dist.get_rank() == 0 else None
        ),
    }
)
for unknown_to_dtensor in ("p.grad[:16] = 0", "p.grad.view(-1)[::2] = 0"):
    del SHARDED_CHANGES[unknown_to_dtensor]


def changed_under_fsdp(rank, world):
    """Returns for each change the gradients of a plain model, and of one on O2: as they are, and as a step rounds them."""
    gradients = {}
    for name, change in SHARDED_CHANGES.items():
        results = []
        for level in (None, "O2"):
            model, optimizer = sharded(level)
            for _ in range(2):  # the second pass adds to what was done to the first
                rank_loss(model, rank).backward()
                change(model)
            grads = [rows_of(p.grad) for p in model.parameters()]
            if level:
                model.amp8_state.finish()  # as a step does
                grads += [rows_of(p.grad) for p in model.parameters()]
            optimizer.step()
            results.append(grads)
        gradients[name] = results
    return gradients


@pytest.fixture(scope="module", params=[1, 2])
def under_fsdp(request):
    return run_ranks(request.param, changed_under_fsdp, timeout=120)


@pytest.mark.parametrize("change", SHARDED_CHANGES)
def test_what_is_done_to_a_sharded_gradient_reaches_it(change, under_fsdp):
    for rank in under_fsdp:
        plain, ours = rank[change]
        for value, exact in zip(ours, plain + plain, strict=True):
            assert (value is None) == (exact is None)
            # Two passes, whose mean and whose sum are rounded: 10% without any change, 11.5% with values clipped.
            assert exact is None or (value - exact).norm() <= 0.13 * exact.norm()


@on_ranks(2)
def test_hooks_of_a_sharded_weight_are_called(rank, world):
    for level in (None, "O2"):
        model, _ = sharded(level)
        calls = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(p.grad.to_local().norm() > 0))
        model.set_requires_gradient_sync(False)
        rank_loss(model, rank).backward()
        assert not calls and all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        rank_loss(model, rank).backward()
        assert calls == [True] * 4
    model, _ = sharded("O2")
    shapes = []
    model[0].weight.register_hook(lambda gradient: shapes.append(gradient.shape) or gradient * 0)
    rank_loss(model, rank).backward()
    assert shapes == [model[0].weight.shape], "the whole gradient of this rank"
    moved = [p.grad.full_tensor().float().abs().max().item() > 0 for p in (model[0].weight, model[2].weight)]
    assert moved == [False, True]


@on_ranks(2)
def test_a_sharded_gradient_that_was_dropped_is_gone(rank, world):
    """Training leaves out a batch that is not finite, by setting `.grad` to None."""
    weights = []
    for drops in (True, False):
        model, optimizer = sharded("O2")
        for step in range(3):
            if drops and step == 1:
                rank_loss(model, rank, float("nan")).backward()
                for p in model.parameters():
                    p.grad = None
            rank_loss(model, rank + step).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        weights.append(model[0].weight.full_tensor())
    assert weights[0].isfinite().all() and torch.equal(*weights)


def scales_after_another_factor_on_each_rank(rank, world):
    model, optimizer = sharded("O2")
    for _ in range(2):
        rank_loss(model, rank).backward()
        model[0].weight.grad.to_local().mul_(100.0**rank)
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[model[0].weight]
    return torch.stack([state["exp_avg_scale"], state["exp_avg_sq_scale"], *state["amax"]])


def test_ranks_that_change_their_rows_unlike_keep_one_scale():
    first, second = run_ranks(2, scales_after_another_factor_on_each_rank)
    assert torch.equal(first, second)


def compare_with_and_without_a_look(rank, world):
    """Compares weights after 3 clipped steps of 2 micro-batches."""

    def weights(start_model, look):
        model, optimizer = start_model()
        for _ in range(3):
            for micro in range(2):
                rank_loss(model, 2 * rank + micro).backward()
                look(model)
            amp8.clip_grad_norm_(model.parameters(), 0.3)
            look(model)
            optimizer.step()
            optimizer.zero_grad()
        return {
            name: getattr(value, "to_local", lambda value=value: value)() for name, value in model.state_dict().items()
        }

    def look(model):
        for p in model.parameters():
            p.grad.detach().view(-1).norm() if not hasattr(p, "placements") else p.grad.to_local().norm()

    for start_model in (lambda: start(net(), ddp=world > 1), lambda: sharded("O2")):
        assert_equal(weights(start_model, lambda model: None), weights(start_model, look))


@pytest.mark.parametrize("world", [1, 2])
def test_a_view_of_a_gradient_that_nobody_writes_to_changes_nothing(world):
    run_ranks(world, compare_with_and_without_a_look, timeout=120)
