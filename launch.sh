#!/usr/bin/env bash
# Training recipes for Hugging Face Accelerate, from a clone: finds the Python that runs tools/commands.py, and sets up
# .venv where there is none. ./launch.sh alone lists the commands.
set -euo pipefail
for number in 1 2; do  # if it is closed, the next file that is opened would get what is printed
    [ -e /dev/fd/$number ] || eval "exec $number>/dev/null"
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
here="$root/.venv"

die() { echo "error: $*" >&2; exit 2; }

# Sets $python: the active environment's if it has torch and accelerate, else .venv's, else python3 if it has both.
find_python() {
    local has='import importlib.util as u, sys; sys.exit(not (u.find_spec("torch") and u.find_spec("accelerate")))'
    if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && python -c "$has" 2>/dev/null; then
        python=python
    elif [ -f "$here/.complete" ]; then
        python="$here/bin/python"
    elif python3 -c "$has" 2>/dev/null; then
        python=python3
    else
        return 1
    fi
}

# Runs a command of setup. Says what it does: on a terminal uv has bars; in a log a line every 4 seconds, of its output
# what is no list of packages.
said() {
    local what=$1 begun=$SECONDS ticks="" code=0; shift
    echo "setup: $what" >&2
    if [ -t 2 ]; then VIRTUAL_ENV="$here" "$@"; return; fi
    while sleep 4 >/dev/null 2>&1; do echo "setup: $what, $((SECONDS - begun)) s" >&2; done & ticks=$!
    VIRTUAL_ENV="$here" "$@" 2> >(grep --line-buffered -v '^ [-+~] ' >&2) || code=$?
    kill $ticks; wait $ticks 2>/dev/null || :
    return $code
}

mute() { "$@" >/dev/null 2>&1; }

# Makes .venv. `.complete` is written last and holds what was installed; without it, or if it is old, setup runs again.
setup() {
    local extras=() cpu="" wanted
    while [ $# -gt 0 ]; do
        case $1 in
            --extra) [ $# -gt 1 ] || die "--extra needs a name"; extras+=(--extra "$2"); shift 2 ;;
            --cpu) cpu=" cpu"; shift ;;
            *) die "setup takes --cpu and --extra NAME, not $1" ;;
        esac
    done
    wanted="$(cat "$root/requirements.txt" "$root/pyproject.toml" | cksum) ${extras[*]-}$cpu"
    [ "$(cat "$here/.complete" 2>/dev/null)" = "$wanted" ] && return
    command -v python3 >/dev/null || die "python3 is missing; Python 3.11 or newer is needed"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
        || die "Python 3.11 or newer is needed, python3 is $(python3 -V | cut -d' ' -f2)"
    [ -x "$here/bin/python" ] && "$here/bin/python" -m pip --version >/dev/null 2>&1 || python3 -m venv --clear "$here"
    rm -f "$here/.complete"
    "$here/bin/python" -m uv --version >/dev/null 2>&1 || said "installs uv" "$here/bin/python" -m pip install --quiet uv
    grep -oE '^[a-zA-Z0-9._-]+==[^\\]+' "$root/requirements.txt" > "$here/constraints.txt" || :  # the pins, without hashes
    if [ -n "$cpu" ]; then
        setup_cpu
    else
        said "installs the pinned packages (6 GB, with torch for GPUs; setup --cpu: for CPUs)" \
            "$here/bin/python" -m uv pip install --require-hashes -r "$root/requirements.txt"
    fi
    if [ ${#extras[@]} -gt 0 ]; then
        said "installs ${extras[*]}" "$here/bin/python" -m uv pip install -r "$root/pyproject.toml" "${extras[@]}" \
            --constraints "$here/constraints.txt"
    fi
    echo "$wanted" > "$here/.complete"
    echo "set up: $here"
}

# Installs the pinned versions with torch's builds for CPUs, from the index that is set up here if it has them, else from
# the one that uv knows. requirements.txt has the hashes of the builds for GPUs, so none is checked.
setup_cpu() {
    local pair way
    pair=($(sed -nE 's/^(torch(vision)?==[^ ;]+).*/\1+cpu/p' "$here/constraints.txt"))
    for way in "" "--torch-backend cpu"; do
        said "looks for torch's build for CPUs" mute "$here/bin/python" -m uv pip install --dry-run $way "${pair[@]}" \
            || continue
        said "installs the pinned packages, with torch for CPUs" "$here/bin/python" -m uv pip install $way "${pair[@]}" \
            -r "$root/pyproject.toml" --extra recipes --constraints "$here/constraints.txt"
        return
    done
    die "no index has ${pair[*]}: ./launch.sh setup installs the builds for GPUs, which run on CPUs, too (6 GB)"
}

if [ "${1-}" = setup ]; then
    setup "${@:2}"
else
    find_python || python=python3
    command -v "$python" >/dev/null || die "Python 3.11 or newer is needed, and there is no $python"
    exec "$python" "$root/tools/commands.py" "$@"
fi
