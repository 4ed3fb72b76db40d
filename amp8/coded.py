"""The weight of a converted layer, as other code sees it: a parameter that returns values instead of codes.

Code that knows nothing of amp8 reads parameters, for an average of weights, a norm or a histogram. It gets the true
values. A loss that is computed from such a weight directly, without its layer, could not train it; its backward pass
raises CodesRead.
"""

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

# Methods and properties that describe a tensor and do not read its values.
ABOUT = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "data_ptr",
    "untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "is_pinned", "is_shared", "get_device",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "__hash__", "__len__", "is_same_size",
    "has_names", "retain_grad",
}  # fmt: skip
VIEWS = {"T", "H", "mT", "mH", "real", "imag"}  # properties that are values
ALIASES = {"data", "detach", "alias"}  # the same memory under another name


class CodesRead(RuntimeError):
    exit_code = 2  # a user's mistake; the message says what to do


class CodedWeight(nn.Parameter):
    """A Parameter of codes, [out, in], fp16 or e4m3. `amp8_linear`: its layer, which has the scale."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = function.__self__.__name__
            setting = function.__name__ != "__get__"
            raw = name not in VIEWS and not (setting and name == "data")
        else:
            setting, raw = False, name in ABOUT
        if raw and name not in ALIASES:
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **kwargs)
                if name.startswith("requires_grad") and args[0] is args[0].amp8_linear.weight:  # no alias, as `.data`
                    args[0].amp8_linear.trained = args[0].requires_grad
                return result
        first = args[0] if args else None
        if name in ALIASES and not setting:
            return alias_of(first)
        changed = first if isinstance(first, list | tuple) else [first, *tree_leaves(kwargs.get("out"))]
        if setting or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or "out" in kwargs:
            coded = [one for one in changed if isinstance(one, cls)]
            if coded and name == "copy_":
                return overwrite(first, args[1])
            if coded:
                raise CodesRead(f"{where(coded[0])} holds MS-AMP's codes: it can't be changed by {name}. Load values "
                                "with load_state_dict, or leave the layer out (skip)")  # fmt: skip
        args, kwargs = tree_map(value_of, (args, kwargs))
        return function(*args, **kwargs)

    def __deepcopy__(self, memo):
        copied = memo[id(self)] = nn.Parameter(alias_of(self).amp8_linear.true_weight(), self.requires_grad)
        return copied

    def __repr__(self):
        return f"{where(self)}: MS-AMP's codes for {value_of(alias_of(self))}"


def codes_of(weight):
    """The tensor of codes itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.data


def alias_of(weight):
    alias = torch.Tensor._make_subclass(CodedWeight, codes_of(weight), False)
    alias.amp8_linear = weight.amp8_linear
    return alias


def value_of(x):
    if not isinstance(x, CodedWeight):
        return x
    value = x.amp8_linear.true_weight()
    if x.requires_grad and torch.is_grad_enabled():

        def refuse(gradient):
            raise CodesRead(f"{name} was used without calling its layer, which would not train it: leave the layer out "
                            f"(skip={name.rpartition('.')[0]!r}), or read it under torch.no_grad()")  # fmt: skip

        name = where(x)
        value.requires_grad_().register_hook(refuse)
    return value


def overwrite(weight, value):
    """`weight.copy_(value)`: as load_state_dict does it. Under O3 every rank must call it, with the same value."""
    weight.amp8_linear.replace(value_of(value))
    return weight


def where(weight):
    return f"{weight.amp8_linear.name}.weight".lstrip(".")
