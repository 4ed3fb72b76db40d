"""One device, and DDP: every process holds the whole model."""

from faithful.strategies.base import Strategy


class SingleDevice(Strategy):
    distributed_types = ("NO",)
    replicates = True


class DDP(Strategy):
    distributed_types = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU")
    rehearsed_as = "MULTI_CPU"
    replicates = True
