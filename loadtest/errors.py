"""The exceptions of the load test. Each message names the value, the limit and the flag.

    LoadtestError
    ├── OptionError   a flag that cannot be used, found before anything is sent
    ├── TargetError   a server that cannot be tested: unreachable, another model, a refused preflight
    ├── ReportError   a saved run that cannot be read
    └── WorkerError   a client process that died or hangs: the run says nothing

The load test imports nothing else of this project, so that it can judge any server; hence its own tree.
"""


class LoadtestError(Exception):
    pass


class OptionError(LoadtestError):
    pass


class TargetError(LoadtestError):
    pass


class ReportError(LoadtestError):
    pass


class WorkerError(LoadtestError):
    pass
