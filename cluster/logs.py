"""Log lines of a process: plain text on stdout, the time first; `pdserve up` puts the node's name before them."""

import logging
import sys


def start_logging() -> None:
    """Send INFO and above of our own packages, WARNING and above of all others, to stdout."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("pdserve").setLevel(logging.INFO)
