"""Files of tensors in the safetensors format, hashed while they are written, and read tensor by tensor.

The safetensors package writes a file in one call, after which its hash would need a second reading. The format is a
header in JSON and the tensors' bytes (github.com/huggingface/safetensors, README: Format).
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from faithful.disk import readers
from faithful.disk.names import opened, printable
from faithful.errors import Refused

PIECE = 1 << 24  # bytes that are written and hashed at once
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.complex64: "C64",
}  # fmt: skip


def can_hold(tensor: torch.Tensor) -> bool:
    """Whether safetensors has its layout and dtype."""
    return tensor.layout == torch.strided and tensor.dtype in NAMES


def in_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names in the order in which `write` writes the tensors: so that each begins aligned to its elements."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def write(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    load: Callable[[str], torch.Tensor] | None = None,
    metadata: dict[str, str] | None = None,
) -> dict[str, int | str]:
    """Writes {name: tensor} to a file, on the disk when this returns. Returns {"bytes", "xxh3_128"} of the file. Those
    on a device are copied to the host one by one. load: returns the tensor of a name when its turn comes, where
    `tensors` have shapes and dtypes only. metadata: {name: text}. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in in_order(tensors):
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {"dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape),
                        "data_offsets": [begin, end]}  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    hashed = xxhash.xxh3_128()
    with open(path, "wb", buffering=0) as file:
        for piece in pieces(text, map(load or tensors.__getitem__, in_order(tensors))):
            hashed.update(piece)
            rest = memoryview(piece)
            while len(rest):
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + end, "xxh3_128": hashed.hexdigest()}


def pieces(header: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(values), PIECE):
            yield values[begin : begin + PIECE]


def dtypes(file: "TensorFile", prefix: str) -> dict[str, str]:
    """{name: dtype} of the tensors of a TensorFile whose names begin with `prefix`/, without reading them."""
    kinds = {NAMES[dtype]: str(dtype) for dtype in NAMES}
    found = {name: file.file.get_slice(file.names[name]).get_dtype() for name in file if name.startswith(f"{prefix}/")}
    return {name: kinds.get(kind, kind) for name, kind in found.items()}


def check_header(path: Path | str) -> None:
    """Raises OSError for what is no regular file, which would be waited for, and for a header that is too large."""
    with os.fdopen(opened(path), "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        largest, most = readers.CHECKPOINT
        if size > largest:
            raise OSError(f"its header is larger than {largest >> 20} MiB")
        if readers.values_in(file.read(size)) > most:
            raise OSError(f"its header holds more than {most:,} values")


class TensorFile(Mapping[str, torch.Tensor]):
    """The tensors of a file whose names begin with `prefix`, {name without it: tensor}. A tensor is read when it is
    asked for, and may be a view of the file: copy what is to be kept. Raises Refused if the file cannot be read."""

    def __init__(self, path: Path | str, prefix: str = "") -> None:
        try:
            check_header(path)
            self.file = safe_open(path, "pt")
        except (OSError, RuntimeError, SafetensorError) as error:  # torch, which maps the file, raises RuntimeError
            why = printable(str(error)[:200])
            raise Refused(f"{path} cannot be read as safetensors ({why}): take another checkpoint") from None
        self.names = {name.removeprefix(prefix): name for name in self.file.keys() if name.startswith(prefix)}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.file.get_tensor(self.names[name])

    def shape(self, name: str) -> list[int]:
        return self.file.get_slice(self.names[name]).get_shape()

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Reads these rows of a tensor alone."""
        return self.file.get_slice(self.names[name])[first:last]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names
