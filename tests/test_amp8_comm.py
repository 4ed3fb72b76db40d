"""FP8 gradients between ranks: real gloo processes."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from amp8_helpers import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import amp8
from amp8.comm import Bucket, Comm
from amp8.gradients import WeightGradient

E4M3 = torch.float8_e4m3fn


def net(width=32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 16), nn.Linear(16, 10))


def data(n, seed=1):
    x = torch.randn(n, 32, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :10].argmax(1)


def start(level, wrap=True, seed=0, lr=1e-2, **options):
    model = net(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = amp8.initialize(model, optimizer, level, **options)
    if wrap and dist.is_initialized():
        model = amp8.attach(DistributedDataParallel(model))
    return model, optimizer


def backward(model, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# Replicas ------------------------------------------------------------------------------------------------------------


def replicas(rank, world, level):
    model, optimizer = start(level, seed=rank)  # initial weights differ: initialize and DDP make them rank 0's
    x, y = data(16 * world)
    for step in range(200):
        batch = slice(rank * 16, rank * 16 + 16)
        x_, y_ = x.roll(step, 0)[batch], y.roll(step, 0)[batch]
        loss = backward(model, x_, y_)
        amp8.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    codes = model.module[0].codes.view(torch.uint8 if level == "O3" else torch.int16)
    return {"state": weights_of(model.module), "codes": codes.clone(), "loss": loss}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_replicas_stay_identical_for_200_steps(level):
    first, second = run_ranks(2, replicas, level)
    assert torch.equal(first["codes"], second["codes"])
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    assert first["loss"] < 0.5  # and they learned: 200 steps from log(10)


# Two ranks against one -----------------------------------------------------------------------------------------------


def first_gradients(rank, world):
    model, _ = start("O2", exact=True)
    x, y = data(32)
    backward(model, x[rank * 16 :][:16], y[rank * 16 :][:16])
    state = model.module.amp8_state
    state.finish()
    return {name: layer.gradient.value() for name, layer in state.layers.items()}


def test_two_ranks_differ_from_one_by_no_more_than_the_rounding_explains():
    # One e4m3 rounding errs by 2**-4 of a value at most, or by half a subnormal step, 2**-10 / scale. One rank rounds
    # once; two ranks round each half batch's gradient a and b once, and their mean once more.
    half, both = start("O2", exact=True)[0], run_ranks(2, first_gradients)
    x, y = data(32)
    whole = start("O2", exact=True)[0]
    backward(whole, x, y)
    with amp8.no_sync(half):
        backward(half, x[:16], y[:16])
        a = {name: layer.gradient.fp32.clone() for name, layer in half.amp8_state.layers.items()}
        backward(half, x[16:], y[16:])
        sums = {name: layer.gradient.fp32.clone() for name, layer in half.amp8_state.layers.items()}
    for name, layer in whole.amp8_state.layers.items():
        one, two, b = layer.gradient.value(), both[0][name], sums[name] - a[name]
        mean, apart = (a[name] + b) / 2, (a[name].abs() + b.abs()) / 2
        floor = 2.0**-10 * 2 * max(a[name].abs().max(), b.abs().max()) / 224  # 448 / scale is less than twice the amax
        bound = 2.0**-4 * (2.07 * mean.abs() + 1.07 * apart) + 3 * floor
        assert ((one - two).abs() <= bound).all(), name
        relative = (one - two).norm() / one.norm()
        assert 0 < relative < 0.06, relative  # sqrt(2.6%**2 * 2 + ...), and not zero: the roundings do differ
        assert torch.equal(two, both[1][name])


# The mean ------------------------------------------------------------------------------------------------------------


class Layer:
    """The part of a layer that Comm uses."""

    def __init__(self, shape):
        self.weight = nn.Parameter(torch.zeros(shape))


def means(rank, world, gradients, bucket, sharded):
    class State:
        pass

    layers = [Layer(g.shape[1:]) for g in gradients]
    stored = [WeightGradient(layer, i % world, State) for i, layer in enumerate(layers)]
    comm = Comm(stored, None, sharded, bucket)
    State.comm, State.sharded, State.accumulate, State.last_micro_batch = comm, sharded, "high", lambda: True
    for gradient, values in zip(reversed(stored), reversed(gradients), strict=True):
        if values[rank].isnan().all():
            continue  # this rank has no gradient for the layer
        port = torch.zeros_like(values[rank], requires_grad=True)
        port.grad = values[rank].clone()
        gradient.receive(port)
    comm.finish()
    return {
        "means": [g.value() for g in stored],
        "sent": comm.sent,
        "buckets": len(comm.buckets),
    }


def correlated(shape, ranks, correlation, seed=0):
    """Gradients [ranks, *shape] whose elements correlate between ranks."""
    g = torch.Generator().manual_seed(seed)
    common, own = torch.randn(1, *shape, generator=g), torch.randn(ranks, *shape, generator=g)
    return (math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own) * 1e-3


@pytest.mark.parametrize("bucket", [1, 5000, 1 << 20])
def test_mean_gradient_over_four_ranks(bucket):
    gradients = [correlated(shape, 4, 0.9, seed) for seed, shape in enumerate([(48, 64), (16, 16), (100, 33), (3, 1)])]
    results = run_ranks(4, means, gradients, bucket, False)
    assert results[0]["buckets"] == {1: 4, 5000: 2, 1 << 20: 1}[bucket]
    for i, values in enumerate(gradients):
        exact = values.mean(0)
        for result in results:
            assert torch.equal(result["means"][i], results[0]["means"][i])
        if exact.numel() > 1000:
            assert (results[0]["means"][i] - exact).norm() / exact.norm() < 0.03
    total = sum(values[0].numel() for values in gradients)
    assert 2 * 3 / 4 * total <= results[0]["sent"] < 2 * 3 / 4 * total + 4 * 100  # scales and padding


def test_agreeing_ranks_do_not_overflow():
    gradients = [torch.full((32, 32), 448.0).expand(4, 32, 32)]  # an FP8 sum would need 1792
    results = run_ranks(4, means, gradients, 1 << 20, False)
    assert torch.equal(results[0]["means"][0], torch.full((32, 32), 448.0))


def test_gradient_missing_on_some_ranks():
    nothing = torch.full((2, 16, 16), float("nan"))
    partly = torch.stack([torch.ones(16, 16), torch.full((16, 16), float("nan"))])
    results = run_ranks(2, means, [nothing, partly, torch.ones(2, 16, 16)], 1 << 20, False)
    for result in results:
        assert result["means"][0] is None
        assert torch.equal(result["means"][1], torch.full((16, 16), 0.5))
        assert torch.equal(result["means"][2], torch.ones(16, 16))


def test_one_rank_with_a_non_finite_gradient_is_seen_by_all():
    bad = torch.ones(2, 16, 16)
    bad[1, 3, 3] = float("inf")
    for result in run_ranks(2, means, [bad, torch.ones(2, 16, 16)], 1 << 20, False):
        assert result["means"][0].isnan().all()
        assert torch.equal(result["means"][1], torch.ones(16, 16))


def test_owners_alone_receive_the_mean():
    gradients = [correlated((48, 64), 2, 0.9, seed) for seed in range(3)]
    results = run_ranks(2, means, gradients, 4000, True)
    for i, values in enumerate(gradients):
        assert results[1 - i % 2]["means"][i] is None
        assert (results[i % 2]["means"][i] - values.mean(0)).norm() / values.mean(0).norm() < 0.031
    assert results[0]["sent"] == 48 * 64 + 3 * 4  # the one layer that rank 1 owns, and a scale for each bucket's layer


def test_shares_cover_every_element_once():
    class Shape:
        def __init__(self, *shape):
            self.shape, self.owner = torch.Size(shape), 0

    gradients = [Shape(5), Shape(3, 4), Shape(1), Shape(7)]
    seen = [torch.zeros(g.shape.numel()) for g in gradients]
    for rank in range(4):
        bucket = Bucket(gradients, rank, 4, False)
        assert bucket.shares == [7, 7, 7, 7]
        for i, start_, end, _ in bucket.pieces:
            seen[i][start_:end] += 1
    assert all((counts == 1).all() for counts in seen)


# Under DistributedDataParallel ---------------------------------------------------------------------------------------


def accumulated(rank, world, level, accumulate, mode):
    model, _ = start(level, accumulate=accumulate, exact=True)
    state = model.module.amp8_state
    x, y = data(64)
    sent = []
    for micro in range(4):
        batch = slice(micro * 16 + rank * 8, micro * 16 + rank * 8 + 8)
        context = model.no_sync() if mode == "no_sync" and micro < 3 else contextlib.nullcontext()
        with context:
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch]) / 4
            loss.backward()
        sent.append(amp8.wire_bytes(model))
    state.finish()
    found = {name: layer.gradient.value() for name, layer in state.layers.items()}
    return {"sent": sent, "found": found, "bias": model.module[0].bias.grad}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_no_sync_sends_nothing_and_accumulates_in_high_precision(level):
    results = run_ranks(2, accumulated, level, "high", "no_sync")
    assert results[0]["sent"][:3] == [0, 0, 0] and results[0]["sent"][3] > 0
    plain = net()
    x, y = data(64)
    nn.functional.cross_entropy(plain(x), y).backward()
    assert (results[0]["bias"] - plain[0].bias.grad).norm() / plain[0].bias.grad.norm() < 0.12
    for name in ("0", "3"):
        found = next(r["found"][name] for r in results if r["found"][name] is not None)
        exact = plain.get_submodule(name).weight.grad
        assert (found - exact).norm() / exact.norm() < 0.12  # e5m2 gradients, e4m3 inputs: the products' own error


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_accumulating_without_no_sync_gives_the_same_mean(level):
    synced = run_ranks(2, accumulated, level, "high", "always")
    held = run_ranks(2, accumulated, level, "high", "no_sync")
    assert synced[0]["sent"][0] > 0
    for name in ("0", "3"):
        one = next(r["found"][name] for r in synced if r["found"][name] is not None)
        other = next(r["found"][name] for r in held if r["found"][name] is not None)
        assert 0 < (one - other).norm() / other.norm() < 0.08  # rounded four times rather than once


class Words(nn.Module):
    """As transformers' models: keyword arguments, integers only, a layer that is not always used."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.spare = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 32, False)
        self.head = nn.Linear(32, 50)

    def forward(self, *, input_ids, spare=False):
        x = self.embed(input_ids)
        x = self.spare(x) if spare else self.body(x)
        return {"logits": self.head(x)}


def integers(rank, world):
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = amp8.initialize(model, optimizer, "O2")
    model = amp8.attach(DistributedDataParallel(model))
    ids = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(rank))
    model(input_ids=ids)["logits"].sum()  # a forward pass without backward changes nothing
    nn.functional.cross_entropy(model(input_ids=ids)["logits"].flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    return weights_of(model.module)


def test_keyword_and_integer_inputs_and_an_unused_layer():
    first, second = run_ranks(2, integers)
    torch.manual_seed(0)
    before = Words().state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert not torch.allclose(first["body.weight"], before["body.weight"], atol=1e-3)
    assert torch.allclose(first["spare.weight"], before["spare.weight"], atol=1e-4)  # no gradient anywhere: no step


def volume(rank, world, level, passes=1):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)], nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp8.initialize(model, optimizer, level)
    model = amp8.attach(DistributedDataParallel(model))
    sent = []
    for step in range(3):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        for _ in range(passes):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(amp8.wire_bytes(model))
    return {"sent": sent, "wire": amp8.report(model, optimizer)["dtypes"]["wire"]}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_wire_bytes_against_bf16_and_fp32(level):
    result = run_ranks(4, volume, level)[0]
    ring = 2 * 3 / 4 * 4 * 64 * 64  # elements a ring all-reduce sends per rank
    a_step = result["sent"][2] - result["sent"][1]
    assert result["sent"][0] * 3 == result["sent"][2]
    assert 0.5 * ring <= a_step <= min(0.55 * 2 * ring, 0.28 * 4 * ring)
    assert result["wire"] == ["e4m3"]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_second_backward_pass_sends_each_bucket_once_more(level):
    once, twice = run_ranks(2, volume, level)[0], run_ranks(2, volume, level, 2)[0]
    gradients = {"O2": 1, "O3": 1 / 2}[level]  # of what a step sends; under O3 owners send as many weights
    assert twice["sent"] == [(1 + gradients) * sent for sent in once["sent"]]


def o3_norm(rank, world, level):
    model, optimizer = start(level, exact=True)
    x, y = data(32)
    backward(model, x[rank * 16 :][:16], y[rank * 16 :][:16])
    norm = amp8.clip_grad_norm_(model.parameters(), 1e9).item()
    return {"norm": norm, "report": amp8.report(model, optimizer)["bytes_per_parameter"]["linear"]["weight"]}


def test_norm_over_owners_is_the_norm_of_the_whole():
    o2, o3 = run_ranks(2, o3_norm, "O2"), run_ranks(2, o3_norm, "O3")
    assert o3[0]["norm"] == o3[1]["norm"]
    assert o3[0]["norm"] == pytest.approx(o2[0]["norm"], rel=0.02)


def two_sizes(rank, world):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp8.initialize(model, optimizer, "O3")
    model = amp8.attach(DistributedDataParallel(model))
    model(torch.randn(16, 128)).square().mean().backward()
    optimizer.step()
    masters = amp8.master_state_dict(model)
    return {
        "bytes": amp8.report(model, optimizer)["bytes_per_parameter"]["linear"]["total"],
        "masters": {name: value for name, value in masters.items()},
        "weights": weights_of(model.module),
    }


@pytest.mark.parametrize("world", [2, 4])
def test_o3_bytes_per_parameter_and_masters(world):
    results = run_ranks(world, two_sizes)
    for result in results:
        assert result["bytes"] <= 2.5 + 5.5 / world
        assert result["bytes"] == pytest.approx(1 + 6 / world, abs=0.02)
        for name, master in result["masters"].items():
            assert torch.equal(master, results[0]["masters"][name])
            if name.endswith("weight"):
                close = (master - result["weights"][name]).norm() / master.norm()
                assert 0.005 < close < 0.04  # the FP8 weight is the master, rounded


def te_amaxes(rank, world):
    model, optimizer = start("O2", recipe="te_delayed", recipe_options={"amax_history_len": 4})
    x, y = data(32)
    backward(model, x[:16] * (1 + rank), y[:16])
    optimizer.step()
    return model.module[0].scale.clone()


def test_te_recipe_shares_amaxes_between_ranks():
    first, second = run_ranks(2, te_amaxes)
    assert torch.equal(first, second)
    assert first[0] == 448 / (2 * data(32)[0][:16].abs().max())


def resumed(rank, world, level, folder):
    from safetensors.torch import load_file, save_file

    def run(model, optimizer, steps):
        losses = []
        for step in steps:
            x, y = data(32, seed=step)
            losses.append(backward(model, x[rank * 16 :][:16], y[rank * 16 :][:16]))
            losses.append(amp8.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    model, optimizer = start(level)
    run(model, optimizer, range(20))
    state = amp8.exact_state(model, optimizer)
    own = {key: value for key, value in state.items() if rank == 0 or key.startswith("rank/")}
    save_file(own, f"{folder}/{rank}.safetensors")
    wanted = run(model, optimizer, range(20, 25))
    dist.barrier()
    shared = {k: v for k, v in load_file(f"{folder}/0.safetensors").items() if k.startswith("all/")}
    model, optimizer = start(level, seed=9)
    amp8.load_exact_state(model, optimizer, {**shared, **load_file(f"{folder}/{rank}.safetensors")})
    return {"wanted": wanted, "found": run(model, optimizer, range(20, 25)), "keys": sorted(own)}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_two_ranks_resume_bit_for_bit(level, tmp_path):
    first, second = run_ranks(2, resumed, level, str(tmp_path))
    assert first["found"] == first["wanted"] and second["found"] == second["wanted"]
    assert all(key.startswith("rank/") for key in second["keys"])
    masters = [sum(key.startswith("rank/master/") for key in r["keys"]) for r in (first, second)]
    assert masters == ([2, 2] if level == "O3" else [0, 0])  # one layer each: codes and scale


def zero_on_one_rank(rank, world, level):
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    model, _ = amp8.initialize(model, torch.optim.AdamW(model.parameters()), level)
    made = 1e-5 * torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    port = torch.zeros(32, 32, requires_grad=True)
    port.grad = made.clone() if rank == 0 else torch.zeros_like(made)
    model[0].gradient.receive(port)
    model.amp8_state.finish()
    value = model[0].gradient.value()
    return {"error": torch.zeros(()) if value is None else (value - made / 2).norm() / (made / 2).norm()}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_gradient_of_zeros_on_one_rank_leaves_the_others_theirs(level):
    """An expert that sees no token there. Its scale was 1, which is the scale of large gradients."""
    assert all(result["error"] < 0.06 for result in run_ranks(2, zero_on_one_rank, level))
