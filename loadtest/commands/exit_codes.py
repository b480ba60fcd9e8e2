"""How `pdserve bench` commands end.

OK: it is reported, also when it is marked INVALID. NOT_MEASURED: a bad flag, no server, another model; of several
servers or techniques, one that could not be measured although the others were.
NOT_EXACT: a self-test above its limits.
"""

EXIT_OK = 0
EXIT_TOO_MANY_FAILED = 1
EXIT_NOT_EXACT = 1
EXIT_NOT_MEASURED = 2
EXIT_INTERRUPTED = 130
