#!/usr/bin/env bash
# Training on several machines without a scheduler: run this on every one of them, with the same arguments.
#
#   NODES=2 NODE_RANK=0 MAIN=10.0.0.1 scripts/launch.sh recipes/umad_math_hetero.yaml output=/shared/runs/math
#   NODES=2 NODE_RANK=1 MAIN=10.0.0.1 scripts/launch.sh recipes/umad_math_hetero.yaml output=/shared/runs/math
#
# NODES          machines (default 1)
# NODE_RANK      this machine's number, from 0
# MAIN           host name or address of machine 0, and PORT (default 29500) a free port on it
# GPUS           GPUs of every machine (default: as many as nvidia-smi lists)
# CONFIG         accelerate configuration (default recipes/accelerate/zero2.yaml)
#
# The run folder must lie on a file system that all machines share.
set -euo pipefail
nodes=${NODES:-1}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
exec accelerate launch \
    --config_file "${CONFIG:-recipes/accelerate/zero2.yaml}" \
    --num_machines "$nodes" \
    --num_processes "$((nodes * gpus))" \
    --machine_rank "${NODE_RANK:-0}" \
    --main_process_ip "${MAIN:-127.0.0.1}" \
    --main_process_port "${PORT:-29500}" \
    -m umad.cli train "$@"
