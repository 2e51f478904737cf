#!/bin/sh
# A slice of Cloud TPU VMs, from your own machine:
#
#   TPU=my-slice ZONE=us-east5-b OUT=/mnt/shared/run sh examples/clusters/tpu_pod.sh
#
# gcloud runs the same command on every machine of the slice; JAX finds the others by the metadata
# of the VMs. A machine that is lost ends the others; the loop starts all of them again.
set -u
attempt=0
while [ $attempt -lt "${RESTARTS:-100}" ]; do
  gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all \
    --command "cd isoshard && python examples/clusters/train.py --by jax --out $OUT" && exit 0
  attempt=$((attempt + 1))
  echo "attempt $attempt failed; the next one goes on from the last checkpoint"
  sleep 10
done
exit 1
