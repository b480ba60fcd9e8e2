#!/usr/bin/env bash
# The router of a launch by role. Start router.sh, prefill.sh and decode.sh in any order, each in a terminal
# of its own; options are passed on, for example: configs/router.sh --port 9000
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH="$here/../.venv/bin:$PATH"
exec pdserve router --config "$here/router.toml" "$@"
