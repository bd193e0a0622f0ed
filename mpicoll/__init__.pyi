"""The public names of mpicoll, for editors and type checkers; `__init__.py` loads them on first use.

tests/project/test_types.py holds that every name of mpicoll.__all__ has a type here, in mypy and in pyright.
"""

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import (
    AllToAllOptions as AllToAllOptions,
    AllreduceCoalescedOptions as AllreduceCoalescedOptions,
    AllreduceOptions as AllreduceOptions,
    BarrierOptions as BarrierOptions,
    BroadcastOptions as BroadcastOptions,
    BuiltinCommHookType as BuiltinCommHookType,
    DebugLevel as DebugLevel,
    FileStore as FileStore,
    GatherOptions as GatherOptions,
    GradBucket as GradBucket,
    HashStore as HashStore,
    Logger as Logger,
    PrefixStore as PrefixStore,
    ProcessGroup as ProcessGroup,
    ProcessGroupGloo as ProcessGroupGloo,
    ReduceOp as ReduceOp,
    ReduceOptions as ReduceOptions,
    ReduceScatterOptions as ReduceScatterOptions,
    Reducer as Reducer,
    ScatterOptions as ScatterOptions,
    Store as Store,
    TCPStore as TCPStore,
    Work as Work,
    get_debug_level as get_debug_level,
    set_debug_level as set_debug_level,
    set_debug_level_from_env as set_debug_level_from_env,
)
from torch.distributed import (
    DistBackendError as DistBackendError,
    DistError as DistError,
    DistNetworkError as DistNetworkError,
    DistStoreError as DistStoreError,
    QueueEmptyError as QueueEmptyError,
    RankType as RankType,
    breakpoint as breakpoint,
    is_available as is_available,
    log as log,
)
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh, init_device_mesh as init_device_mesh
from torch.distributed.distributed_c10d import (
    Backend as Backend,
    BackendConfig as BackendConfig,
    GroupMember as GroupMember,
    GroupName as GroupName,
    all_gather_object as all_gather_object,
    broadcast_object_list as broadcast_object_list,
    default_pg_timeout as default_pg_timeout,
    destroy_process_group as destroy_process_group,
    gather_object as gather_object,
    get_backend as get_backend,
    get_backend_config as get_backend_config,
    get_default_backend_for_device as get_default_backend_for_device,
    get_global_rank as get_global_rank,
    get_group_rank as get_group_rank,
    get_node_local_rank as get_node_local_rank,
    get_pg_count as get_pg_count,
    get_process_group_ranks as get_process_group_ranks,
    get_rank as get_rank,
    get_world_size as get_world_size,
    group as group,
    is_backend_available as is_backend_available,
    is_gloo_available as is_gloo_available,
    is_initialized as is_initialized,
    is_mpi_available as is_mpi_available,
    is_nccl_available as is_nccl_available,
    is_torchelastic_launched as is_torchelastic_launched,
    is_ucc_available as is_ucc_available,
    is_xccl_available as is_xccl_available,
    record_comm as record_comm,
    reduce_op as reduce_op,
    scatter_object_list as scatter_object_list,
    send_object_list as send_object_list,
    supports_complex as supports_complex,
)
from torch.distributed.rendezvous import register_rendezvous_handler as register_rendezvous_handler, rendezvous as rendezvous
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
from mpicoll._api.barriers import monitored_barrier as monitored_barrier
from mpicoll._api.groups import (
    init_process_group as init_process_group,
    get_reconfigure_handle as get_reconfigure_handle,
    new_group as new_group,
    reconfigure as reconfigure,
    shrink as shrink,
    shrink_group as shrink_group,
    split_group as split_group,
)
from mpicoll._api.information import (
    dump_flight_record as dump_flight_record,
    get_comm as get_comm,
    info as info,
)
from mpicoll._api.p2p import (
    P2POp as P2POp,
    batch_isend_irecv as batch_isend_irecv,
    irecv as irecv,
    isend as isend,
    recv as recv,
    recv_object_list as recv_object_list,
    send as send,
)
from mpicoll._c10d.windows import Window as Window, empty_shared as empty_shared
from mpicoll._launch.spawn import RankExited as RankExited, RankRaised as RankRaised, spawn as spawn
from mpicoll._overloads import (
    all_gather as all_gather,
    all_gather_coalesced as all_gather_coalesced,
    all_gather_into_tensor as all_gather_into_tensor,
    all_gather_single as all_gather_single,
    all_reduce as all_reduce,
    all_reduce_coalesced as all_reduce_coalesced,
    all_to_all as all_to_all,
    all_to_all_single as all_to_all_single,
    barrier as barrier,
    broadcast as broadcast,
    exscan as exscan,
    gather as gather,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    reduce_scatter_single as reduce_scatter_single,
    reduce_scatter_tensor as reduce_scatter_tensor,
    scan as scan,
    scatter as scatter,
)
from mpicoll.errors import (
    CollectiveMismatch as CollectiveMismatch,
    CommunicationError as CommunicationError,
    ConcurrentCollectives as ConcurrentCollectives,
    DifferentTensors as DifferentTensors,
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

# torch's own functions, by what they return on a member. A rank outside the group gets GroupMember.NON_GROUP_MEMBER, an int,
# which every operation takes for ``group``; with torch's type, no call would fit and no method of a group could be called.
def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    backend: str | Backend | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup]]:
    """Cuts a group into groups of ``group_size`` ranks: this rank's, and all (collective). It is torch's function."""

def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | Backend | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup]]:
    """Makes a group of each list of global ranks: this rank's or None, and all (collective). It is torch's function."""

OURS: dict[str, str]
