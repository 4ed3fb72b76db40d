"""The machine: its accelerators, its memory and the versions of its packages."""

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CLEAR_REFS = Path("/proc/self/clear_refs")  # "5" resets the peak of the resident size
PACKAGES = ("torchao", "transformer_engine", "deepspeed")  # that a config may need besides torch and Accelerate


def packages() -> list[str]:
    """Which of PACKAGES are installed; TransformerEngine only with its module for torch."""
    installed = [name for name in PACKAGES if importlib.util.find_spec(name)]
    if "transformer_engine" in installed and "transformer_engine_torch" not in sys.modules:
        # pyrefly: ignore[missing-attribute]
        [folder] = map(Path, importlib.util.find_spec("transformer_engine").submodule_search_locations)
        places = folder.parent, folder, folder / "wheel_lib"  # where TransformerEngine looks for it
        if not any(list(place.glob("transformer_engine_torch*.so")) for place in places):
            installed.remove("transformer_engine")
    return installed


def cuda_of_torch() -> str | None:
    """The CUDA version that torch was built for, such as "13.2", or None. Read from a file, without importing torch."""
    # pyrefly: ignore[missing-attribute]
    file = Path(importlib.util.find_spec("torch").origin).with_name("version.py")
    return (re.search(r"^cuda.*= '(.*)'", file.read_text(), re.MULTILINE) or [None, None])[1]


def lacks() -> list[str]:
    """What is missing of what Triton needs to build its launcher, with the first kernel that torch.compile makes for a
    GPU (triton/runtime/build.py, triton/backends/nvidia/driver.c)."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return ([] if compiler else ["C compiler"]) + ([] if header.exists() else ["Python.h"])


@dataclass(frozen=True)
class Machine:
    """What a config can have here."""

    device: str = "cpu"
    devices: int = 0  # accelerators
    name: str = "CPU"  # of an accelerator
    capability: tuple[int, int] | None = None  # NVIDIA's compute capability
    cuda: str | None = None  # for which torch is built
    packages: Sequence[str] = ()  # of PACKAGES
    lacks: Sequence[str] = ()  # see `lacks`
    nvidia: bool = True  # whether its accelerators are NVIDIA's

    @property
    def has_fp8(self) -> bool:
        """Whether its accelerator multiplies in FP8."""
        return self.capability is not None and self.capability >= (8, 9)


def without_accelerator() -> Machine:
    return Machine(packages=packages())


@dataclass(frozen=True)
class Card:
    """A GPU as nvidia-smi lists it."""

    uuid: str
    name: str
    capability: tuple[int, int] | None  # None: the driver does not know it


def of_driver() -> Machine:
    """This machine with its GPUs, from nvidia-smi: importing torch would take seconds."""
    query = ["nvidia-smi", "--query-gpu=uuid,name,compute_cap", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        text = ""
    cards = visible(listed(text), os.environ)
    if not cards:
        return without_accelerator()
    first = cards[0]
    return Machine("cuda", len(cards), first.name, first.capability, cuda_of_torch(), packages(), lacks())


def listed(text: str) -> list[Card]:
    """The cards in the lines that nvidia-smi prints. A line of another form is about a card that is lost."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    cards = []
    for uuid, name, capability in (row for row in rows if len(row) == 3 and row[0].startswith("GPU-")):
        numbers = re.fullmatch(r"(\d+)\.(\d+)", capability)
        cards.append(Card(uuid, name, (int(numbers[1]), int(numbers[2])) if numbers else None))
    return cards


def visible(cards: list[Card], env: Mapping[str, str]) -> list[Card]:
    """The cards that CUDA shows a process, in its order: the fastest first, unless CUDA_DEVICE_ORDER says otherwise.
    CUDA_VISIBLE_DEVICES names them by number, or by the beginning of a UUID; CUDA stops at the first word that names
    none (CUDA Programming Guide, "CUDA Environment Variables"). A part of a card (MIG) counts as one."""
    if env.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST") != "PCI_BUS_ID":
        cards = sorted(cards, key=lambda card: card.capability or (0, 0), reverse=True)
    if (words := env.get("CUDA_VISIBLE_DEVICES")) is None:
        return cards
    chosen: list[Card] = []
    for word in (word.strip() for word in words.split(",")):
        if word.isdecimal():
            found = cards[int(word) : int(word) + 1]
        elif word.startswith("GPU-"):
            found = [card for card in cards if card.uuid.startswith(word)]
        else:
            found = cards[:1] if word.startswith("MIG-") else []
        if len(found) != 1:
            break
        chosen += found
    return chosen


def of_torch() -> Machine:
    """This machine with any accelerator that torch supports."""
    import torch

    if not torch.accelerator.is_available() or (accelerator := torch.accelerator.current_accelerator()) is None:
        return without_accelerator()
    device = accelerator.type
    nvidia = device == "cuda" and torch.version.hip is None  # ROCm's devices are called cuda, too
    capability = torch.cuda.get_device_capability() if nvidia else None
    name = torch.cuda.get_device_name() if device == "cuda" else device
    devices = torch.accelerator.device_count()
    return Machine(device, devices, name, capability, torch.version.cuda, packages(), lacks(), nvidia)


def unseen() -> str | None:
    """Why torch does not see the GPUs that the driver lists, in one line; None if it lists none that is visible."""
    gpus = of_driver()
    if not gpus.devices:
        return None
    import torch

    try:
        torch.cuda.init()
        reason = "it finds no device"
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        reason = str(error).split(". ")[0]
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].strip()
    return (
        f"this machine has {gpus.devices} x {gpus.name}, and torch does not see them: {reason}. The driver "
        f"is {driver}, torch is built {built}: update the driver, or install a torch for a CUDA that it runs. "
        "CUDA_VISIBLE_DEVICES= rehearses on the CPU"
    )


def in_tf32() -> list[str]:
    """In what torch computes fp32 by TF32, with 10 bits of mantissa, on NVIDIA's GPUs from Ampere on."""
    import torch

    # pyrefly: ignore[missing-attribute]
    kinds = {"products": torch.backends.cuda.matmul, "convolutions": torch.backends.cudnn.conv}
    return [what for what, settings in kinds.items() if settings.fp32_precision == "tf32"]


def use_tf32(products: bool, convolutions: bool) -> None:
    """Makes torch compute fp32 by TF32 where this is true, elsewhere by IEEE 754's fp32."""
    import torch

    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions


def device_name(device: str) -> str:
    """The name of the accelerator, or of the CPU and its number of cores."""
    if device != "cpu":
        return of_torch().name
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model or 'CPU'}, {os.cpu_count()} cores"


def versions() -> dict[str, str | None]:
    import torch

    names = "torch accelerate timm transformers datasets torchao transformer-engine deepspeed numpy".split()
    installed = {"python": platform.python_version()}
    for name in names:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return installed | {"cuda": torch.version.cuda}


class Memory:
    """Peak memory in bytes since this object was made: allocated on an accelerator, resident on a CPU.

    On a CPU it is the peak of the resident size minus the resident size at the beginning, before the model was built.
    """

    def __init__(self, device: "torch.device") -> None:
        self.on_cpu = device.type == "cpu"
        self.before, self.note = resident_bytes() if self.on_cpu else 0, None
        if not self.on_cpu:
            import torch

            torch.accelerator.reset_peak_memory_stats()
        else:
            try:
                CLEAR_REFS.write_text("5")
            except OSError as error:  # sandboxes and containers may forbid it
                self.note = (
                    f"{CLEAR_REFS} cannot be written ({error.strerror}): the peak memory may be one of the time before "
                    "the model was built"
                )

    def peak(self) -> int:
        if not self.on_cpu:
            import torch

            return torch.accelerator.max_memory_allocated()
        return max(0, highest_resident_bytes() - self.before)


def highest_resident_bytes() -> int:
    """The peak of this process's resident size, since the last reset. Without one in /proc: the size now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return peaks[0] if peaks else resident_bytes()


def resident_bytes() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def trim_memory() -> None:
    """Gives freed memory back to the machine. The C library keeps what large tensors leave, up to their whole size."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def return_freed_memory() -> None:
    """Makes the C library give every freed block of 256 KiB and more back to the machine. By default it keeps those up
    to 32 MiB, between blocks that are in use, too."""
    if hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(-3, 2**18)  # M_MMAP_THRESHOLD


def gpu_utilization(device: "torch.device") -> int | None:
    """Utilization of this process's GPU in percent, or None if unknown (no GPU, no nvidia-ml-py, MIG, a vGPU)."""
    if device.type != "cuda":
        return None
    import torch

    try:
        return torch.cuda.utilization(device)
    except Exception:  # pynvml's own errors cannot be named here: the package is optional
        return None
