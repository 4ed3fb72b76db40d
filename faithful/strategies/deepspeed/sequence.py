"""ZeRO-3 with DeepSpeed's Ulysses: the processes of a group compute one batch, each a slice of its sequences.

For attention they exchange slices for heads (arXiv:2309.14509, arXiv:2506.13996), so that a process attends over whole
sequences in its part of the heads. Accelerate's loader for it lets each process read a batch, and gives them to the
group one by one: it cannot be resumed within an epoch, and slices batches of an evaluation, where its attention does
not exchange. Here a group reads the same batch, as in tensor parallel, and slices it while the model trains.

Gradients are averaged over all processes. So a loss is the mean over the processes of what each computes, or the same
on all of a group, put together by torch's all_gather, whose gradient is the sum over the group (transformers' Trainer).
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.state import AcceleratorState
from accelerate.utils import send_to_device
from torch import nn

from faithful import patches
from faithful.errors import Refused
from faithful.strategies.base import Engine, Session
from faithful.strategies.deepspeed.engine import zero_of
from faithful.strategies.deepspeed.zero import ZeRO

if TYPE_CHECKING:
    from faithful.plan import Plan

ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
ATTENTION = "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS"  # a row of patches.py


class SequenceParallel(ZeRO):
    def __init__(self, plan: "Plan") -> None:
        super().__init__(plan)
        self._trained: weakref.ref[nn.Module] | None = None  # the one that trains
        self._checked = False  # the first mask of the script

    def started(self, session: Session) -> None:
        super().started(session)
        import accelerate.accelerator as theirs
        import deepspeed.runtime.sequence_parallel.ulysses_sp  # noqa: F401  patches needs it imported

        size, prepare, skip = self.plan.sp_size, theirs.prepare_data_loader, theirs.skip_first_batches

        def prepared(loader: Any, device: torch.device, num_processes: int, process_index: int, **more: Any) -> Any:
            groups, group = num_processes // size, process_index // size
            return sent_later(prepare(loader, device, num_processes=groups, process_index=group, **more))

        def skipped(loader: Any, num_batches: int = 0) -> Any:
            left = sent_later(skip(loader, num_batches), getattr(loader, "sends_to", None))
            left.trains = getattr(loader, "trains", False)
            return left

        patches.replace("accelerate.accelerator:prepare_data_loader", prepared)
        patches.replace("accelerate.accelerator:skip_first_batches", skipped)
        patches.replace("accelerate.data_loader:DataLoaderShard.__iter__", self._slices_of(DataLoaderShard.__iter__))
        patches.replace(f"{ULYSSES}:UlyssesSPDataLoaderAdapter", lambda loader, **_: loader)
        if "transformers.trainer" in sys.modules:
            values = sys.modules["transformers.trainer"].Trainer.set_initial_training_values
            patches.replace("transformers.trainer:Trainer.set_initial_training_values", steps_of_groups(values))
        register = classmethod(lambda cls, model_name_or_path, **_: exchange_heads(model_name_or_path, size))
        patches.replace(f"{ULYSSES}:UlyssesSPAttentionHF.register_with_transformers", register)

    def before_prepare(self, session: Session, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        check(model, self.plan.sp_size)
        used = cast(Any, model).config.get_text_config()._attn_implementation
        said = cast(Any, AcceleratorState().parallelism_config).sp_handler.sp_attn_implementation
        if said not in (used, "sdpa"):  # which the launcher says where the file says nothing
            session.note(f"parallelism_config_sp_attn_implementation {said}: not read, this model is built with {used}")
        super().before_prepare(session, model, optimizer)

    def after_prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
        engine = super().after_prepare(model, optimizer)
        inner: Any = model.module
        self._trained = weakref.ref(inner)
        inner.register_forward_pre_hook(self._place, prepend=True, with_kwargs=True)  # DeepSpeed's make copies
        # DeepSpeed would add up the gradients of a group, but in stage 3's usual way of reducing, which averages.
        zero_of(optimizer).sequence_parallel_size = 1  # pyrefly: ignore[missing-attribute]
        return engine

    def how_sharded(self, model: nn.Module, record: dict[str, Any]) -> str:
        return f"{super().how_sharded(model, record)}, sequences in {self.plan.sp_size} slices"

    def explain(self, error: str) -> Refused | None:
        if error == "'labels'":
            return Refused(
                "under zero3_sp a batch has labels that are the tokens as shift_labels, as in Accelerate: call "
                "model(**batch), or use zero3_bf16"
            )
        return super().explain(error)

    def refuse_metrics(self) -> None:
        if self._training():
            raise Refused(
                "gather_for_metrics while the model trains, of which each process has a slice of a batch: call it in "
                "model.eval(), where batches are whole, or accelerator.gather"
            )

    def _training(self) -> bool:
        model = self._trained() if self._trained else None
        return model is not None and model.training

    def _slices_of(self, iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        """A loader's __iter__, which slices its batches on the host and sends the slice, if the model trains on them.
        Once it does they are slices: transformers' Trainer fetches the next one after an evaluation in eval()."""
        size = self.plan.sp_size

        def batches(loader: Any) -> Iterator[Any]:
            for batch in iterate(loader):
                loader.trains = getattr(loader, "trains", False) or self._training()
                moved = part = slice_of(batch, dist.get_rank() % size, size) if loader.trains else batch
                if device := getattr(loader, "sends_to", None):
                    moved = send_to_device(part, device, non_blocking=loader._non_blocking)
                for name in part if loader.trains else ():
                    if torch.is_tensor(part[name]):
                        vars(moved[name]).update(vars(part[name]))
                yield moved

        return batches

    def _place(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook of the model: it gets slices of the loader's, and the positions of their tokens. Its own loss is then
        the part of its slice of the mean over a batch's labels, times the processes of a group."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not model.training:
            if torch.is_grad_enabled() or hasattr(ids, "packed"):
                raise Refused(
                    "under zero3_sp batches are slices in model.train(), and whole in model.eval(): compute gradients "
                    "in train(), and evaluate with a loader of its own"
                )
            return None
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        given = [ids, *(each for each in (positions, mask) if each is not None and each.dim() == 2)]
        if not all(hasattr(each, "packed") for each in given):
            raise Refused(
                "under zero3_sp a process has a slice of each sequence, and the script computes its input_ids, "
                "position_ids or attention_mask from it: hand on those of the batch as they are, or use zero3_bf16"
            )
        if positions is None:
            length, first = ids.shape[1], dist.get_rank() % self.plan.sp_size * ids.shape[1]
            positions = torch.arange(first, first + length, device=ids.device).repeat(len(ids), 1)
            positions.packed = False  # pyrefly: ignore[missing-attribute]
        if mask is not None and mask.dim() == 4 and not self._checked:
            self._checked = True
            if not (mask if mask.dtype == torch.bool else mask == 0).equal(mask_of(positions).expand_as(mask)):
                raise Refused(
                    "the script's attention mask is not what the positions say (causal, and a sequence begins where "
                    "its position is 0), which is all that Ulysses' attention knows: use zero3_bf16"
                )
        labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
        if labels is not None and shifted is None:
            raise Refused(
                "the model would shift labels within its slice of each sequence: call model(**batch), or compute the "
                "loss from its logits and the batch's labels or shift_labels"
            )
        if labels is None and hasattr(shifted, "share"):  # model(**batch)
            kwargs = kwargs | {"labels": shifted, "num_items_in_batch": shifted.share}
        return args, kwargs | {"position_ids": positions}


def sent_later(loader: Any, device: torch.device | None = None) -> Any:
    """A prepared loader, whose batches are sliced before they are sent to its device. device: if it has none."""
    if isinstance(loader, DataLoaderDispatcher):
        raise Refused(
            "dispatch_batches gives each process samples of its own, but under zero3_sp a group computes one batch: "
            "leave it out, or use zero3_bf16"
        )
    if isinstance(loader, DataLoaderShard):
        # pyrefly: ignore[missing-attribute]
        loader.sends_to, loader.device = loader.device or device, None
    return loader


def steps_of_groups(values: Callable[..., Any]) -> Callable[..., Any]:
    """Trainer's set_initial_training_values, `values`, which takes the steps of an epoch from the loader's length."""

    def of_groups(trainer: Any, args: Any, loader: Any) -> Any:
        total = trainer.get_total_train_batch_size(args)
        trainer.get_sp_size, trainer.get_total_train_batch_size = lambda: 1, lambda args: total
        try:
            return values(trainer, args, loader)
        finally:
            del trainer.get_sp_size, trainer.get_total_train_batch_size

    return of_groups


def mask_of(positions: torch.Tensor) -> torch.Tensor:
    """(rows, 1, tokens, tokens): which earlier tokens a token sees. A sequence begins where its position is 0."""
    sequence = (positions == 0).cumsum(-1)
    return (sequence[:, :, None] == sequence[:, None, :]).tril()[:, None]


def slice_of(batch: Any, rank: int, size: int) -> dict[str, Any]:
    """The part of a batch that one process of a group computes. Sequences are filled up to a multiple of `size`. Labels
    that are the tokens themselves become `shift_labels`, as in Accelerate: those of the next tokens stay `labels`."""
    if not hasattr(batch, "keys") or not {"input_ids", "labels"} <= batch.keys():
        raise Refused("zero3_sp slices batches that are dicts with input_ids and labels: make the loader return them")
    ids, labels, rest = batch["input_ids"], batch["labels"], dict(batch)
    counts, length = labels >= 0, ids.shape[1]
    next_ones, same = ((labels[:, :-1] == ids[:, 1:]) | ~counts[:, :-1]).all(), ((labels == ids) | ~counts).all()
    if same:
        rest["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=-100)
    if not next_ones:
        del rest["labels"]
        if not same:
            raise Refused("the labels are neither the tokens nor the next tokens of input_ids: use zero3_bf16")
    mask = batch.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or (mask[:, 1:] > mask[:, :-1]).any()):
        raise Refused("attention_mask hides tokens before others, which Ulysses does not: pad on the right")
    fill = -length % size
    rest.setdefault("position_ids", torch.arange(length).expand(len(ids), -1))
    packed = bool(((rest["position_ids"] == 0).sum(1) > 1).any())
    for name, value in rest.items():
        if not torch.is_tensor(value) or value.dim() < 2:
            continue
        if value.shape[1] != length:
            raise Refused(f"{name} is {list(value.shape)}, input_ids {list(ids.shape)}: zero3_sp cannot slice it")
        tail = value.new_full((len(value), fill, *value.shape[2:]), -100 if "labels" in name else 0)
        if name == "position_ids" and fill:
            tail = value[:, -1:] + torch.arange(1, fill + 1)
        part = torch.cat([value, tail], 1).chunk(size, 1)[rank].contiguous()
        rest[name] = part.pin_memory() if value.is_pinned() else part
    for value in filter(torch.is_tensor, rest.values()):
        cast(Any, value).packed = packed  # and so known as part of a slice
    if same:
        cast(Any, rest["shift_labels"]).share = (counts[:, 1:].sum() / size).item()
    return rest


def check(model: Any, size: int) -> None:
    """Raises Refused unless the model is one whose attention can exchange slices for heads over `size` processes."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(inner).__name__
    if not name.endswith("ForCausalLM") or any(getattr(m, "is_causal", True) is False for m in inner.modules()):
        raise Refused(f"{name} is no ...ForCausalLM of transformers: use recipes/gpt.py, or zero3_bf16")
    config = inner.config.get_text_config()
    others = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
    others |= {"a sliding window"} if getattr(config, "sliding_window", None) else set()
    others |= {"eager attention"} if config._attn_implementation == "eager" else set()
    if others:
        raise Refused(f"{name} has {', '.join(others)}, and zero3_sp full attention by sdpa or flash: use zero3_bf16")
    heads = config.num_attention_heads
    pairs = getattr(config, "num_key_value_heads", heads)
    if heads % size or pairs % size:
        raise Refused(
            f"{name} has {heads} attention heads and {pairs} of keys and values, which {size} processes do not share "
            "evenly: another model, or another parallelism_config_sp_size"
        )


def exchange_heads(model: Any, size: int) -> Any:
    """Puts Ulysses into the attention of this model while it trains. Returns the groups as DeepSpeed wants them."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as groups
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if groups._SEQUENCE_PARALLEL_GROUP is None:
        groups.initialize_sequence_parallel(size)
    config = model.config.get_text_config()
    kind, name, heads = type(model).__name__, config._attn_implementation, config.num_attention_heads
    inside = ALL_ATTENTION_FUNCTIONS[name]
    usual: Callable[..., Any] = getattr(inside, "usual", inside)
    mine, state = weakref.WeakSet(model.modules()), SimpleNamespace(packed=False)

    def by_positions(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        if state.packed and "flash" not in name:  # which finds the sequences itself
            mask = mask_of(more["position_ids"])
        return usual(module, q, k, v, mask, **more)

    ulysses = UlyssesSPAttentionHF(
        by_positions, 1, heads, getattr(config, "head_dim", None) or config.hidden_size // heads,
        getattr(config, "num_key_value_heads", heads), config.num_hidden_layers, groups.get_sequence_parallel_group(),
        seq_length_is_variable=True,
    )  # fmt: skip

    def attention(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        if module not in mine or not module.training:
            return usual(module, query, key, value, mask, **more)
        if "position_ids" not in more:
            raise Refused(f"{kind} hands no position_ids to its attention: use zero3_bf16")
        ulysses.batch_size = len(query)
        for shape in ("required_query_shape", "required_key_value_shape", "required_context_shape"):
            first, _, *rest = getattr(ulysses, shape)
            setattr(ulysses, shape, torch.Size([first, len(query), *rest]))
        state.packed = getattr(more["position_ids"], "packed", True)
        return ulysses(module, query, key, value, None, **more)

    attention.usual = usual  # pyrefly: ignore[missing-attribute]
    patches.undo_with(ATTENTION, lambda: ALL_ATTENTION_FUNCTIONS.__setitem__(name, usual))
    ALL_ATTENTION_FUNCTIONS[name] = attention
    return groups
