#!/bin/sh
# On every machine, with the same values:
#
#   HEAD=node0 NODES=2 RANKS=8 sh examples/clusters/torchrun.sh --out /shared/run
#
# HEAD      the machine where the others meet; any of them
# PORT      of HEAD, free and open to the others
# NODES     machines, or least:most, as 1:2: with fewer left the run goes on with fewer
# RANKS     processes of each machine: one for each device
# RESTARTS  how often ranks may be lost
set -eu
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts "${RESTARTS:-100}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${JOB:-isoshard}" \
  ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
  "$(dirname "$0")/train.py" "$@"
