#!/usr/bin/env bash
# Starts a job on a Slurm cluster: an array of workers, and after it what proves and compacts the output.
#   jobs/submit.sh [--dry-run] [--multirun] [conf=RECIPE] [key=value …]
# --dry-run    print what would be run, as a script, and run nothing
# --multirun   an array for each combination of a sweep such as sampling.temperature=0.5,1.0
# All else goes to the workers as it is. What the site is like: jobs/site.env, see jobs/site.env.example.
# shellcheck disable=SC2016
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=launch.sh
source "$ROOT/jobs/launch.sh"

main() {
    local dry_run='' argument script
    local -a arguments=()
    for argument in "$@"; do
        case $argument in
            --dry-run) dry_run=yes ;;
            -h | --help) usage && exit ;;
            *) arguments+=("$argument") ;;
        esac
    done
    load_site "$ROOT"
    activate
    script=$(write_script "${arguments[@]}")
    # What is printed is what is run.
    if [[ -n $dry_run ]]; then printf '%s\n' "$script"; else eval "$script"; fi
}

usage() {
    sed -n '2,/^set/ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

# write_script ARGUMENT…: prints a script that submits the job, or each job of a sweep.
write_script() {
    local listing output word max_tasks number=0
    local -a arguments
    max_tasks=$(max_array_size)
    listing=$(mktemp)
    # shellcheck disable=SC2064
    trap "rm -f -- '$listing'" EXIT
    # Asked before anything is queued: a mistake in a key ends here and not in every task.
    PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} "${SITE_SUBMIT_PYTHON:-python}" -m pipeline.sweep "$@" >"$listing"
    printf 'set -euo pipefail\n'
    [[ -z ${SITE_LOG_DIR:-} ]] || words mkdir -p -- "$SITE_LOG_DIR"
    while IFS= read -r -d '' output; do
        arguments=()
        while IFS= read -r -d '' word && [[ -n $word ]]; do arguments+=("$word"); done
        number=$((number + 1))
        write_job "$number" "$max_tasks" "$output" "${arguments[@]}"
    done <"$listing"
}

# write_job NUMBER MAX_TASKS OUTPUT_DIR ARGUMENT…: prints the commands for one job. More workers than an array
# can have tasks are several arrays: they share the job all the same.
write_job() {
    local number=$1 max_tasks=$2 output=$3 limit='' left=$SITE_ARRAY_SIZE arrays array size dependency=afterany
    shift 3
    local name
    name=tokenmill-$(basename -- "$output")
    arrays=$(((left + max_tasks - 1) / max_tasks))
    if [[ -n ${SITE_ARRAY_LIMIT:-} ]]; then
        ((SITE_ARRAY_LIMIT >= arrays)) || die "SITE_ARRAY_LIMIT=$SITE_ARRAY_LIMIT is less than the $arrays arrays" \
            "that SITE_ARRAY_SIZE=$SITE_ARRAY_SIZE takes here: raise it, or lower SITE_ARRAY_SIZE"
        limit=%$((SITE_ARRAY_LIMIT / arrays))
    fi
    printf '\n# into %s\n' "$(words "$output")"
    worker_options "$name"
    for ((array = 1; array <= arrays; array++)); do
        size=$((left < max_tasks ? left : max_tasks))
        left=$((left - size))
        printf 'array_%d_%d=$(%s)\n' "$number" "$array" \
            "$(words env "${ENVIRONMENT[@]}" sbatch --parsable "${OPTIONS[@]}" --array="0-$((size - 1))$limit" \
                "$ROOT/jobs/generate.sbatch" "$@")"
        dependency+=":\${array_${number}_$array%%;*}"
    done
    finalize_options "$name"
    printf 'finalize_%d=$(%s --dependency="%s" %s)\n' "$number" \
        "$(words env "${ENVIRONMENT[@]}" sbatch --parsable "${OPTIONS[@]}")" "$dependency" \
        "$(words "$ROOT/jobs/finalize.sbatch" "$output")"
    printf 'echo "%s, then ${finalize_%d%%%%;*}:" %s\n' "${dependency#afterany:}" "$number" "$(words "$output")"
}

# worker_options NAME: sets OPTIONS to those of an array, and ENVIRONMENT to what the tasks must know. A value
# that is not set is not passed: the cluster's own default holds.
worker_options() {
    local variable
    ENVIRONMENT=("TOKENMILL_ROOT=$ROOT")
    for variable in TOKENMILL_SITE "${SITE_FROM_ENVIRONMENT[@]}"; do
        [[ -z ${!variable:-} ]] || ENVIRONMENT+=("$variable=${!variable}")
    done
    OPTIONS=(--job-name="$1" --signal="$(signal_form)")
    add_option partition "${SITE_PARTITION:-}"
    add_option account "${SITE_ACCOUNT:-}"
    add_option qos "${SITE_QOS:-}"
    add_option time "${SITE_TIME:-}"
    add_option gres "${SITE_GPUS:+gpu:$SITE_GPUS}"
    add_option cpus-per-task "${SITE_CPUS:-}"
    add_option mem "${SITE_MEM:-}"
    add_option output "${SITE_LOG_DIR:+$SITE_LOG_DIR/%x-%A_%a.out}"
    OPTIONS+=("${SITE_SBATCH_OPTIONS[@]}")
}

# finalize_options NAME: the same for the job that follows the array.
finalize_options() {
    OPTIONS=(--job-name="$1-finalize")
    add_option partition "${SITE_FINALIZE_PARTITION:-${SITE_PARTITION:-}}"
    add_option account "${SITE_ACCOUNT:-}"
    add_option qos "${SITE_FINALIZE_QOS:-${SITE_QOS:-}}"
    add_option time "${SITE_FINALIZE_TIME:-}"
    add_option cpus-per-task "${SITE_FINALIZE_CPUS:-}"
    add_option mem "${SITE_FINALIZE_MEM:-}"
    add_option output "${SITE_LOG_DIR:+$SITE_LOG_DIR/%x-%j.out}"
    OPTIONS+=("${SITE_FINALIZE_SBATCH_OPTIONS[@]}")
}

add_option() {
    [[ -z $2 ]] || OPTIONS+=("--$1=$2")
}

max_array_size() {
    local config
    if [[ -n ${SITE_MAX_ARRAY_SIZE:-} ]]; then
        echo "$SITE_MAX_ARRAY_SIZE"
        return
    fi
    config=$(scontrol show config)
    [[ $config =~ MaxArraySize[[:space:]]*=[[:space:]]*([0-9]+) ]] || die "scontrol show config tells no MaxArraySize"
    # 0 stands for a cluster without arrays.
    ((BASH_REMATCH[1] > 0)) || die "this cluster runs no job arrays: its MaxArraySize is 0"
    echo "${BASH_REMATCH[1]}"
}

# words WORD…: prints them so that a shell reads the same words again.
words() {
    local quoted
    printf -v quoted ' %q' "$@"
    printf '%s\n' "${quoted# }"
}

main "$@"
