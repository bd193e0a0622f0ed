#!/bin/bash
# Two programs, one job, two nodes: a server on node01 (rank 0) and four workers on node02 (ranks 1-4).
#
#     bash hostfiles/two_nodes_mpmd.sh
#
# `:` stands between the programs; each says how many ranks of it to start. Ranks are counted on through the programs in this
# order, so all of them are in one world of 5, and fill the hosts in order. All other options stand before the first program.

python -m mpicoll.run --host node01:1,node02:4 -n 1 server.py : -n 4 worker.py --batch-size 32
