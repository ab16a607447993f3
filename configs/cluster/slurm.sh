#!/bin/bash
# A run on several hosts under Slurm: Ray on every node, and the command on the first one. Submit it with `sbatch`.
# Change: the lines of #SBATCH, what sets up Python, the folder and the command. The folder must be one that all nodes
# share. Every node needs `pip install 'jaxrl[ray]'` with Ray 2.49 or newer, which has `ray symmetric-run`.
# Not tried: no cluster of Slurm has run this file. The syntax is that of Ray 2.60.
#SBATCH --job-name=jaxrl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@900

run_dir=/shared/runs/a
# source /shared/venv/bin/activate

mkdir -p "$run_dir"
pid_file=$run_dir.pid
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600
# The batch script runs on the job's first node, which becomes the head. With several networks, choose the address here.
address=$(hostname -I | cut -d ' ' -f 1):6379

# 15 minutes before the end of its time the job saves: SIGTERM goes to the controller alone, not to Ray. The same job
# then goes on from the checkpoint.
stopped=
trap 'stopped=yes; kill -TERM "$(cat "$pid_file")"' USR1

srun --kill-on-bad-exit=1 ray symmetric-run --address "$address" --min-nodes "$SLURM_NNODES" --num-gpus=8 -- \
  sh -c "echo \$\$ > $pid_file; exec jaxrl train --config /shared/run.yaml trainer.run_dir=$run_dir \
    hosts.num=$SLURM_NNODES hosts.devices_per_host=8 hosts.address=$address" &
srun=$!
wait $srun
status=$?
if [ -n "$stopped" ]; then  # the signal ended the first wait
  wait $srun
  status=$?
  [ $status -eq 0 ] && scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
