# shellcheck shell=bash disable=SC2034
# What the scripts here share: the site's values, the node's folders, and how a python is started.
# Sourced, never run. Knows Slurm and launchers; what a job is, it leaves to pipeline.run. Bash 4.4 or later.

die() {
    printf 'tokenmill: %s\n' "$*" >&2
    exit 1
}

# A failure inside $( ) is a failure.
shopt -s inherit_errexit

# With this code a worker in a step asks for another life (cluster.requeue=exit_code in pipeline/config.py).
REQUEUE_CODE=85

# ---------------------------------------------------------------- the site's values

# load_site ROOT: reads the site's file and refuses what is wrong in it. A SITE_… variable of the environment
# wins over the file, so that one command can differ: SITE_ARRAY_SIZE=4 jobs/submit.sh … A list is cut at blanks.
load_site() {
    local name file=${TOKENMILL_SITE:-$1/jobs/site.env}
    local -A given=()
    for name in "${!SITE_@}"; do given[$name]=${!name}; done
    SITE_FROM_ENVIRONMENT=("${!given[@]}")
    if [[ -f $file ]]; then
        # shellcheck source=/dev/null
        source "$file"
    elif [[ -n ${TOKENMILL_SITE:-} ]]; then
        die "TOKENMILL_SITE=$file is no file"
    fi
    for name in "${!given[@]}"; do
        case $name in
            *_OPTIONS | *_ARGUMENTS | *_MOUNTS) read -ra "${name?}" <<<"${given[$name]}" ;;
            *) printf -v "$name" %s "${given[$name]}" ;;
        esac
    done

    SITE_LAUNCH=${SITE_LAUNCH:-bare}
    SITE_PYTHON=${SITE_PYTHON:-python}
    SITE_SIGNAL_S=${SITE_SIGNAL_S:-120}
    SITE_ARRAY_SIZE=${SITE_ARRAY_SIZE:-64}
    SITE_MAX_RESTARTS=${SITE_MAX_RESTARTS:-20}
    case $SITE_LAUNCH in
        bare | srun) ;;
        apptainer | pyxis) [[ -n ${SITE_IMAGE:-} ]] || die "SITE_LAUNCH=$SITE_LAUNCH needs SITE_IMAGE" ;;
        *) die "SITE_LAUNCH=$SITE_LAUNCH is none of bare, srun, apptainer, pyxis" ;;
    esac
    for name in SITE_SIGNAL_S SITE_ARRAY_SIZE SITE_ARRAY_LIMIT SITE_MAX_ARRAY_SIZE; do
        [[ -z ${!name:-} || ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name} is no whole number above 0"
    done
    [[ $SITE_MAX_RESTARTS =~ ^[0-9]+$ ]] || die "SITE_MAX_RESTARTS=$SITE_MAX_RESTARTS is no whole number"
}

# The signal before the time limit, as the launch style needs it. An exec'd python is the batch shell itself,
# and only `B:` reaches that; of a step's processes all get it without `B:`, and the shell none.
signal_form() {
    if [[ $SITE_LAUNCH == bare ]]; then echo "B:USR1@$SITE_SIGNAL_S"; else echo "USR1@$SITE_SIGNAL_S"; fi
}

activate() {
    if declare -F site_activate >/dev/null; then
        # Activation scripts of modules and environments are not written for `set -u`.
        set +u
        site_activate
        set -u
    fi
}

# ---------------------------------------------------------------- the node

# prepare_node: offline, and every cache that is written lies on this node. The hub's cache is read only: many
# tasks start at once, and locks and renames on a shared file system are what they would trip over.
prepare_node() {
    local shared=${SITE_HF_HOME:-${HF_HOME:-$HOME/.cache/huggingface}}
    NODE_DIR=${SITE_NODE_DIR:-${TMPDIR:-/tmp}/tokenmill-$(id -un)}
    mkdir -p "$NODE_DIR"/{tmp,triton,inductor,modules,datasets}
    export HF_HOME=$shared HF_HUB_OFFLINE=${SITE_HF_HUB_OFFLINE:-1}
    export TMPDIR=$NODE_DIR/tmp
    export TRITON_CACHE_DIR=$NODE_DIR/triton TORCHINDUCTOR_CACHE_DIR=$NODE_DIR/inductor
    export HF_MODULES_CACHE=$NODE_DIR/modules
    link_datasets "${HF_DATASETS_CACHE:-$shared/datasets}" "$NODE_DIR/datasets"
    export HF_DATASETS_CACHE=$NODE_DIR/datasets
}

# link_datasets SHARED LOCAL: folders of its own, files that are links. The library writes a lock beside every
# dataset that it opens.
link_datasets() {
    local file
    [[ -d $1 ]] || return 0
    (
        flock 9
        find -L "$1" -type f ! -name '*.lock' -printf '%P\0' | while IFS= read -r -d '' file; do
            [[ ! -e $2/$file ]] || continue
            mkdir -p -- "$(dirname -- "$2/$file")"
            ln --symbolic --force -- "$(realpath -- "$1")/$file" "$2/$file"
        done
    ) 9>"$2.lock"
}

# ---------------------------------------------------------------- Slurm

# What scontrol and squeue call this task. The number alone will not do: that of an array's last task is the
# whole array's as well.
task_id() {
    if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
        echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "$SLURM_JOB_ID"
    fi
}

# Slurm tells a job when it ends from 23.02 on only.
export_end_time() {
    local end
    end=$(squeue --noheader --jobs="$(task_id)" --format=%e 2>/dev/null) || return 0
    end=$(date --date="$end" +%s 2>/dev/null) || return 0
    export SLURM_JOB_END_TIME=$end
}

# ---------------------------------------------------------------- launch styles

# launcher: sets LAUNCHER to the words before `-m module argument…`.
launcher() {
    local step=(srun --ntasks=1)
    # srun stopped taking this from the job in 22.05.
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || step+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    local mounts=("$PWD" "$ROOT" "$NODE_DIR" "${SITE_MOUNTS[@]}")
    [[ ! -d $HF_HOME ]] || mounts+=("$HF_HOME:$HF_HOME:ro")
    case $SITE_LAUNCH in
        bare) LAUNCHER=("$SITE_PYTHON") ;;
        srun) LAUNCHER=("${step[@]}" "$SITE_PYTHON") ;;
        apptainer)
            LAUNCHER=("${step[@]}" apptainer exec --pwd "$PWD")
            [[ -z ${SITE_GPUS:-} ]] || LAUNCHER+=(--nv)
            local mount
            for mount in "${mounts[@]}"; do LAUNCHER+=(--bind "$mount"); done
            LAUNCHER+=("${SITE_CONTAINER_OPTIONS[@]}" "$SITE_IMAGE" "$SITE_PYTHON")
            ;;
        pyxis)
            LAUNCHER=("${step[@]}" --container-image="$SITE_IMAGE" --container-workdir="$PWD")
            LAUNCHER+=(--container-mounts="$(pyxis_mounts "${mounts[@]}")")
            LAUNCHER+=("${SITE_CONTAINER_OPTIONS[@]}" "$SITE_PYTHON")
            ;;
    esac
}

# pyxis_mounts MOUNT…: joined by commas, each with its place inside.
pyxis_mounts() {
    local mount joined=
    for mount in "$@"; do
        [[ $mount == *:* ]] || mount=$mount:$mount
        joined+=,$mount
    done
    printf '%s\n' "${joined#,}"
}

# wait_for_step COMMAND…: runs it and returns its exit code, whatever signals come meanwhile.
wait_for_step() {
    local step code=0
    # TERM reaches the step without this shell's help. USR1 does not where the job was submitted with `B:`; srun
    # hands it on. One trap only: of two signals that come together bash forgets one.
    trap '' TERM
    trap '[[ -z ${step:-} ]] || kill -USR1 "$step" 2>/dev/null || :' USR1
    "$@" &
    step=$!
    while kill -0 "$step" 2>/dev/null; do
        # Short waits: a trap may miss a signal that comes just before a long one begins.
        sleep 1 &
        wait "$!" || :
    done
    trap '' USR1
    wait "$step" || code=$?
    return "$code"
}
