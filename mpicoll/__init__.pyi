"""The public names of mpicoll, for editors and type checkers; `__init__.py` loads them on first use.

tests/project/test_types.py holds that every name of mpicoll.__all__ has a type here, in mypy and in pyright.
"""

from torch.distributed import *
from torch.distributed import (
    algorithms as algorithms,
    c10d_logger as c10d_logger,
    config as config,
    constants as constants,
    device_mesh as device_mesh,
    distributed_c10d as distributed_c10d,
    logging_handlers as logging_handlers,
    remote_device as remote_device,
    utils as utils,
)

from mpicoll import autograd as autograd, errors as errors, nn as nn, optim as optim, rpc as rpc
from mpicoll._api.barriers import barrier as barrier, monitored_barrier as monitored_barrier
from mpicoll._api.coalesced import all_gather_coalesced as all_gather_coalesced, all_reduce_coalesced as all_reduce_coalesced
from mpicoll._api.exchanges import (
    all_to_all as all_to_all,
    all_to_all_single as all_to_all_single,
    gather as gather,
    scatter as scatter,
)
from mpicoll._api.flight_record import dump_flight_record as dump_flight_record
from mpicoll._api.gathers import all_gather as all_gather, all_gather_single as all_gather_single, broadcast as broadcast
from mpicoll._api.groups import init_process_group as init_process_group  # type: ignore[assignment]  # more than torch's
from mpicoll._api.objects import recv_object_list as recv_object_list
from mpicoll._api.older_names import (
    all_gather_into_tensor as all_gather_into_tensor,
    reduce_scatter_tensor as reduce_scatter_tensor,
)
from mpicoll._api.p2p import (  # type: ignore[assignment]  # it takes P2POps of ours
    P2POp as P2POp,
    batch_isend_irecv as batch_isend_irecv,
    irecv as irecv,
    isend as isend,
    recv as recv,
    send as send,
)
from mpicoll._api.reductions import (
    all_reduce as all_reduce,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    reduce_scatter_single as reduce_scatter_single,
)
from mpicoll._api.shrinking import shrink as shrink, shrink_group as shrink_group
from mpicoll._api.split_group import split_group as split_group
from mpicoll._launch.spawn import RankExited as RankExited, RankRaised as RankRaised, spawn as spawn
from mpicoll.errors import (
    CollectiveMismatch as CollectiveMismatch,
    CommunicationError as CommunicationError,
    ConcurrentCollectives as ConcurrentCollectives,
    ForkedProcess as ForkedProcess,
    GroupDestroyed as GroupDestroyed,
    GroupFailed as GroupFailed,
    LaunchError as LaunchError,
    MpicollError as MpicollError,
    OperationTimeout as OperationTimeout,
    PeerLost as PeerLost,
    ThreadLevelError as ThreadLevelError,
    TruncationError as TruncationError,
    UnsupportedReduction as UnsupportedReduction,
    WorkerLeft as WorkerLeft,
)

__version__: str
OURS: dict[str, str]
