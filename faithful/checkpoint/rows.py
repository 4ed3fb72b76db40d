"""A checkpoint of sharded parameters on another number of processes than saved it."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from faithful.checkpoint import tensor_keys
from faithful.disk.tensor_files import TensorFile
from faithful.errors import Refused
from faithful.tensors.names import rows_of

Span = Callable[[str], tuple[int, int, int] | None]  # see Rows


class Rows(Mapping[str, torch.Tensor]):
    """{place: what this process needs of a checkpoint}, see Strategy.tensors. Of tensors that were sharded by their
    rows it reads its own rows, from the files of the processes that had them.

    parts: the TensorFile of each process that saved, in order of their rows; under hsdp those of the first group, which
    holds all rows. span: of a place, the first row that this
    process needs, their number, and that of all rows; None for what each file has whole. Raises Refused if the
    checkpoint has another number of rows.
    """

    def __init__(self, parts: Sequence[TensorFile], span: Span) -> None:
        self.parts, self.span = parts, span

    def __getitem__(self, place: str) -> torch.Tensor:
        if not self.parts[0].shape(place) or (mine := self.span(place)) is None:
            return self.parts[0][place]
        first, rows, whole = mine
        saved = sum(part.shape(place)[0] for part in self.parts)
        if saved != whole:
            raise Refused(f"the checkpoint is of another model: {place} has {saved} rows there, {whole} here")
        pieces, begin = [self.parts[0].rows(place, 0, 0)], 0
        for part in self.parts:
            end = begin + part.shape(place)[0]
            if begin < first + rows and first < end:
                pieces.append(part.rows(place, max(first - begin, 0), min(first + rows, end) - begin))
            begin = end
            if begin >= first + rows:
                break
        return torch.cat(pieces)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts[0])

    def __len__(self) -> int:
        return len(self.parts[0])


def of_dtensors(parameters: Mapping[str, torch.Tensor]) -> Span:
    """The `span` of {name: parameter}, sharded over the processes now."""

    def span(place: str) -> tuple[int, int, int] | None:
        parameter = parameters.get(tensor_keys.parsed(place)[1])
        if not isinstance(parameter, DTensor):
            return None
        return *rows_of(parameter), parameter.shape[0]

    return span


def of_fragments(lengths: Sequence[Mapping[str, int]], rank: int) -> Span:
    """The `span` of parameters, and of their optimizer state, of which each process has a flat fragment, in order of
    the ranks. lengths: {name: elements} of each rank."""

    def span(place: str) -> tuple[int, int, int] | None:
        kind, name, _ = tensor_keys.parsed(place)
        if kind not in (tensor_keys.WEIGHT, tensor_keys.OPTIMIZER) or name not in lengths[rank]:
            return None
        each = [held[name] for held in lengths]
        return sum(each[:rank]), each[rank], sum(each)

    return span
