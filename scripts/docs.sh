#!/usr/bin/env bash
# Builds the documentation site into site/, from docs/ and the docstrings: ./scripts/docs.sh [arguments of sphinx-build]
#
# Open site/index.html afterwards. A warning ends it with an error. Makes .venv the first time (see scripts/_venv.sh for
# PYTHON and JAXRL_VENV).
set -euo pipefail

# shellcheck source=scripts/_venv.sh
. "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

case "${1:-}" in
-h | --help)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

prepare_venv docs
cd "$root"
"$venv_python" -m sphinx -b html --fail-on-warning --keep-going --quiet --doctree-dir site/.doctrees "$@" docs site
say "the site is $root/site/index.html"
