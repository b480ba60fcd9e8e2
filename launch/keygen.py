"""`pdserve keygen`: new keys for a cluster, in a file that only its owner can read."""

from pathlib import Path

from pdserve.cluster.keys import key_file_text
from pdserve.cluster.port import make_key_pair
from pdserve.cluster.private_file import write_private
from pdserve.launch.arguments import make_parser

DESCRIPTION = """\
Make a key pair for a cluster. Copy the file to every machine of it, mode 0600, and give each process
--key-file FILE: all TCP links between them are then encrypted, and strangers are not let in."""


def main(line: list[str]) -> int:
    """Write the file. Raises ConfigError when it exists or cannot be written."""
    parser = make_parser("pdserve keygen", DESCRIPTION, "pdserve keygen FILE")
    parser.add_argument("file", metavar="FILE", help="where the keys go; never overwritten")
    path = Path(parser.parse_line(line).file)
    write_private(path, key_file_text(*make_key_pair()))
    print(f"wrote {path}")
    return 0
