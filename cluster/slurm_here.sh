#!/usr/bin/env bash
# Starts a complete Slurm on this machine (munge, the controller and two node daemons), to try cluster/slurm.sbatch.
#
#   cluster/slurm_here.sh FOLDER COMMAND...    e.g. cluster/slurm_here.sh slurm sbatch cluster/slurm.sbatch ddp_fp32 vit
#
# Runs COMMAND as root while Slurm runs, then stops everything. Needs Debian's slurm-wlm and munge.
set -euo pipefail
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
mkdir -p "$folder/state" "$folder"/spool{0,1} "$folder/munge"
chmod 700 "$folder/munge"
export SLURM_CONF=$folder/slurm.conf
[ -f "$folder/munge/key" ] || (umask 077 && head -c 1024 /dev/urandom > "$folder/munge/key")
port=$((20000 + $$ % 20000))
cat > "$SLURM_CONF" <<CONF
ClusterName=here
SlurmctldHost=$(hostname)
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
MinJobAge=3600
NodeName=spool[0-1] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 2))] CPUs=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
pids=()
down() { for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done; wait; }
trap down EXIT
munged --foreground --force --key-file "$folder/munge/key" --socket "$folder/munge/socket" \
    --pid-file "$folder/munge/pid" --log-file "$folder/munge/log" --seed-file "$folder/munge/seed" > "$folder/munged.out" 2>&1 & pids+=($!)
until [ -S "$folder/munge/socket" ]; do sleep 0.1; kill -0 "${pids[0]}"; done
slurmctld -D > "$folder/slurmctld.out" 2>&1 & pids+=($!)
for node in spool0 spool1; do slurmd -D -N "$node" > "$folder/$node.out" 2>&1 & pids+=($!); done
for _ in $(seq 60); do [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && break; sleep 0.5; done
sinfo
"$@"
