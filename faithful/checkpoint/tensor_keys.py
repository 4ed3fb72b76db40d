"""The names of tensors in a checkpoint, for whoever writes or reads one. checkpoints.py has the files.

The tensors of prepared model number i, in Accelerate's order, have these names in a rank's file, after `i:`
    model/<name>               a parameter, or what the rank holds of it; under ZeRO its fp32 master
    buffer/<name>              a persistent buffer
    optimizer/<name>/<state>   the optimizer's state of a parameter
    shape/<name>               ZeRO: the shape of the parameter of which model/<name> is a flat fragment
    te/<layer>                 TransformerEngine's scales and histories
    all/..., rows/..., rank/...  what amp8.exact_state returns, in place of the others, under MS-AMP's levels
Beside them are random/<generator> (tensors/random_states.py), and the tensors of JSON values in trainer_state.json
(tensors/serialization.py).
"""

WEIGHT, BUFFER, OPTIMIZER, SHAPE, SCALES = "model", "buffer", "optimizer", "shape", "te"


def weight(name: str) -> str:
    return f"{WEIGHT}/{name}"


def buffer(name: str) -> str:
    return f"{BUFFER}/{name}"


def state(name: str, key: str) -> str:
    """Of the optimizer's state of a parameter."""
    return f"{OPTIMIZER}/{name}/{key}"


def shape(name: str) -> str:
    return f"{SHAPE}/{name}"


def scales(layer: str) -> str:
    return f"{SCALES}/{layer}"


def of_model(index: int) -> str:
    """What the names of a prepared model's tensors begin with."""
    return f"{index}:"


def kind(place: str) -> str:
    """WEIGHT, BUFFER, ...: what a name begins with."""
    return place.partition("/")[0]


def parsed(place: str) -> tuple[str, str, str | None]:
    """(kind, name, key of the optimizer's state or None)"""
    first, _, name = place.partition("/")
    name, _, key = name.rpartition("/") if first == OPTIMIZER else (name, None, None)
    return first, name, key
