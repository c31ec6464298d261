#!/bin/bash
# Two machines of 8 GPUs under Slurm: the model sharded inside each, replicated across the two (HSDP).
#
#   sbatch examples/slurm.sh recipe.yaml runs/big            more settings may follow: training.max_steps=1000 ...
#
# Submit the same line again to go on: when time is up, Slurm's SIGTERM makes all processes write a checkpoint after the
# step under way. The run folder has to lie on a file system that both machines see.
#SBATCH --job-name=ssm-tune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -euo pipefail

recipe=$1 run=$2
shift 2

# One launcher a machine; it starts a process for each GPU. The machines meet at the first one.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export HF_HUB_OFFLINE=1 # compute nodes often have no network: fetch model and data before, on a login node
resume=()
[[ -f $run/run.json ]] && resume=(--resume)

# NODE_RANK is taken from SLURM_NODEID.
srun --kill-on-bad-exit=1 ssm-tune sft "$recipe" "training.output_dir=$run" "$@" --accelerate hsdp_2node "${resume[@]}"
