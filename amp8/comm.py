"""Sends FP8 gradients and weights between ranks, over stock gloo and NCCL.

FP8 is sent as uint8, which every backend supports, and is never added in FP8. The mean of N ranks' gradients takes four
steps: an all_to_all, in which each rank receives the others' codes of its own share; a mean in fp32, in which the
rank's own gradient is not rounded; one rounding to e4m3; and an all_gather. This sends as much as a ring all-reduce of
FP8, 2 (N - 1) / N bytes per element. It rounds twice, while a ring rounds at each hop, and its sum cannot overflow.
(FP8-LM, arXiv:2310.18313, section 2.2, adds in FP8 and avoids overflow by a pre-scale.)

On several nodes this would send nearly the whole gradient through each rank's network card, of which a ring sends about
one part in as many as a node has ranks. So there the ranks of a node add first, and ranks of equal place in their nodes
exchange the sums, see `Comm.collect`.

Under O3 the shares are whole tensors, each owned by one rank. Only the owner needs the mean, so the second collective
moves the updated FP8 weights instead of the gradients.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from . import scaling
from .compiled import compiled_on_cuda
from .gradients import Phase

if TYPE_CHECKING:
    from .gradients import WeightGradient
    from .linear import FP8Linear

BUCKET = 25 << 20  # bytes of codes that travel together, as in DistributedDataParallel
SLICE = 16 << 20  # bytes of updated weights per rank that are gathered at once


class Bucket:
    """Weights whose gradients are sent together: concatenated, then cut into one share per rank.

    mine: the number of this rank's share. owners: under O3 the number of each weight's share. shapes: of the weights;
    the default is their whole shape. shares: elements per share. parts: for each share, its pieces (index of the
    weight, start, end, place); start and end count elements of the weight, place is where the piece begins in the
    share. pieces: this rank's.
    """

    def __init__(
        self,
        gradients: "list[WeightGradient]",
        mine: int,
        world: int,
        owners: "dict[WeightGradient, int] | None" = None,
        shapes: list[torch.Size] | None = None,
    ) -> None:
        if owners is not None:  # whole tensors, in the order of their owners
            gradients = sorted(gradients, key=lambda gradient: owners[gradient])
        self.gradients, self.mine, self.sharded = gradients, mine, owners is not None
        self.shapes = shapes or [gradient.shape for gradient in gradients]
        sizes = [shape.numel() for shape in self.shapes]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        if owners is not None:
            self.shares = [0] * world
            for gradient, size in zip(gradients, sizes, strict=True):
                self.shares[owners[gradient]] += size
        else:
            self.shares = [-(-sum(sizes) // world)] * world  # the last one padded
        self.sizes, self.starts = sizes, starts
        self.parts = [self.part(sum(self.shares[:r]), sum(self.shares[: r + 1])) for r in range(world)]
        self.pieces = self.parts[mine]
        self.waiting = set(gradients)
        self.launched = False

    def part(self, low: int, high: int) -> list[tuple[int, int, int, int]]:
        """The pieces of weights in low .. high of all of them laid end to end."""
        found = []
        for i, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            a, b = max(start, low), min(start + size, high)
            if a < b:
                found.append((i, a - start, b - start, a - low))
        return found


class Hop(NamedTuple):
    """The ranks between which an exchange goes, this rank's number among them, and the format of what is sent."""

    group: dist.ProcessGroup | None
    rank: int
    world: int
    dtype: torch.dtype


class Comm:
    """Averages the FP8 gradients of a model's converted layers. `sent`: bytes this rank has sent in all steps.

    All ranks process the buckets in the same order, in `finish`. Collectives need one order on all ranks, in one
    communicator or in several (torch.distributed.new_group has a warning). DistributedDataParallel sends its buckets
    during the backward pass. Ranks that do not use the same layers, or use them in another order, would send its
    buckets and ours in different orders. So `finish` is called when a backward pass has ended.

    overlap: sends each bucket as soon as it is complete, for fully_shard, all of whose ranks use the same layers. With
    gloo each collective blocks. On a GPU the collectives then run on their own stream, in parallel with the backward
    pass, until `finish`.
    nodes: on how many nodes the group is, in equal parts. within, across: the hops of `collect`.
    """

    overlap = False

    def __init__(
        self,
        gradients: "list[WeightGradient]",
        group: dist.ProcessGroup | None,
        sharded: bool,
        bucket: int = BUCKET,
        dtype: torch.dtype = scaling.E4M3,
    ) -> None:
        self.gradients, self.group, self.sharded, self.bucket = gradients, group, sharded, bucket
        self.dtype = dtype  # of the codes to be averaged
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.nodes = nodes_of(group)
        self.within, self.across = Hop(group, self.rank, self.world, dtype), None
        if self.nodes > 1:
            ranks, each = dist.get_process_group_ranks(group), self.world // self.nodes
            node, place = divmod(self.rank, each)
            self.within = Hop(subgroup(ranks[node * each :][:each]), place, each, dtype)
            self.across = Hop(subgroup(ranks[place::each]), node, self.nodes, torch.bfloat16)
        self.sent = 0
        self.wire: set[torch.dtype] = set()  # the formats that were sent
        self.buckets: list[Bucket] = []
        self.planned: list[WeightGradient] | None = None
        self.finished = False  # since the last step or gradient
        self.stream: torch.cuda.Stream | None = None

    def plan(self) -> None:
        """Fills the buckets in the order in which backward reaches the layers, the last layer first. Repeats this when
        layers are frozen or unfrozen, but not while buckets are being sent."""
        if any(bucket.launched for bucket in self.buckets):
            return
        trained = [gradient for gradient in reversed(self.gradients) if gradient.linear.weight.requires_grad]
        if trained == self.planned:
            return
        self.planned, self.buckets, filling, size = trained, [], [], 0
        for gradient in trained:
            if filling and size + gradient.shape.numel() > self.bucket:
                self.buckets.append(self.fill(filling))
                filling, size = [], 0
            filling.append(gradient)
            size += gradient.shape.numel()
        if filling:
            self.buckets.append(self.fill(filling))
        self.where = {gradient: bucket for bucket in self.buckets for gradient in bucket.gradients}
        for gradient in self.gradients:
            gradient.piece = None
        for bucket in self.buckets:
            for i, start, end, _ in bucket.pieces:
                bucket.gradients[i].piece = slice(start, end)

    def begin(self, gradient: "WeightGradient") -> None:
        """Called for each new gradient. If its bucket was already sent, this is the next backward pass: finishes the
        last one, whose gradients may have been dropped without a step."""
        if self.where[gradient].launched:
            self.finish()

    def share_of(self, rank: int) -> int:
        """The number of a rank's share: those of the ranks of equal place in their nodes lie side by side."""
        node, place = divmod(rank, self.world // self.nodes)
        return place * self.nodes + node

    def fill(self, gradients: "list[WeightGradient]") -> Bucket:
        owners = {gradient: self.share_of(gradient.owner) for gradient in gradients} if self.sharded else None
        return Bucket(gradients, self.share_of(self.rank), self.world, owners)

    def ready(self, gradient: "WeightGradient") -> None:
        """A gradient is complete on this rank. With `overlap`, launches every bucket whose turn it is."""
        self.begin(gradient)
        self.finished = False
        self.where[gradient].waiting.discard(gradient)
        for bucket in self.buckets if self.overlap else ():
            if bucket.launched:
                continue
            if bucket.waiting:
                break
            self.launch(bucket)

    def finish(self) -> None:
        """Launches the remaining buckets and waits for all of them. A gradient that this rank does not have counts as
        zero in the mean; a gradient that no rank has stays None. Every rank must call this before a step."""
        if self.finished:
            return
        self.plan()
        for bucket in self.buckets:
            if not bucket.launched:
                self.launch(bucket)
        for bucket in self.buckets:
            bucket.launched, bucket.waiting = False, set(bucket.gradients)
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.finished = True

    def launch(self, bucket: Bucket) -> None:
        bucket.launched = True
        for gradient in bucket.gradients:
            gradient.settle()
        bucket.gradients[0].state.rounding.finish()
        device = bucket.gradients[0].linear.weight.device
        if device.type != "cuda" or not self.overlap:
            return self.reduce(bucket, device)
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        self.stream.wait_stream(current)
        for gradient in bucket.gradients:  # made on one stream, read on the other
            for tensor in (gradient.codes, gradient.scale, gradient.unrounded, *(gradient.accumulated or ())):
                if tensor is not None:
                    tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            self.reduce(bucket, device)
        for gradient in bucket.gradients:
            for tensor in (gradient.codes, gradient.scale, *(gradient.accumulated or ())):
                if tensor is not None:
                    tensor.record_stream(current)

    @torch.no_grad()
    def reduce(self, bucket: Bucket, device: torch.device) -> None:
        """Puts the mean over ranks in place of each gradient of the bucket."""
        mine = bucket.shares[bucket.mine]
        scales = torch.zeros(len(bucket.gradients), device=device)  # 0 says that this rank has no such gradient
        given, missing = [], []
        for i, (gradient, size) in enumerate(zip(bucket.gradients, bucket.sizes, strict=True)):
            if gradient.codes is None:
                missing.append(i)
                given.append(torch.zeros(size, dtype=self.dtype, device=device))
                continue
            given.append(gradient.codes.view(-1))
            # A mean from an earlier round takes part again: from all ranks or, times N, from the only rank that has it.
            scales[i] = gradient.scale / self.world if gradient.averaged and bucket.sharded else gradient.scale
        shares = [[given[i][start:end] for i, start, end, _ in part] for part in bucket.parts]
        own = {i: bucket.gradients[i].unrounded for i, *_ in bucket.pieces}
        codes, inverse, scales, own = self.collect(shares, bucket.shares, scales, bucket.parts, own)
        out, last = torch.zeros(mine, dtype=scaling.E4M3, device=device), self.across or self.within
        for i, start, end, place in bucket.pieces:
            part = slice(place, place + end - start)
            # Tensors of their own, not views: a compiled function is compiled again for each kind of offset.
            inverse_i, scale = inverse[:, i].contiguous(), scales[i] / last.world
            rounded_sum_(codes[:, part], inverse_i, own[i], last.rank, scale, out[part])

        if bucket.sharded:
            held = {i: out[place : place + end - start] for i, start, end, place in bucket.pieces}
        else:
            flat = self.gather(out.view(torch.uint8)).view(scaling.E4M3)
            held = {i: flat[a : a + n] for i, (a, n) in enumerate(zip(bucket.starts, bucket.sizes, strict=True))}
        for i, gradient in enumerate(bucket.gradients):
            if i in missing and scales[i] == torch.inf:
                continue
            if i in held:
                gradient.set_phase(Phase.MEAN, held[i].view(bucket.shapes[i]), scales[i])
            else:
                gradient.set_phase(Phase.ELSEWHERE)

    def collect(
        self,
        shares: list[list[torch.Tensor]],
        sizes: list[int],
        scales: torch.Tensor,
        parts: Sequence[Sequence[tuple[int, int, int, int]]],
        own: dict[int, torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[int, torch.Tensor | None]]:
        """Sends each rank its share of this rank's codes. shares, sizes, scales: see `exchange`. parts: the pieces of
        each share. own: {index of a gradient: this rank's own part of its share in fp32, if it is there}.

        Returns (codes, reciprocals of scales, scales) of `exchange`, and `own`: their sum, with `own` in place of this
        rank's, is the sum for the mean. On several nodes the sum is over nodes, of each node's mean: a rank receives
        from its node the shares of all ranks of equal place, adds up each, and sends the means to these ranks. They are
        sent as bf16, because a third rounding to FP8 would be noticeable: the error of the mean stays at 3.7% on 2 or 8
        nodes of 8 ranks, if ranks do not correlate, where FP8 would make it 4.2% and 4.5%. At a correlation of 0.9 it
        stays at 2.7%, and FP8 would make it 3.1% and 2.8%.
        """
        hop, across = self.within, self.across
        codes, inverse, scales = self.exchange(hop, shares, sizes, scales)
        if across is None:
            return codes, inverse, scales, own
        first, start = hop.rank * across.world, 0
        scales = torch.where(scales == torch.inf, 0, scales)
        shares, sizes, mean = [], sizes[first : first + across.world], {}
        for node, (size, part) in enumerate(zip(sizes, parts[first : first + across.world], strict=True)):
            sums = []
            for i, begin, end, place in part:
                piece = codes[:, start + place : start + place + end - begin]
                given = (piece, inverse[:, i].contiguous(), own[i] if node == across.rank else None, hop.rank)
                sums.append(rounded_sum(*given, scales[i] / hop.world, across.dtype))
                if node == across.rank:
                    mean[i] = summed(*given) / hop.world
            shares.append(sums)
            start += size
        return *self.exchange(across, shares, sizes, scales), mean

    def exchange(
        self, hop: Hop, shares: list[list[torch.Tensor]], sizes: list[int], scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sends each rank of a hop its equal number of shares, in pieces that are `sizes` elements with zeros behind
        them, and all scales [number of gradients], 0 where this rank does not have the gradient.

        Returns, for this rank's shares, the codes of all ranks [ranks, size], the reciprocals of their scales [ranks,
        number of gradients] and the scale that suits each mean, infinite where no rank has the gradient.
        """
        n, each, item = len(scales), len(shares) // hop.world, hop.dtype.itemsize
        # One copy puts all in place. Scales are sent with the shares: one collective instead of two.
        send, splits = [], []
        for i in range(0, len(shares), each):
            for share, size in zip(shares[i : i + each], sizes[i : i + each], strict=True):
                send += [piece.view(torch.uint8) for piece in share]
                if padding := size - sum(map(len, share)):
                    send.append(torch.zeros(padding * item, dtype=torch.uint8, device=scales.device))
            send.append(scales.view(torch.uint8))
            splits.append(sum(sizes[i : i + each]) * item + 4 * n)
        mine = splits[hop.rank]
        received = torch.empty(hop.world, mine, dtype=torch.uint8, device=scales.device)
        dist.all_to_all_single(received.view(-1), torch.cat(send), [mine] * hop.world, splits, group=hop.group)
        self.sent += sum(splits) - mine
        self.wire.add(hop.dtype)
        codes = received[:, : mine - 4 * n].view(hop.dtype)
        scales = received[:, mine - 4 * n :].contiguous().view(torch.float32).view(hop.world, n)
        inverse = torch.where(scales == 0, 0, 1 / scales)  # NaN, which marks a gradient that is not finite, stays
        # No mean is larger than the largest value, so the smallest scale fits. All ranks compute the same scale.
        return codes, inverse, torch.where(scales == 0, torch.inf, scales).amin(0)

    def gather(self, share: torch.Tensor) -> torch.Tensor:
        """The shares of all ranks, which have equal sizes, laid end to end. First between nodes, as each share then
        leaves its node once for each other node."""
        for hop in (self.across, self.within):
            if hop is not None:
                whole = share.new_empty(hop.world * len(share), *share.shape[1:])
                dist.all_gather_into_tensor(whole, share, group=hop.group)
                self.sent += (hop.world - 1) * share.nbytes
                share = whole
        return share

    @torch.no_grad()
    def gather_weights(self, linears: "list[FP8Linear]") -> None:
        """O3, after a step: every rank receives the FP8 weights of the layers that others own, bit for bit.

        linears: all converted layers that have an owner, in one order on all ranks.
        """
        device = linears[0].weight.device
        owned = [[linear for linear in linears if linear.gradient.owner == r] for r in range(self.world)]
        longest = max(sum(linear.weight.numel() for linear in part) for part in owned)
        for low in range(0, longest, SLICE):
            width = min(SLICE, longest - low)
            send = torch.zeros(width, dtype=torch.uint8, device=device)
            for weight, place in pieces(owned[self.rank], low, width):
                send[place : place + weight.numel()].copy_(weight)
            received = self.gather(send).view(self.world, width)
            for rank, part in enumerate(owned):
                if rank != self.rank:
                    for weight, place in pieces(part, low, width):
                        weight.copy_(received[self.share_of(rank), place : place + weight.numel()])
        most = max(len(part) for part in owned)
        send = torch.zeros(most, 2, device=device)
        for row, linear in zip(send, owned[self.rank], strict=False):
            row[0], row[1] = linear.weight_scale, linear.weight_amax
        received = self.gather(send).view(self.world, most, 2)
        for rank, part in enumerate(owned):
            for row, linear in zip(received[self.share_of(rank)], part, strict=False):
                linear.weight_scale.copy_(row[0])
                linear.weight_amax.copy_(row[1])


@compiled_on_cuda
def summed(codes: torch.Tensor, inverse: torch.Tensor, own: torch.Tensor | None, rank: int) -> torch.Tensor:
    """The sum over ranks in fp32: codes [ranks, size] times inverse [ranks]; in place of `rank`'s, `own`, which is not
    rounded, if it is there."""
    total = torch.zeros(codes.shape[1], device=codes.device)
    for r in range(codes.shape[0]):
        if r == rank and own is not None:
            total.add_(own)
        else:
            total.addcmul_(codes[r].float() if codes.is_cuda else scaling.decode(codes[r]), inverse[r])
    return total


@compiled_on_cuda
def rounded_sum(
    codes: torch.Tensor,
    inverse: torch.Tensor,
    own: torch.Tensor | None,
    rank: int,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`summed` times `scale`, rounded to `dtype`. On a GPU one kernel, which reads each code once."""
    return scaling.quantize(summed(codes, inverse, own, rank), scale, dtype)


@compiled_on_cuda
def rounded_sum_(
    codes: torch.Tensor,
    inverse: torch.Tensor,
    own: torch.Tensor | None,
    rank: int,
    scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Writes `rounded_sum` to `out`."""
    out.copy_(rounded_sum(codes, inverse, own, rank, scale, out.dtype))


def nodes_of(group: dist.ProcessGroup | None) -> int:
    """On how many nodes the ranks of a group are, if each node has the same number of them, more than one, and they
    follow one another; else 1. torchrun, and so `accelerate launch`, numbers nodes in GROUP_RANK."""
    names: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, os.environ.get("GROUP_RANK"), group=group)
    each = names.count(names[0])
    nodes = list(dict.fromkeys(names))
    regular = each > 1 and None not in nodes and names == [node for node in nodes for _ in range(each)]
    return len(nodes) if regular else 1


def subgroup(ranks: list[int]) -> dist.ProcessGroup:
    """The group of these ranks, which alone call it. One for all models, as nothing would free its communicator."""
    return made(dist.group.WORLD, tuple(ranks))


@functools.cache
def made(world: dist.ProcessGroup, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    timeout = world._get_backend(world._device_types[0]).options._timeout  # else torch's default, not the one in force
    # pyrefly: ignore[bad-return]
    return dist.new_group(ranks, timeout, use_local_synchronization=True)


def largest(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Elementwise maximum over a group's ranks, in place. NaN counts as infinity, because a maximum could drop NaN."""
    if dist.get_world_size(group) > 1:
        x.copy_(x.nan_to_num(nan=torch.inf, posinf=torch.inf))
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return x


def pieces(linears: "list[FP8Linear]", low: int, width: int) -> Iterator[tuple[torch.Tensor, int]]:
    """(bytes, place) of the part of each weight that falls in low .. low + width of all of them laid end to end."""
    start = 0
    for linear in linears:
        codes = linear.codes.view(torch.uint8).view(-1)
        a, b = max(low, start), min(low + width, start + codes.numel())
        if a < b:
            yield codes[a - start : b - start], a - low
        start += codes.numel()


def partition(sizes: dict[str, int], world: int) -> dict[str, int]:
    """Distributes whole tensors evenly over ranks: {name: size} -> {name: rank}, the same on every rank. The largest
    tensor comes first, and each goes to the rank that has the least so far."""
    loads, owners = [0] * world, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rank = loads.index(min(loads))
        owners[name] = rank
        loads[rank] += sizes[name]
    return owners
