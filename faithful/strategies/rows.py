"""A checkpoint of sharded parameters on another number of processes than saved it."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Rows(Mapping):
    """{place: what this process needs of a checkpoint}, see Strategy.tensors. Of tensors that were sharded by their
    rows it reads its own rows, from the files of the processes that had them.

    parts: the TensorFile of each process that saved. parameters: {name: parameter}, sharded over the processes now.
    """

    def __init__(self, parts, parameters):
        self.parts, self.parameters = parts, parameters

    def __getitem__(self, place):
        kind, _, name = place.partition("/")
        parameter = self.parameters.get(name.rpartition("/")[0] if kind == "optimizer" else name)
        if not isinstance(parameter, DTensor) or not self.parts[0].shape(place):  # whole in each file
            return self.parts[0][place]
        shape, start = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        (first, *_), rows = start, shape[0]
        pieces, begin = [self.parts[0].rows(place, 0, 0)], 0
        for part in self.parts:  # under hsdp the first group has all rows, and the next groups have them again
            end = begin + part.shape(place)[0]
            if begin < first + rows and first < end:
                pieces.append(part.rows(place, max(first - begin, 0), min(first + rows, end) - begin))
            begin = end
            if begin >= first + rows:
                break
        return torch.cat(pieces)

    def __iter__(self):
        return iter(self.parts[0])

    def __len__(self):
        return len(self.parts[0])
