#!/usr/bin/env bash
# A prefill node of a launch by role, on the first half of this machine's cores. A second one needs a name
# and cores of its own: configs/prefill.sh --name P1 --cores 2-3
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH="$here/../.venv/bin:$PATH"
half=$(($(nproc) / 2))
exec pdserve prefill --config "$here/prefill.toml" --cores "0-$((half > 0 ? half - 1 : 0))" "$@"
