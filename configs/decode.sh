#!/usr/bin/env bash
# A decode node of a launch by role, on the second half of this machine's cores. A second one needs a name
# and cores of its own: configs/decode.sh --name D1 --cores 6-7
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH="$here/../.venv/bin:$PATH"
exec pdserve decode --config "$here/decode.toml" --cores "$(($(nproc) / 2))-$(($(nproc) - 1))" "$@"
