"""The levels under fully_shard (FSDP2): sharded FP16 weights, gathered as FP8; FP8 gradients, reduce-scattered.

Weights use FSDP2's own extension point, `fsdp_pre_all_gather` on a tensor subclass: FSDP2 gathers one byte per
parameter whenever it would gather a plain weight, and prefetching, freeing and checkpointing work as usual. Gradients
cannot use FSDP2's reduce-scatter: FSDP2 copies all gradients of a block into one buffer of one dtype, and a custom
reduce-scatter sees only this buffer, without the bounds of the tensors. So they leave through the layer's ports, as
under DistributedDataParallel, and `ShardComm` averages them.

All ranks use the same scales, one per tensor: they agree on the largest magnitudes once per step. So the stored rows
are those that one process would store, and any number of ranks can load them.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from . import scaling
from .coded import CodesRead
from .comm import BUCKET, Bucket, Comm, summed
from .grad_view import FP8Gradient
from .gradients import Phase
from .linear import FP16_TO_E4M3, fp16_to_e4m3
from .tensors import cut

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from .convert import State
    from .gradients import WeightGradient
    from .linear import FP8Linear

    Place = tuple[FSDPParam, FSDPParamGroup]


def managed(modules: list[FSDPModule]) -> "dict[nn.Parameter, Place]":
    """{parameter: (FSDPParam, its group)} of all parameters that fully_shard has sharded in these modules."""
    found: dict[nn.Parameter, Place] = {}
    for module in modules:
        state = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            groups = state._fsdp_param_groups
        else:  # torch 2.11
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for group in groups:
            for fsdp_param in group.fsdp_params:
                found[fsdp_param.sharded_param] = fsdp_param, group
    return found


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises an error if the optimizer was made before fully_shard, which replaces the parameters."""
    parameters = set(model.parameters())
    if any(parameter not in parameters for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "the optimizer has parameters that the model no longer has: make it after fully_shard, as one call of "
            "accelerator.prepare(model, optimizer) does"
        )


def check(
    model: nn.Module,
    places: "dict[nn.Parameter, Place]",
    opt_level: str,
    optimizer: torch.optim.Optimizer | None,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Raises an error for what can't work under fully_shard. places: what `managed` found."""
    if opt_level == "O3":
        raise ValueError("O3 keeps a whole FP8 weight on every rank; under fully_shard use O2, which shards all of it")
    if process_group is not None:
        raise ValueError("process_group is not for a model under fully_shard: its mesh says which ranks average")
    if optimizer is not None:
        check_parameters(model, optimizer)
    for fsdp_param, group in places.values():
        if fsdp_param.offload_to_cpu:
            raise ValueError("amp8 can't offload to the CPU under fully_shard: leave out CPUOffloadPolicy")
        if group.post_forward_mesh_info not in (None, group.mesh_info):
            raise ValueError("amp8 can't reshard to a smaller mesh: reshard_after_forward is True, False or None")
        if hasattr(fsdp_param, "_unsharded_param"):
            raise ValueError("the model has run already: call amp8.initialize before its first forward pass")


class RowShard(torch.Tensor):
    """This rank's rows of a converted weight: fp16 codes in a tensor that reports the original dtype.

    FSDP2 requires one dtype in a block, and asks the tensor itself what to gather. Code that reads the tensor gets
    codes / scale. Only `load_state_dict`, `copy_` and the optimizer write to it.
    """

    def __new__(cls, codes: torch.Tensor, layer: "FP8Linear", dtype: torch.dtype) -> "RowShard":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, layer: "FP8Linear", dtype: torch.dtype) -> None:
        self.codes, self.amp8_linear = codes, layer

    def __repr__(self, **_: object) -> str:
        return f"RowShard({tuple(self.codes.shape)}, {self.dtype})"

    @classmethod
    # pyrefly: ignore[bad-override]
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0]
        if function in RESHAPED:
            return cls(function(first.codes, *args[1:]), first.amp8_linear, first.dtype)
        changed = first if isinstance(first, list | tuple) else [first]
        if function._schema.is_mutable and any(isinstance(tensor, cls) for tensor in changed):
            if function is torch.ops.aten.copy_.default and isinstance(first, cls):
                if isinstance(args[1], cls):
                    first.codes.copy_(args[1].codes)
                    return first
                if first.codes.data_ptr() == first.amp8_linear.codes.data_ptr() and first.shape == args[1].shape:
                    first.amp8_linear.write(args[1])  # every rank has to do it
                    return first
            raise CodesRead("a converted weight can't be changed in place: load values with load_state_dict")
        args, kwargs = tree_map(cls.values_of, (args, kwargs or {}))
        return function(*args, **kwargs)

    @staticmethod
    def values_of(x: Any) -> Any:
        if not isinstance(x, RowShard):
            return x
        return scaling.dequantize(x.codes, x.amp8_linear.weight_scale, x.dtype)

    def fsdp_pre_all_gather(
        self, mesh: object, outer_size: object, outer_stride: object, module: object, mp_policy: object
    ) -> tuple[tuple[torch.Tensor], None]:
        sharding: Sharding = self.amp8_linear.sharding  # pyrefly: ignore[bad-assignment]
        codes = fp16_to_e4m3(self.codes, self.amp8_linear.weight_scale)
        codes = below(codes.view(torch.uint8), sharding.cut)  # uint8 because gloo has no FP8
        if (comm := sharding.state.comm) is not None:
            comm.sent += (comm.world - 1) * codes.numel()
            comm.wire.add(scaling.E4M3)
        return (codes,), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: object,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[()]] | None:
        if out is None:  # afterwards the same memory is freed and filled again
            layer = self.amp8_linear
            layer.held = outputs[0].view(scaling.E4M3)[: layer.sharding.full_shape[0]]  # pyrefly: ignore[missing-attribute]
            return Gathered(layer.held, layer.weight_scale, param_dtype), ()


class Gathered(torch.Tensor):
    """The whole weight as FSDP2 has gathered it: e4m3 codes and the scale of the fp16 ones. Its layer computes with the
    codes; other code that reads it in a forward pass gets their values."""

    codes: torch.Tensor
    scale: torch.Tensor
    # Setting it would change nothing that computes: whoever gathers it sees a write, and refuses.
    data = property(torch.Tensor.data.__get__, torch.no_grad()(torch.Tensor.copy_))  # pyrefly: ignore

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> "Gathered":
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __repr__(self, **_: object) -> str:
        return f"Gathered({tuple(self.codes.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:  # for torch.compile
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: torch.dtype, *_: object) -> "Gathered":
        return Gathered(inner["codes"], inner["scale"], dtype)

    @classmethod
    # pyrefly: ignore[bad-override]
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0]
        if function in RESHAPED and isinstance(first, cls):
            return cls(function(first.codes, *args[1:]), first.scale, first.dtype)
        if function._schema.is_mutable and isinstance(first, cls):
            raise CodesRead("a converted weight can't be changed in place: load values with load_state_dict")
        args, kwargs = tree_map(cls.values_of, (args, kwargs or {}))
        return function(*args, **kwargs)

    @staticmethod
    def values_of(x: Any) -> Any:
        return scaling.dequantize(x.codes, x.scale * FP16_TO_E4M3, x.dtype) if isinstance(x, Gathered) else x


aten = torch.ops.aten
RESHAPED = {
    aten.detach.default,
    aten.alias.default,
    aten.view.default,
    aten.slice.Tensor,
    aten.as_strided.default,
    aten.new_zeros.default,
}


class Sharding:
    """How one layer's weight is sharded. This rank has the rows first .. last; each rank has at most `cut` rows."""

    def __init__(self, layer: "FP8Linear", fsdp_param: "FSDPParam", state: "State") -> None:
        self.layer, self.fsdp_param, self.state = layer, fsdp_param, state
        self.full_shape = rows, columns = fsdp_param.sharded_param.shape
        self.cut = cut(rows, state.world, 0)[1]
        self.first, self.last = cut(rows, state.world, state.rank)
        self.shape = torch.Size((self.last - self.first, columns))
        self.piece = slice(self.first * columns, self.last * columns)

    @property
    def parameter(self) -> DTensor:
        """The parameter that model and optimizer have between steps."""
        return self.fsdp_param.sharded_param  # pyrefly: ignore[bad-return]

    @property
    def codes(self) -> torch.Tensor:
        """fp16 codes of this rank's rows."""
        shard = self.parameter._local_tensor
        if not isinstance(shard, RowShard):
            raise CodesRead("a converted weight is plain again: don't cast or move the model after initialize")
        return shard.codes

    def hold(self, codes: torch.Tensor) -> None:
        """Replaces this rank's plain rows by codes."""
        plain = self.parameter._local_tensor
        shard = RowShard(codes, self.layer, plain.dtype)
        self.parameter._local_tensor = shard
        self.fsdp_param._sharded_param_data = shard.view(-1)
        self.fsdp_param._init_extensions()

    def rows_of(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a weight, given as a DTensor or as a whole."""
        if isinstance(value, DTensor):
            return value.to_local()
        return value[self.first : self.last]

    def gradient_of(self, gradient: "WeightGradient") -> DTensor:
        """What `.grad` of the parameter is: a DTensor of this rank's rows."""
        if self.parameter.dtype != torch.float32:
            self.parameter.grad_dtype = None  # any
        return self.fsdp_param.to_sharded_dtensor(FP8Gradient(gradient, self.shape))

    def values(self) -> DTensor:
        """The true weight, fp32, as a DTensor."""
        rows = scaling.dequantize(self.codes, self.layer.weight_scale)
        spec = self.parameter._spec
        stride = (self.full_shape[1], 1)
        shape = self.full_shape
        return DTensor.from_local(rows, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)

    def gather(self) -> torch.Tensor:
        """The fp16 codes of the whole weight. Every rank calls it."""
        send = below(self.codes.view(torch.uint8), self.cut)
        whole = send.new_empty(self.state.world * self.cut, send.shape[1])
        dist.all_gather_into_tensor(whole, send, group=self.state.group)
        return whole.view(torch.float16)[: self.full_shape[0]]


def below(rows: torch.Tensor, n: int) -> torch.Tensor:
    """`rows` with zeros below them, n rows in all."""
    return rows if len(rows) == n else torch.cat([rows, rows.new_zeros(n - len(rows), rows.shape[1])])


def filled(x: torch.Tensor | None, n: int) -> torch.Tensor | None:
    """`x` [at most n] with zeros behind it, n in all."""
    return x if x is None or len(x) == n else torch.cat([x, x.new_zeros(n - len(x))])


class RowBucket:
    """Weights whose gradients are sent together. Every rank averages its rows of each."""

    def __init__(self, gradients: "list[WeightGradient]", replicas: Comm | None) -> None:
        self.gradients = gradients
        # pyrefly: ignore[missing-attribute]
        self.pieces = [(i, g.sharding.piece.start, g.sharding.piece.stop, 0) for i, g in enumerate(gradients)]
        # The same weights between replicas: their rows, cut into one share per replica.
        self.across: Bucket | None = None
        if replicas is not None:
            shapes = [gradient.sharding.shape for gradient in gradients]  # pyrefly: ignore[missing-attribute]
            self.across = Bucket(gradients, replicas.share_of(replicas.rank), replicas.world, shapes=shapes)
            self.across_pieces = {i: slice(start, end) for i, start, end, _ in self.across.pieces}
        self.waiting = set(gradients)
        self.launched = False


class ShardComm(Comm):
    """Reduce-scatters FP8 gradients: each rank receives the codes of its rows and averages in fp32, its own gradient
    unrounded. On one node (world - 1) / world bytes per element, see `collect` for several. With HSDP the means are
    then averaged between replicas, as between the ranks of DistributedDataParallel, but sent as bf16, because a third
    rounding to FP8 would be noticeable.
    """

    overlap = True

    def __init__(
        self,
        gradients: "list[WeightGradient]",
        group: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        bucket: int = BUCKET,
    ) -> None:
        super().__init__(gradients, group, False, bucket)
        self.replicas = None if replicas is None else Comm(gradients, replicas, False, dtype=torch.bfloat16)
        if self.replicas is not None:
            self.replicas.wire = self.wire

    def fill(self, gradients: "list[WeightGradient]") -> RowBucket:  # pyrefly: ignore[bad-override]
        return RowBucket(gradients, self.replicas)

    def launch(self, bucket: Bucket | RowBucket) -> None:
        for gradient in bucket.gradients:
            gradient.refresh()
            gradient.keep()  # a mean from an earlier pass does not travel again
        super().launch(bucket)  # pyrefly: ignore[bad-argument-type]

    @torch.no_grad()
    def reduce(self, bucket: RowBucket, device: torch.device) -> None:  # pyrefly: ignore[bad-override]
        scales = torch.zeros(len(bucket.gradients), device=device)
        shares: list[list[torch.Tensor]] = [[] for _ in range(self.world)]
        sizes, missing = [], []
        for i, gradient in enumerate(bucket.gradients):
            rows, columns = gradient.sharding.cut, gradient.shape[1]  # pyrefly: ignore[missing-attribute]
            sizes.append(rows * columns)
            if gradient.codes is None:
                missing.append(i)
                codes = torch.zeros(self.world * rows, columns, dtype=torch.uint8, device=device)
            else:
                scales[i] = gradient.scale
                codes = below(gradient.codes.view(torch.uint8), self.world * rows)  # with rows that fill up the shares
            for share, part in zip(shares, codes.view(self.world, -1), strict=True):
                share.append(part)
        # in the order of shares; each has all weights
        shares = [shares[rank] for rank in sorted(range(self.world), key=self.share_of)]
        part = [(i, 0, size, sum(sizes[:i])) for i, size in enumerate(sizes)]
        own = {i: filled(gradient.unrounded, sizes[i]) for i, gradient in enumerate(bucket.gradients)}
        whole = [sum(sizes)] * self.world
        received, inverse, scales, own = self.collect(shares, whole, scales, [part] * self.world, own)
        last = self.across or self.within
        for i, _, size, place in part:
            gradient, sharding = bucket.gradients[i], bucket.gradients[i].sharding
            if i in missing and scales[i] == torch.inf:
                gradient.nothing_to_add()
                continue
            total = summed(received[:, place : place + size], inverse[:, i].contiguous(), own[i], last.rank)
            shape = sharding.shape  # pyrefly: ignore[missing-attribute]
            mean = total[: shape.numel()].view(shape) / last.world
            if bucket.across is None:
                gradient.add_mean(mean, scales[i])
                continue
            ours = bucket.across_pieces.get(i)
            unrounded = None if ours is None else mean.view(-1)[ours].clone()
            gradient.set_phase(Phase.READY, (mean * scales[i]).bfloat16(), scales[i], unrounded=unrounded)
        if bucket.across is not None and self.replicas is not None:
            self.replicas.reduce(bucket.across, device)
            self.sent += self.replicas.sent
            self.replicas.sent = 0
            for gradient in bucket.gradients:
                if gradient.codes is not None:
                    gradient.add_mean(gradient.value(), gradient.scale)  # pyrefly: ignore[bad-argument-type]
