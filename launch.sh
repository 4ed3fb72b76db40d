#!/usr/bin/env bash
# Training recipes for Hugging Face Accelerate: change the config file, not the code.
#
#   ./launch.sh demo                       set up if need be, then train a vision transformer in two processes
#   ./launch.sh setup [--cpu] [--extra NAME]...
#                                          make .venv with the pinned dependencies (extras: photos, dev, trackers, ...);
#                                          --cpu: torch's build for CPUs, without CUDA's libraries
#   ./launch.sh CONFIG [launch options] RECIPE [recipe options]
#                                          e.g. ./launch.sh fsdp_bf16 --num_processes 4 vit --max_steps 100
#   ./launch.sh CONFIG [launch options] SCRIPT.py [its options]   or   -m MODULE [its options]
#                                          your own Accelerate script, unchanged; --config_wins: over its arguments
#   ./launch.sh check [CONFIG...]          every problem of every config file, without launching
#   ./launch.sh advise [--memory 80GB] [--devices 8] -- RECIPE [recipe options]
#                                          which config: what fits, what it costs, what is known of its loss
#   ./launch.sh compare CONFIG... -- RECIPE [recipe options]
#                                          the same training under each, over seeds, judged in pairs, as one HTML page
#   ./launch.sh diagnose CONFIG -- RECIPE [recipe options]
#                                          where FP8 hurts: each layer, and what it costs the loss
#   ./launch.sh estimate [CONFIG...] -- RECIPE [recipe options]
#                                          memory per process before anything is trained, and what fits;
#                                          --time H100: how long a step would take there, and where FP8 is slower
#   ./launch.sh show RUN_FOLDER [--html]   a run as a short table: results, memory, what was proved; or as a page
#   ./launch.sh export RUN_FOLDER          the trained weights as plain fp32 safetensors, from any run or checkpoint
#   ./launch.sh predict RUN_FOLDER [files] the class of each image, or with --prompt how a text goes on
#   ./launch.sh copy RECIPE CONFIG DEST    a recipe with its data, models and config in a folder of its own
#   ./launch.sh gpu-report                 what every config does on this machine's GPUs, as one page to send
#   ./launch.sh gpu-first                  the first ten minutes on a GPU: what tells most first, as one page to send
#   ./launch.sh CONFIG RECIPE --help       the options of a recipe
#   ./launch.sh ls                         the configs and recipes there are
#   ./launch.sh completion                 completion for bash and zsh: source <(./launch.sh completion)
#   ./launch.sh --version                  the version of this repository
#   ./launch.sh test [pytest options]      the test suite
set -euo pipefail
for number in 1 2; do  # if it is closed, the next file that is opened would get what is printed
    [ -e /dev/fd/$number ] || eval "exec $number>/dev/null"
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a restarted worker gets the addresses of dead workers
# Seconds from SIGTERM until torch's launcher kills its workers. In its 30 they could not save a model of some gigabytes.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
here="$root/.venv"

help() { sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$root/launch.sh"; }
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
    grep -oE '^[a-zA-Z0-9._-]+==[^\\]+' "$root/requirements.txt" > "$here/constraints.txt"  # the pins, without hashes
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

# Suggests similar names, lists configs and recipes, prints a recipe's options. Any Python 3 will do, before setup.
find_name() { find_python || python=python3; exec "$python" "$root/tools/find.py" "$@"; }

need_python() { find_python || { setup; find_python; }; }

# Prints completion for bash and zsh: commands and configs for the first word, then each command's arguments and options,
# folders and files.
completion() {
    local commands
    find_python || python=python3
    commands=$(help | sed -n 's/^  \.\/launch.sh \([a-z][a-z-]*\).*/\1/p' | tr '\n' ' ')
    cat <<EOF
if [ -n "\${ZSH_VERSION-}" ]; then
    type compdef >/dev/null 2>&1 || { autoload -U compinit && compinit; }
    autoload -U +X bashcompinit && bashcompinit
fi
_launch_sh() {
    local word=\${COMP_WORDS[COMP_CWORD]} configs recipes found=""
    configs=\$(cd "$root/accelerate_configs" && printf '%s ' *.yml | sed 's/\.yml//g')
    recipes=\$(cd "$root/recipes" && printf '%s ' *.py | sed 's/\.py//g')
    if [ "\$COMP_CWORD" -eq 1 ]; then
        found="$commands\$configs"
    elif [[ \$word == -* ]]; then
        found=\$("$python" "$root/tools/find.py" words "\${COMP_WORDS[@]:1:\$((COMP_CWORD - 1))}" 2>/dev/null)
    else
        case \${COMP_WORDS[1]} in
            check) found=\$configs ;;
            advise | compare | diagnose | estimate)
                if [[ " \${COMP_WORDS[*]:0:COMP_CWORD} " == *" -- "* ]]; then found=\$recipes; else found="\$configs --"; fi ;;
            copy) if [ "\$COMP_CWORD" -eq 2 ]; then found=\$recipes; else found=\$configs; fi ;;
            demo | setup | show | export | predict | gpu-first | gpu-report | ls | completion | test) ;;
            *) found=\$recipes ;;
        esac
    fi
    COMPREPLY=(\$(compgen -W "\$found" -- "\$word"))
}
complete -o default -F _launch_sh launch.sh ./launch.sh "$root/launch.sh"
EOF
}

launch() {
    local config=$1 recipe="" options=() through=() wins=() missing flags=""
    shift
    if [ ! -f "$config" ]; then
        [ -f "$root/accelerate_configs/${config%.yml}.yml" ] || find_name config "$config"  # suggests names, exits
        config="$root/accelerate_configs/${config%.yml}.yml"
    fi
    while [ $# -gt 0 ]; do  # options before the recipe are for accelerate launch
        case $1 in
            --config_wins) wins=("$1"); shift ;;
            -h | --help) help; exit ;;
            -m | --module)
                [ $# -gt 1 ] || die "$1 needs a module"; through=(-m faithful -m); recipe=$2; shift 2; break ;;
            --*=*) options+=("$1"); shift ;;
            -*)
                [ -n "$flags" ] || { need_python; flags=" $("$python" "$root/tools/find.py" flags) "; }
                if [[ $flags == *" $1 "* ]]; then options+=("$1"); shift; continue; fi
                [ $# -gt 1 ] || die "$1 needs a value"
                [ ! -f "$root/recipes/${2%.py}.py" ] && [[ $2 != *.py ]] || die "$1 needs a value before $2"
                options+=("$1" "$2"); shift 2 ;;
            *) recipe=$1; shift; break ;;
        esac
    done
    [ -n "$recipe" ] || die "which recipe? ./launch.sh $(basename "$config" .yml) vit"
    if [ ${#through[@]} -eq 0 ]; then
        if [ ! -f "$recipe" ]; then
            [ -f "$root/recipes/${recipe%.py}.py" ] || find_name recipe "$recipe"
            recipe="$root/recipes/${recipe%.py}.py"
        fi
        if grep -q '^class Arguments(options' "$recipe"; then
            [[ " $* " != *" --help "* && " $* " != *" -h "* ]] || find_name options "$recipe"
            (find_name checked "$recipe" "$@") || exit $?  # now, as the processes take seconds to start
        fi
        # A script that does not import faithful runs with faithful's Accelerator in place of Accelerate's.
        grep -qE '^ *(from|import) faithful' "$recipe" || through=(-m faithful)
    fi
    if [ ${#through[@]} -gt 0 ]; then
        through=("${through[@]:0:2}" ${wins[@]+"${wins[@]}"} "${through[@]:2}")
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    elif [ ${#wins[@]} -gt 0 ]; then
        export FAITHFUL_CONFIG_WINS=1
    fi
    need_python
    if [[ " ${options[*]-} " == *" --max_restarts"* && " ${options[*]-} " != *" --rdzv_backend"* ]]; then
        options+=(--rdzv_backend c10d)  # torch's static rendezvous cannot restart workers
    fi
    if ! grep -qE "distributed_type\"?: *['\"]?NO|^ *\"?num_machines\"?: *([2-9]|1[0-9])" "$config" \
            && ! [[ " ${options[*]-} " =~ \ --(main_process_ip|machine_rank|num_machines) ]]; then
        # One machine: take a free port, so that runs don't collide. Several machines must name theirs.
        if ! grep -qE '^ *"?main_process_port"?: *[0-9]' "$config" && [[ " ${options[*]-} " != *" --main_process_port"* ]]; then
            options+=(--main_process_port 0)
        fi
        [[ " ${options[*]-} " != *" --max_restarts"* ]] || export PET_STANDALONE=1  # else c10d always uses port 29400
    fi
    missing=$("$python" "$root/tools/check.py" --quiet "$config" ${options[@]+"${options[@]}"}) || exit $?
    [ -z "$missing" ] || options+=($missing)  # the GPUs there are, the threads of offloaded steps: if nobody says them
    trap '' PIPE  # what is printed is not the run: it goes on without a reader (faithful/printing.py)
    echo "accelerate launch --config_file $config${options[*]:+ ${options[*]}}${through[*]:+ ${through[*]}} $recipe $*" 2>/dev/null || :
    # A wrapper of accelerate's launcher: it exits with the workers' code and prints no traceback of its own.
    exec "$python" "$root/tools/accelerate_launch.py" --config_file "$config" ${options[@]+"${options[@]}"} ${through[@]+"${through[@]}"} \
        "$recipe" "$@"
}

case ${1-} in
    "" | help | -h | --help) help ;;
    setup) shift; setup "$@" ;;
    demo)
        shift
        [[ " $*" != *" --output"?dir* ]] || die "demo names its own folder: ./launch.sh ddp_bf16 vit $*"
        need_python
        out="$root/runs/demo-$(date +%Y%m%d-%H%M%S)"
        [ "$PWD" != "$root" ] || out=${out#"$root/"}
        exec "$root/launch.sh" ddp_bf16 vit --output_dir "$out" "$@"
        ;;
    advise | compare | estimate | diagnose) need_python; exec "$python" "$root/tools/$1.py" "${@:2}" ;;
    check) shift; need_python; exec "$python" "$root/tools/check.py" "$@" ;;
    copy) need_python; exec "$python" "$root/tools/copy_recipe.py" "${@:2}" ;;  # copy.py would shadow Python's module
    gpu-first) need_python; exec "$python" "$root/benchmarks/gpu.py" first "${@:2}" ;;
    gpu-report) need_python; exec "$python" "$root/benchmarks/gpu.py" report "${@:2}" ;;
    show | export | predict) need_python; exec "$python" "$root/tools/$1.py" "${@:2}" ;;
    ls) find_name ls ;;
    --version) sed -n 's/^__version__ = "\(.*\)"/accelerate-recipes \1/p' "$root/faithful/__init__.py" ;;
    completion) completion ;;
    test)  # with pytest-xdist some files at once: most tests keep one core busy, many wait
        shift; need_python; cd "$root"
        at_once=(); ! "$python" -c 'import xdist' 2>/dev/null || at_once=(-n logical --maxprocesses 4 --dist loadfile)
        exec "$python" -m pytest ${at_once[@]+"${at_once[@]}"} "$@"
        ;;
    -*) die "unknown option $1 (./launch.sh alone prints its help)" ;;
    *) launch "$@" ;;
esac
