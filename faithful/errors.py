"""Errors that end a run. Each is printed as one line, without a traceback."""

import os
import re
from collections.abc import Mapping

# torch's errors where tensors in fp32 and in 16 bit meet
TWO_DTYPES = (
    "have the same dtype|expected dtype .* for `(end|weight)`|Input type .* should be the same|mixed dtype|"
    "expected scalar type|unsupported ScalarType"
)


class Refused(Exception):
    """Config, script and machine do not fit together. The message says what was asked, what is there, what to do."""

    exit_code = 2


class Diverged(Refused):
    """The loss or the gradient is not finite."""

    exit_code = 1


class NotSaved(Refused, OSError):
    """A file could not be written. A script may catch it as the OSError that Accelerate would raise."""

    exit_code = 1


class Alone(Refused):
    """Another process of this run is missing. Unlike other errors, every process prints this one."""

    exit_code = 1
    of_one_process = True


class Different(Refused):
    """The processes of a run were started differently. Printed once on each machine."""

    of_each_machine = True


class OutOfSharedMemory(Refused):
    """Data loaders' workers hand over batches in shared memory, and it is full, for the process that prints this."""

    of_one_process = True

    def __init__(self, said: str = "No space left on device") -> None:
        super().__init__(
            f"/dev/shm is too small for the batches of the data loaders' workers ({said}): make it bigger (docker run "
            "--shm-size 8g; an emptyDir of medium Memory in Kubernetes), or use fewer or no workers "
            "(--dataloader_num_workers 0)"
        )


class Gone(Refused):
    """The working folder was removed."""

    def __init__(self) -> None:
        super().__init__("the working folder was removed: go into one that is there, and start again")


def explained(error: str, texts: Mapping[str, str], **words: str) -> Refused | None:
    """A Refused with the text of the first pattern that a library's error has, or None. In braces a text may name the
    `error`, its `first` words, what the pattern has `found` as a group, and the `words`."""
    for pattern, text in texts.items():
        if match := re.search(pattern, error):
            found = next(filter(None, match.groups()), "")
            return Refused(text.format(error=error, first=re.split(r":|\. ", error)[0], found=found, **words))
    return None


def working_folder_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


class NoValues(Refused):
    """The script uses weights that only process 0 has, so only the others print this."""

    of_one_process = True


class SkippedAlone(Refused):
    """This process skips a forward and backward pass in which others wait for it."""

    of_one_process = True


class Stopped(SystemExit):
    """Ends a run after SIGTERM, when its checkpoint is written. Exits with 143, as SIGTERM itself would. After Ctrl-C
    the run raises KeyboardInterrupt instead, which scripts may catch."""

    def __init__(self) -> None:
        super().__init__(143)
