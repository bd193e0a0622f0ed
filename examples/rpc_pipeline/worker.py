# python -m mpicoll.run -n 1 examples/rpc_pipeline/master.py : -n 1 examples/rpc_pipeline/worker.py
"""Holds the second half of the network and does what master.py asks for, until both have come to shutdown.

Nothing of the network is imported here: the calls name resnet.py, which is found beside this script.
"""

from mpicoll import rpc


def main() -> None:
    rpc.init_rpc("worker", rpc_backend_options=rpc.MPIRpcBackendOptions(rpc_timeout=300))
    rpc.shutdown()  # returns when no call is under way any more, here or there


if __name__ == "__main__":
    main()
