"""How the code is laid out: what a strategy or a backend may define."""

from types import SimpleNamespace

import pytest

from faithful.backends import BACKENDS
from faithful.backends.base import Backend
from faithful.clipping import GradientsElsewhere
from faithful.strategies import STRATEGIES
from faithful.strategies.base import Strategy

PLAN = SimpleNamespace(strategy="fsdp", precision="fp8", level="o2", fp8_options={}, device="cpu")  # for their __init__
INTERFACES = (Strategy, Backend, GradientsElsewhere)
OWN = {  # public names that only a subclass has, and why
    "whole": "FSDP: what `pieces` returns, with its arguments",
    "initialize": "MSAMP: what `convert` or, under FSDP2, `after_prepare` calls",
    "fully_sharded": "MSAMP: of the plan",
    "by_accelerate": "TorchAO: of the plan",
    "gathered_in_fp8": "TorchAO: of the plan",
    "tf32_before": "Torch: what `started` needs of the time before",
}


def subclasses(base):
    return [found for cls in base.__subclasses__() for found in (cls, *subclasses(cls))]


def unknown(cls):
    """The public names that a class defines or its objects have, and that are not of its interface."""
    interface = {"plan"}.union(*(dir(base) for base in cls.__mro__ if base in INTERFACES))
    return {name for name in vars(cls) | vars(cls(PLAN)) if not name.startswith("_")} - interface


def test_no_name_of_a_strategy_or_backend_is_misspelt():
    """A misspelt method would be ignored: the run would call the base's."""
    classes = {cls for cls in subclasses(Strategy) + subclasses(Backend) if cls.__module__.startswith("faithful.")}
    assert classes >= {*STRATEGIES.values(), *(cls for cls, _ in BACKENDS.values())}
    assert set().union(*map(unknown, classes)) == OWN.keys()


def test_a_misspelt_name_is_found():
    class Misspelt(STRATEGIES["zero2"]):
        replicate = True

        def __init__(self, plan):
            super().__init__(plan)
            self.shardedkinds = ()

        def norm_off(self, optimizer):
            return 0

        def clip_grad_norm_(self, accelerator, parameters, max_norm, norm_type):
            return 0

    assert unknown(Misspelt) == {"replicate", "shardedkinds", "norm_off"}


def test_a_backend_without_its_methods_is_not_made():
    class Nameless(Backend):
        pass

    class Unclipped(GradientsElsewhere, STRATEGIES["ddp"]):
        pass

    for cls, missing in ((Nameless, "name"), (Unclipped, "clip_grad_norm_")):
        with pytest.raises(TypeError, match=f"abstract method.* '?{missing}"):
            cls(PLAN)
