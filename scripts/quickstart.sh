#!/usr/bin/env bash
# Trains a small model on simple sums, on a CPU, from nothing: ./scripts/quickstart.sh [section.option=value ...]
#
# Makes .venv the first time (see scripts/_venv.sh for PYTHON and JAXRL_VENV), then runs
# `jaxrl train --config configs/quickstart.yaml` with the given overrides. Stopped or repeated, it goes on where it was.
set -euo pipefail

# shellcheck source=scripts/_venv.sh
. "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

case "${1:-}" in
-h | --help)
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

prepare_venv ''

cd "$root"
run_dir=runs/quickstart
for argument in "$@"; do
    case "$argument" in
    trainer.run_dir=*) run_dir=${argument#trainer.run_dir=} ;;
    esac
done
case "$run_dir" in
/* | '~'*) ;;
*) run_dir=$root/$run_dir ;;
esac
say "training into $run_dir; the report will be $run_dir/report.html"

exec "$venv/bin/jaxrl" train --config configs/quickstart.yaml "$@"
