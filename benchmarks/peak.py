"""How much memory of its own a process takes in a part of a program."""

import threading
import time
from pathlib import Path


def own_memory():
    """RssAnon of this process, in bytes: memory of its own, without the pages of files that it has mapped."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


class Peak:
    """`most` is the largest `own_memory` inside a `with`, over that at its begin, in bytes."""

    def __enter__(self):
        self.begin, self.most, self.on = own_memory(), 0, True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.on = False
        self.thread.join()

    def watch(self):
        while self.on:
            self.most = max(self.most, own_memory() - self.begin)
            time.sleep(0.005)
