#!/bin/sh
# From one machine, with Open MPI on all and a login without a password:
#
#   RANKS=16 HOSTS=node0:8,node1:8 sh examples/clusters/mpirun.sh --out /shared/run
#
# mpirun ends all ranks when one is lost, and starts none again: the loop does.
# MPI_OPTIONS are more options of mpirun's, such as --mca btl_tcp_if_include eth0.
set -u
attempt=0
while [ $attempt -lt "${RESTARTS:-5}" ]; do
  mpirun -n "$RANKS" ${HOSTS:+--host "$HOSTS"} --bind-to none ${MPI_OPTIONS:-} \
    "${PYTHON:-python}" "$(dirname "$0")/train.py" "$@"
  status=$?
  case $status in 0 | 75) exit $status ;; esac # done, or saved and asked to end
  attempt=$((attempt + 1))
  echo "attempt $attempt ended with status $status; the next one goes on from the last checkpoint"
done
exit $status
