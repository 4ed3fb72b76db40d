"""The errors of a run that cannot go on. Each is printed as one line, without a traceback."""


class Refused(Exception):
    """The config, the script and the machine do not fit: what was asked, what is there, what to do."""

    exit_code = 2


class Diverged(Refused):
    """The loss or the gradient is not finite."""

    exit_code = 1


class Alone(Refused):
    """Another process of this run did not come. Every process that did come says so."""

    exit_code = 1
    of_one_process = True


class Stopped(SystemExit):
    """SIGTERM came, all processes agreed, and a checkpoint was written. Exits with 143, as SIGTERM itself would.
    After Ctrl-C it is a KeyboardInterrupt, which scripts may catch."""

    def __init__(self):
        super().__init__(143)
