#!/usr/bin/env bash
# Runs every check, in an environment of its own: ./scripts/test.sh [arguments for pytest, e.g. --slow]
#
# ruff check, ruff format --check, pyright, pytest; the first that fails ends it, with its exit status. Makes .venv the
# first time (see scripts/_venv.sh for PYTHON and JAXRL_VENV).
#
# Environment: JAXRL_TEST_PROCESSES  processes that share the tests; by default one more than there are cores, because
#              some tests wait, and four at the most (each may take 3 GB); 0: pytest's own alone, for -s and --pdb
#              JAXRL_TEST_JETSTREAM  1: after all others, tests of `jaxrl serve --jetstream` as well, in an environment
#              with google-jetstream (2 GB more)
#              JAXRL_TEST_UNTIL_S  seconds after the start: until then, but for 12 minutes at most, tests marked slow come
#              after all others, the oldest results first
set -euo pipefail

# shellcheck source=scripts/_venv.sh
. "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

# stage NAME COMMAND...
stage() {
    local name=$1 code=0 started=$SECONDS
    shift
    printf '== %s\n' "$name"
    "$@" || code=$?
    if [ "$code" -ne 0 ]; then
        say "test.sh: $name failed (exit status $code)"
        exit "$code"
    fi
    printf '== %s: passed in %d s\n\n' "$name" "$((SECONDS - started))"
}

prepare_venv dev
prepare_compilers
cd "$root"

# The tests spread arrays over eight virtual devices, each with threads of its own: numpy's are best left at one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
# Images often set this. Hundreds of processes that tests start would each compile all that they import.
unset PYTHONDONTWRITEBYTECODE
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1

stage 'ruff check' "$venv_python" -m ruff check .
stage 'ruff format' "$venv_python" -m ruff format --check .
stage 'pyright' "$venv_python" -m pyright --pythonpath "$venv_python"
cores=$(getconf _NPROCESSORS_ONLN) # nproc would count OMP_NUM_THREADS
processes=${JAXRL_TEST_PROCESSES:-$((cores < 3 ? cores + 1 : 4))}
# work stealing: the longest tests come last, and one process would be left with all of them
stage 'pytest' "$venv_python" -m pytest --budget --numprocesses "$processes" --dist worksteal "$@"

if [ "${JAXRL_TEST_JETSTREAM:-}" = 1 ] && prepare_jetstream; then
    stage 'pytest (JetStream)' "$venv/jetstream/bin/python" -m pytest --slow tests/rollout/test_jetstream.py \
        tests/commands/test_serve_jetstream.py
fi

if [ -n "${JAXRL_TEST_UNTIL_S:-}" ]; then
    left=$((JAXRL_TEST_UNTIL_S - SECONDS))
    # one file after the other, not each process a half: those with the oldest results come first
    stage 'pytest (slow)' "$venv_python" -m pytest --slow -m slow --within="$((left < 720 ? left : 720))" \
        --numprocesses "$((cores < 4 ? cores : 4))" --dist loadfile --no-loadscope-reorder
fi
