"""Ranks exchange FP8 gradients. The tests run them as gloo processes."""

import contextlib
import copy
import math
import os

import pytest
import torch
import torch.distributed as dist
from amp8_helpers import (
    assert_equal,
    leaving,
    linears,
    on_nodes,
    on_ranks,
    relative_error,
    run_ranks,
    seeded,
    seeded_model,
    start,
    train,
)
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import amp8
from amp8 import scaling
from amp8.comm import Bucket, Comm, nodes_of, rounded_sum_
from amp8.gradients import Rounding, WeightGradient, quantize_gradient


def build():
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, 10))


def start_net(level="O2", seed=0, **options):
    """Puts the net on a level, under DistributedDataParallel in ranks."""
    return start(seeded_model(build, seed=seed), level, ddp=dist.is_initialized(), **options)


def data(n, seed=1):
    x = seeded(n, 32, seed=seed)
    return x, x[:, :10].argmax(1)


def batch_of(rank, n=16, seed=1):
    """Returns the n samples of a rank, of 2n that two ranks share."""
    return (values[rank * n :][:n] for values in data(2 * n, seed))


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# Replicas ------------------------------------------------------------------------------------------------------------


def replica(rank, world, level, steps=200):
    model, optimizer = start_net(level, seed=rank)  # initial weights differ: initialize and DDP make them rank 0's
    x, y = data(16 * world)

    def loss(model, step):
        return loss_of(model, x.roll(step, 0)[rank * 16 :][:16], y.roll(step, 0)[rank * 16 :][:16])

    losses, _ = train(model, optimizer, loss, range(steps), max_norm=1.0)
    return {"state": weights_of(model.module) | {"codes": model.module[0].codes.clone()}, "loss": losses[-1]}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_replicas_stay_identical_for_200_steps(level):
    first, second = run_ranks(2, replica, level)
    assert_equal(first["state"], second["state"])
    assert first["loss"] < 0.5  # and they learned: 200 steps from log(10)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@on_ranks(1)
def test_one_rank_under_ddp_is_one_process(rank, world, level):
    trained = []
    for ddp in (True, False):
        model, optimizer = start(seeded_model(build), level, ddp=ddp)
        torch.manual_seed(0)  # of stochastic rounding
        losses, _ = train(model, optimizer, lambda model, step: loss_of(model, *data(16, step)), range(4))
        trained.append({"losses": torch.tensor(losses), **weights_of(model.module if ddp else model)})
    assert_equal(*trained)


# Two ranks against one -----------------------------------------------------------------------------------------------


def first_gradients(rank, world):
    model, _ = start_net(exact=True)
    loss_of(model, *batch_of(rank)).backward()
    state = model.module.amp8_state
    state.finish()
    return {name: layer.gradient.value() for name, layer in state.layers.items()}


def test_two_ranks_differ_from_one_by_no_more_than_the_rounding_explains():
    # One e4m3 rounding errs by 2**-4 of a value at most, or by half a subnormal step, 2**-10 / scale. One rank rounds
    # once; two ranks round each half batch's gradient a and b once, and their mean once more.
    first, second = run_ranks(2, first_gradients)
    (whole, _), (half, _) = start_net(exact=True), start_net(exact=True)
    loss_of(whole, *data(32)).backward()
    with amp8.no_sync(half):
        loss_of(half, *batch_of(0)).backward()
        halves = {name: layer.gradient.fp32.clone() for name, layer in half.amp8_state.layers.items()}
        loss_of(half, *batch_of(1)).backward()
        sums = {name: layer.gradient.fp32.clone() for name, layer in half.amp8_state.layers.items()}
    for name, layer in whole.amp8_state.layers.items():
        by_one_rank, by_two, a, b = layer.gradient.value(), first[name], halves[name], sums[name] - halves[name]
        mean, apart = (a + b) / 2, (a.abs() + b.abs()) / 2
        floor = 2.0**-10 * 2 * max(a.abs().max(), b.abs().max()) / 224  # 448 / scale is less than twice the amax
        bound = 2.0**-4 * (2.07 * mean.abs() + 1.07 * apart) + 3 * floor
        assert ((by_one_rank - by_two).abs() <= bound).all(), name
        # sqrt(2.6%**2 * 2 + ...), and not zero: the roundings do differ
        assert 0 < relative_error(by_two, by_one_rank) < 0.06, name
        assert torch.equal(by_two, second[name])


# The mean ------------------------------------------------------------------------------------------------------------


class Layer:
    """Has the attributes of a layer that Comm uses."""

    replaced = None

    def __init__(self, shape):
        self.weight = nn.Parameter(torch.zeros(shape))


def means(rank, world, gradients, bucket, sharded):
    class State:
        rounding = Rounding()

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
    return {"means": [g.value() for g in stored], "sent": comm.sent, "buckets": len(comm.buckets)}


def correlated(shape, ranks, correlation, seed=0):
    """Returns gradients [ranks, *shape] whose elements correlate between ranks."""
    g = torch.Generator().manual_seed(seed)
    common, separate = torch.randn(1, *shape, generator=g), torch.randn(ranks, *shape, generator=g)
    return (math.sqrt(correlation) * common + math.sqrt(1 - correlation) * separate) * 1e-3


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
            assert relative_error(results[0]["means"][i], exact) < 0.03
    total = sum(values[0].numel() for values in gradients)
    assert 2 * 3 / 4 * total <= results[0]["sent"] < 2 * 3 / 4 * total + 4 * 100  # scales and padding


def test_the_mean_is_the_sum_in_the_order_of_ranks_bit_for_bit():
    values = correlated((48, 64), 4, 0.5)
    codes, scales = zip(*map(quantize_gradient, values), strict=True)
    scale, expected = torch.stack(scales).amin(), []
    for rank, own in enumerate(values.view(4, 4, -1).unbind(1)):  # [ranks, share]: the mean of this share
        total = torch.zeros(own.shape[1])
        for r in range(4):
            sent = codes[r].float().view(4, -1)[rank]
            total = total + own[r] if r == rank else torch.addcmul(total, sent, 1 / scales[r])
        expected.append(scaling.quantize(total, scale / 4, scaling.E4M3).float() / scale)
    for result in run_ranks(4, means, [values], 1 << 20, False):
        assert torch.equal(result["means"][0].view(-1), torch.cat(expected))


def test_three_graphs_compute_pieces_of_all_sizes():  # a whole share, where one begins, and within one
    graphs = CompileCounter()
    compiled = torch.compile(rounded_sum_.__wrapped__, dynamic=True, fullgraph=True, backend=graphs)
    sizes = ((9000, 9000, 0), (9000, 12000, 16), (20000, 50000, 0), (1 << 16, 1 << 17, 64), (8208, 9000, 8))
    for n, width, place in sizes:
        codes = scaling.quantize(seeded(4, width), torch.tensor(64.0), scaling.E4M3)[:, place : place + n]
        inverse, own, out = torch.full((4,), 1 / 64), seeded(n, seed=1), torch.zeros(width, dtype=scaling.E4M3)
        out = out[place : place + n]
        compiled(codes, inverse, own, 2, torch.tensor(16.0), out)
        total = codes.float()[[0, 1, 3]].sum(0) / 64 + own
        assert relative_error(out.float() / 16, total) < 0.03
    assert graphs.frame_count == 3


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
        assert relative_error(results[i % 2]["means"][i], values.mean(0)) < 0.031
    assert results[0]["sent"] == 48 * 64 + 3 * 4  # the one layer that rank 1 owns, and a scale for each bucket's layer


def test_shares_cover_every_element_once():
    class Shape:
        def __init__(self, *shape):
            self.shape, self.owner = torch.Size(shape), 0

    gradients = [Shape(5), Shape(3, 4), Shape(1), Shape(7)]
    counts = [torch.zeros(g.shape.numel()) for g in gradients]
    for rank in range(4):
        bucket = Bucket(gradients, rank, 4)
        assert bucket.shares == [7, 7, 7, 7]
        for i, first, end, _ in bucket.pieces:
            counts[i][first:end] += 1
    assert all((count == 1).all() for count in counts)


# Several nodes -------------------------------------------------------------------------------------------------------


def test_bytes_that_leave_a_node():
    assert leaving(16, 8, ["all_to_all"]) == (0.5, 0.125)
    assert leaving(64, 8, ["all_to_all"]) == (0.875, 0.21875)
    assert leaving(16, 8, ["all_to_all", "all_gather"]) == (0.5 + 15 / 128, 0.1875)


SHAPES = [(48, 64), (16, 16), (100, 33), (32, 32)]


@pytest.mark.parametrize("bucket", [1, 5000, 1 << 20])
@pytest.mark.parametrize("sharded", [False, True])
def test_nodes_add_up_their_gradients_before_they_exchange_them(bucket, sharded):
    gradients = [correlated(shape, 4, 0.5, seed) for seed, shape in enumerate(SHAPES)]
    gradients[1][:2] = float("nan")  # the first node has no gradient
    one_hop, two_hops = (run_ranks(4, on_nodes, 2, told, means, gradients, bucket, sharded) for told in (False, True))
    for i, values in enumerate(gradients):
        exact = values.nan_to_num(0).mean(0)
        for results in (one_hop, two_hops):
            found = [result["result"]["means"][i] for result in results]
            assert [value is None for value in found] == [sharded and rank != i % 4 for rank in range(4)]
            assert all(relative_error(value, exact) < 0.04 for value in found if value is not None)
    total = sum(values[0].numel() for values in gradients)
    expected = leaving(4, 2, ["all_to_all"] if sharded else ["all_to_all", "all_gather"])
    for results, a_parameter, groups in zip((one_hop, two_hops), expected, (1, 3), strict=True):
        sent = sum(result["left"] for result in results) / 4
        assert a_parameter * total <= sent < a_parameter * total + 4 * 50  # scales and padding
        assert {result["groups"] for result in results} == {groups}


def test_the_mean_over_nodes_bit_for_bit():
    values = correlated((48, 64), 4, 0.5) * torch.tensor([1, 1, 0.1, 0.1]).view(4, 1, 1)  # nodes of different scales
    codes, scales = zip(*map(quantize_gradient, values), strict=True)
    scale, expected = torch.stack(scales).amin(), []
    for own, share in zip((0, 2, 1, 3), range(4), strict=True):  # of ranks of equal place, one after another
        total = torch.zeros(48 * 16)
        for node in (0, 1):
            node_sum, its_scale = torch.zeros(48 * 16), torch.stack(scales[2 * node :][:2]).amin()
            for r in (2 * node, 2 * node + 1):
                exact, sent = (x.float().view(4, -1)[share] for x in (values[r], codes[r]))
                node_sum = node_sum + exact if r == own else torch.addcmul(node_sum, sent, 1 / scales[r])
            if own // 2 == node:
                total = total + node_sum / 2
            else:
                total = total + (node_sum * (its_scale / 2)).bfloat16().float() / its_scale
        expected.append(scaling.quantize(total, scale / 2, scaling.E4M3).float() / scale)
    for result in run_ranks(4, on_nodes, 2, True, means, [values], 1 << 20, False):
        assert torch.equal(result["result"]["means"][0].view(-1), torch.cat(expected))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_crosses_nodes(bad):
    values = torch.ones(4, 16, 16)
    values[3, 2, 1] = bad
    for result in run_ranks(4, on_nodes, 2, True, means, [values, torch.ones(4, 16, 16)], 1 << 20, False):
        assert result["result"]["means"][0].isnan().all()
        assert torch.equal(result["result"]["means"][1], torch.ones(16, 16))


@pytest.mark.parametrize("names, nodes", [("0011", 2), ("0000", 1), ("0123", 1), ("0001", 1), ("0101", 1), ("00-1", 1)])
def test_ranks_on_equal_nodes_are_found(names, nodes):
    assert run_ranks(4, nodes_found, names) == [nodes] * 4


def nodes_found(rank, world, names):
    os.environ["GROUP_RANK"] = names[rank]
    if names[rank] == "-":
        del os.environ["GROUP_RANK"]
    return nodes_of(None)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_replicas_on_two_nodes_stay_identical_and_make_no_more_groups(level):
    results = run_ranks(4, on_nodes, 2, True, several_replicas, level)
    for result in results:
        assert_equal(result["result"]["state"], results[0]["result"]["state"])
        assert result["result"]["loss"] < 1.0 and result["groups"] == 3


def several_replicas(rank, world, level):
    for _ in range(2):
        start_net(level)
    return replica(rank, world, level, steps=60)


# Under DistributedDataParallel ---------------------------------------------------------------------------------------


def accumulated(rank, world, level, with_no_sync):
    model, _ = start_net(level, exact=True)
    state, sent = model.module.amp8_state, []
    x, y = data(64)
    for micro in range(4):
        batch = slice(micro * 16 + rank * 8, micro * 16 + rank * 8 + 8)
        with model.no_sync() if with_no_sync and micro < 3 else contextlib.nullcontext():
            (loss_of(model, x[batch], y[batch]) / 4).backward()
        sent.append(amp8.wire_bytes(model))
    state.finish()
    gradients = {name: layer.gradient.value() for name, layer in state.layers.items()}
    return {"sent": sent, "gradients": gradients, "bias": model.module[0].bias.grad}


def gradient_of(name, results):
    """Returns the layer's gradient from the first rank that has it: under O3 its owner alone does."""
    return next(r["gradients"][name] for r in results if r["gradients"][name] is not None)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_no_sync_sends_nothing_and_accumulates_in_high_precision(level):
    results = run_ranks(2, accumulated, level, True)
    assert results[0]["sent"][:3] == [0, 0, 0] and results[0]["sent"][3] > 0
    plain = seeded_model(build)
    loss_of(plain, *data(64)).backward()
    assert relative_error(results[0]["bias"], plain[0].bias.grad) < 0.12
    for name in ("0", "3"):
        exact = plain.get_submodule(name).weight.grad
        # the products' own error: e5m2 gradients, e4m3 inputs
        assert relative_error(gradient_of(name, results), exact) < 0.12


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_accumulating_without_no_sync_gives_the_same_mean(level):
    sent_each_time, sent_once = (run_ranks(2, accumulated, level, with_no_sync) for with_no_sync in (False, True))
    assert sent_each_time[0]["sent"][0] > 0
    for name in ("0", "3"):  # rounded four times rather than once
        assert 0 < relative_error(gradient_of(name, sent_each_time), gradient_of(name, sent_once)) < 0.08


class Words(nn.Module):
    """Takes integers by keyword, as transformers' models do, and does not always use one of its layers."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.spare = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 32, False)
        self.head = nn.Linear(32, 50)

    def forward(self, *, input_ids, spare=False):
        x = self.embed(input_ids)
        x = self.spare(x) if spare else self.body(x)
        return {"logits": self.head(x)}


def words_after_a_step(rank, world):
    model, optimizer = start(seeded_model(Words), ddp=True)
    ids = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(rank))
    model(input_ids=ids)["logits"].sum()  # a forward pass without backward changes nothing
    nn.functional.cross_entropy(model(input_ids=ids)["logits"].flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    return weights_of(model.module)


def test_keyword_and_integer_inputs_and_an_unused_layer():
    first, second = run_ranks(2, words_after_a_step)
    assert_equal(first, second)
    before = seeded_model(Words).state_dict()
    assert not torch.allclose(first["body.weight"], before["body.weight"], atol=1e-3)
    assert torch.allclose(first["spare.weight"], before["spare.weight"], atol=1e-4)  # no gradient anywhere: no step


class InAnyOrder(nn.Module):
    """Uses its layers in the order that it is told, and not always all of them."""

    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(32), nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, order, checkpointed):
        x = self.norm(x)
        for i in order:
            x = x + (checkpoint(self.layers[i], x, use_reentrant=True) if checkpointed else self.layers[i](x)).relu()
        return {"loss": x.square().mean(), "x": x}


def order_of_collectives(rank, world, passes, way):
    """Returns the collectives of a step as this rank issues them, and the gradients before the step."""
    model, optimizer = start(seeded_model(InAnyOrder), bucket_bytes=1)
    options = {} if way == "checkpointed" else {way: True}
    model, issued = DistributedDataParallel(model, bucket_cap_mb=1e-4, **options), []
    amp8.attach(model)

    def by_ddp(_, bucket):
        issued.append(f"DDP {bucket.index()}")
        return allreduce_hook(None, bucket)

    def noted(name, collective):
        return lambda *args, **options: (issued.append(f"{name} {args[0].numel()}"), collective(*args, **options))[1]

    for name in ("all_to_all_single", "all_gather_into_tensor"):
        setattr(dist, name, noted(name, getattr(dist, name)))
    model.register_comm_hook(None, by_ddp)
    for step in range(1 if way == "static_graph" else 2):  # after the first step DDP fills its buckets anew
        issued.clear()
        for i in range(passes):
            used = [(0, 1, 2, 3), (3, 0, 1, 2)] if rank == 0 or way == "checkpointed" else [(2, 1, 0), ()]
            output = model(seeded(8, 32, seed=10 * step + i + rank), used[i], way == "checkpointed")
            (output["loss"] + output["x"].mean()).backward()
            gradients = {name: value.grad.clone() for name, value in model.module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return {"issued": "\n".join(issued), "gradients": gradients, "weights": weights_of(model.module)}


@pytest.mark.parametrize(
    "passes, way",
    [(1, "find_unused_parameters"), (2, "find_unused_parameters"), (1, "static_graph"), (2, "checkpointed")],
)
def test_ranks_issue_collectives_in_one_order_whatever_layers_they_use(passes, way):
    first, second = run_ranks(2, order_of_collectives, passes, way)
    assert first["issued"] == second["issued"]
    a_pass = first["issued"].split("\n")
    a_pass = a_pass[: len(a_pass) // passes]
    kinds = [name.split()[0] for name in a_pass]
    assert kinds.count("all_to_all_single") == 4 and "DDP" in kinds
    assert "DDP" not in kinds[kinds.index("all_to_all_single") :]
    assert_equal(first["gradients"], second["gradients"])  # the mean after each backward pass, as DDP's
    assert first["gradients"]["layers.3.weight"].any()
    assert_equal(first["weights"], second["weights"])


@on_ranks(2)
def test_no_process_group_is_made(rank, world):
    """A group is a communicator, which nothing would free."""
    before = dist.get_pg_count()
    for _ in range(3):
        start_net()
    assert dist.get_pg_count() == before


@on_ranks(2)
def test_converted_weights_may_all_be_frozen(rank, world):
    """As those of a model that adapters train."""
    model = seeded_model(build)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)
    model, optimizer = start(model, "O3", ddp=True)
    before = weights_of(model)
    loss_of(model, *batch_of(rank)).backward()
    optimizer.step()
    after = weights_of(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("bias")}


def volume(rank, world, level, passes=1):
    """Returns the bytes sent after each of three steps, and their dtypes."""
    model, optimizer = start(linears(*[64] * 5, 10, bias=False), level, ddp=True)
    sent = []
    for step in range(3):
        for _ in range(passes):
            model(seeded(16, 64, seed=10 * step + rank)).square().mean().backward()
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


def norm_of(rank, world, level):
    model, _ = start_net(level, exact=True)
    loss_of(model, *batch_of(rank)).backward()
    return amp8.clip_grad_norm_(model.parameters(), 1e9).item()


def test_norm_over_owners_is_the_norm_of_the_whole():
    o2, o3 = run_ranks(2, norm_of, "O2"), run_ranks(2, norm_of, "O3")
    assert o3[0] == o3[1] == pytest.approx(o2[0], rel=0.02)


def bytes_and_masters(rank, world):
    model, optimizer = start(linears(*[128] * 9), "O3", lr=1e-3, ddp=True)
    model(torch.randn(16, 128)).square().mean().backward()
    optimizer.step()
    total = amp8.report(model, optimizer)["bytes_per_parameter"]["linear"]["total"]
    return {"bytes": total, "masters": amp8.master_state_dict(model), "weights": weights_of(model.module)}


@pytest.mark.parametrize("world", [2, 4])
def test_o3_bytes_per_parameter_and_masters(world):
    results = run_ranks(world, bytes_and_masters)
    for result in results:
        assert result["bytes"] <= 2.5 + 5.5 / world
        assert result["bytes"] == pytest.approx(1 + 6 / world, abs=0.02)
        assert_equal(result["masters"], results[0]["masters"])
        for name, master in result["masters"].items():
            if name.endswith("weight"):  # the FP8 weight is the master, rounded
                assert 0.005 < relative_error(result["weights"][name], master) < 0.04


def scale_of_te(rank, world):
    model, optimizer = start_net(recipe="te_delayed", recipe_options={"amax_history_len": 4})
    x, y = batch_of(0)
    loss_of(model, x * (1 + rank), y).backward()
    optimizer.step()
    return model.module[0].scale.clone()


def test_te_recipe_shares_amaxes_between_ranks():
    first, second = run_ranks(2, scale_of_te)
    assert torch.equal(first, second)
    assert first[0] == 448 / (2 * data(32)[0][:16].abs().max())


def masters_of_a_resumed_run(rank, world, level, folder, recipe):
    """Resumes, and compares with the run that goes on. Returns how many tensors of masters the rank saves."""
    from safetensors.torch import load_file, save_file

    def loss(model, step):
        return loss_of(model, *batch_of(rank, seed=step))

    model, optimizer = start_net(level, recipe=recipe)
    train(model, optimizer, loss, range(20), max_norm=1.0)
    state = amp8.exact_state(model, optimizer)
    saved = {key: value for key, value in state.items() if rank == 0 or key.startswith("rank/")}
    save_file(saved, f"{folder}/{rank}.safetensors")
    going_on = train(model, optimizer, loss, range(20, 25), max_norm=1.0)
    dist.barrier()
    common = {k: v for k, v in load_file(f"{folder}/0.safetensors").items() if k.startswith("all/")}
    model, optimizer = start_net(level, seed=9, recipe=recipe)
    amp8.load_exact_state(model, optimizer, {**common, **load_file(f"{folder}/{rank}.safetensors")})
    assert train(model, optimizer, loss, range(20, 25), max_norm=1.0) == going_on
    return sum(key.startswith("rank/master/") for key in saved)


@pytest.mark.parametrize("level, recipe", [("O1", "msamp"), ("O2", "msamp"), ("O3", "msamp"), ("O2", "fp4")])
def test_two_ranks_resume_bit_for_bit(level, recipe, tmp_path):
    masters = run_ranks(2, masters_of_a_resumed_run, level, str(tmp_path), recipe)
    assert masters == ([2, 2] if level == "O3" else [0, 0])  # one layer each: codes and scale


@pytest.mark.parametrize("level", ["O2", "O3"])
@on_ranks(2)
def test_a_gradient_of_zeros_on_one_rank_leaves_the_others_theirs(rank, world, level):
    """An expert may see no token on a rank. The scale of its zeros was 1, which is the scale of large gradients."""
    model, _ = start(linears(32, 32, bias=False), level)
    gradient = 1e-5 * seeded(32, 32)
    port = torch.zeros(32, 32, requires_grad=True)
    port.grad = gradient.clone() if rank == 0 else torch.zeros_like(gradient)
    model[0].gradient.receive(port)
    model.amp8_state.finish()
    mean = model[0].gradient.value()
    assert (mean is None and level == "O3") or relative_error(mean, gradient / 2) < 0.06


def copied(rank, world, level):
    model, optimizer = start_net(level)
    train(model, optimizer, lambda model, step: loss_of(model, *batch_of(rank, seed=step)), range(2))
    twin, plain, (x, _) = copy.deepcopy(model), copy.deepcopy(model.module), data(8)
    assert not any(hasattr(layer, "gradient") for layer in twin.modules())
    twin(x).sum().backward()  # and its backward pass exchanges no FP8 gradient
    return {"apart": (twin(x) - plain(x)).abs().max(), "sent": amp8.wire_bytes(model)}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_copy_of_the_wrapped_model_is_plain(level):
    """As an average of the weights begins."""
    assert all(result["apart"] == 0 for result in run_ranks(2, copied, level))
