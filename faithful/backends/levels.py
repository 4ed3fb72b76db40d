"""MS-AMP's levels O1, O2 and O3, computed by amp8."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate.state import GradientState
from torch import nn

from faithful.backends import imported
from faithful.backends.base import Backend
from faithful.backends.linear import in_bf16, in_fp8, skipped_by_config, unlike_default
from faithful.config.strategies import STRATEGIES, FSDPRules
from faithful.errors import Refused
from faithful.strategies import guard
from faithful.strategies.base import GradientsElsewhere, Saved, Strategy, parameter_ids, torch_optimizer
from faithful.tensors.names import plain_names

if TYPE_CHECKING:
    from amp8 import FP8Linear
    from faithful.plan import Plan


class MSAMP(GradientsElsewhere, Backend):
    kinds = {"amp8.FP8Linear": (1, 0), "amp8.FP8Conv1D": (1, 0)}
    gradients_elsewhere = "MS-AMP's FP8 gradients"
    codes = True

    def __init__(self, plan: "Plan") -> None:
        super().__init__(plan)
        self.in_parts = plan.level == "o3"
        self.fully_sharded = isinstance(STRATEGIES[plan.strategy], FSDPRules)
        self.any_number_of_processes = self.fully_sharded  # all have the same scales, so rows can be sharded again

    @property
    def name(self) -> str:
        options = self.plan.fp8_options
        more = {"te_delayed": " with TE's delayed scaling", "fp4": " with FP4 forward products emulated in bf16"}
        recipe = more.get(str(options.get("recipe")), "") + unlike_default(options)
        return f"MS-AMP {str(self.plan.level).upper()} (amp8, not Microsoft's package){recipe}"

    def arguments(self) -> dict[str, Any]:
        return in_bf16()

    def convert(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, str]]:
        """Converts the layers before DDP wraps the model. Under FSDP2 `after_prepare` converts the shards."""
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise Refused(
                "the script wraps the model in DistributedDataParallel itself: leave that to accelerator.prepare, "
                "which does what the config says"
            )
        if self.plan.level == "o3":  # a parameter's owner sends it as a flat piece
            guard.make_contiguous(model)
        return [] if self.fully_sharded else self.initialize(model, optimizer)

    def initialize(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, str]]:
        """Converts the model. Returns [(name, reason)] of the Linear layers not converted. optimizer: read only."""
        amp8, plan = imported("amp8"), self.plan
        options = dict(plan.fp8_options)
        recipe = {"recipe": options.pop("recipe", "msamp"), "recipe_options": options}
        listed = skipped_by_config(model, plan.skip)

        def skip(name: str, module: nn.Module) -> bool:
            return name in listed

        with refusals():
            if optimizer is not None:  # which keeps a state that the script has loaded until `after_prepare`
                imported("amp8.choice").check_optimizer(optimizer)
            amp8.initialize(model, None, str(plan.level).upper(), skip=skip, **recipe)
        if STRATEGIES[plan.strategy].replicates and torch.distributed.is_initialized():
            refuse_nothing_for_ddp(model)
        for module in model.modules():
            if isinstance(module, amp8.FP8Linear):
                module.register_forward_pre_hook(in_fp8_or_not)
        return [(name, listed.get(name, reason)) for name, reason in plain_names(amp8.report(model)["skipped"])]

    def after_prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, prepared: set[int]
    ) -> list[tuple[str, str]]:
        """Replaces the optimizer inside Accelerate's wrapper by amp8's."""
        its_own = set(map(id, nn.Module.parameters(model)))
        if (parameter_ids(optimizer) - its_own) & prepared:
            raise Refused(
                f"one optimizer updates two models, and MS-AMP's {str(self.plan.level).upper()} needs one for "
                "each: make an optimizer for each, or use a config without a level"
            )
        skipped = self.initialize(model, torch_optimizer(optimizer)) if self.fully_sharded else []
        with refusals():
            # pyrefly: ignore[missing-attribute]
            optimizer.optimizer = imported("amp8").optimizer_of(model, torch_optimizer(optimizer))
        imported("amp8").attach(model, last_micro_batch=last_micro_batch)
        return skipped

    def another_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> NoReturn:
        raise Refused(
            "MS-AMP's levels take one optimizer for a model, the script has several: use one "
            "torch.optim.AdamW with parameter groups"
        )

    def clip_grad_norm_(self, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clips FP8 gradients and `.grad` by one norm, and returns it."""
        return imported("amp8").clip_grad_norm_(parameters, max_norm)

    def norm_of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return imported("amp8").clip_grad_norm_(parameters, math.inf)

    def gradients(self, parameters: dict[str, nn.Parameter]) -> list[torch.Tensor]:
        """The FP8 gradients, which amp8 keeps outside `.grad`."""
        linear_of = imported("amp8.tensors").linear_of
        layers = [layer for layer in map(linear_of, parameters.values()) if layer is not None]
        return [layer.gradient.codes for layer in layers if layer.gradient.codes is not None]

    def levels(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        return imported("amp8").report(model, torch_optimizer(optimizer))

    def tensors(
        self, strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> dict[str, torch.Tensor]:
        """amp8's state: FP8 codes, scales and histories, weights and optimizer state."""
        if not converted(model):
            return super().tensors(strategy, model, optimizer)
        return imported("amp8").exact_state(model, optimizer and torch_optimizer(optimizer))

    def restore(
        self, strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: Saved
    ) -> None:
        if not converted(model):
            return super().restore(strategy, model, optimizer, parts)
        if isinstance(parts, list):  # one per process that saved; under hsdp the first replica has all
            parts = parts[: int(parts[0]["all/world"])]
        try:
            imported("amp8").load_exact_state(model, optimizer and torch_optimizer(optimizer), parts)
        except (KeyError, ValueError) as error:
            raise Refused(f"the checkpoint is of another model: {error}. Build the model as it was") from None


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns amp8's errors into Refused."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise Refused(f"asked for fp8: {error}") from None


def last_micro_batch() -> bool:
    """Whether the next update follows this backward pass."""
    return GradientState._shared_state.get("sync_gradients", True)  # amp8 calls it as long as the model is there


def in_fp8_or_not(module: "FP8Linear", inputs: tuple[Any, ...]) -> None:
    module.high_precision = not in_fp8(module, *inputs)


def refuse_nothing_for_ddp(model: nn.Module) -> None:
    """Raises Refused if all that is trained are converted weights: DDP needs a gradient that it averages itself."""
    ours = set(model._ddp_params_and_buffers_to_ignore)  # pyrefly: ignore[bad-argument-type]
    if all(name in ours for name, parameter in model.named_parameters() if parameter.requires_grad):
        name = sorted(ours)[0].rpartition(".")[0]
        raise Refused(
            "every trainable tensor is the weight of a Linear on a level of MS-AMP, and DDP needs one more: leave "
            f"a layer out (fp8_config: skip: {name}), give one a bias, or use a single config"
        )


def converted(model: nn.Module) -> bool:
    return any(getattr(module, "amp8_state", None) is not None for module in model.modules())
