"""The tests of torch that do not run over mpicoll, and why. A pattern that matches no test is an error."""

PROFILER = "torch's legacy profiler records remote events by torch's own agent"
WORLDS = "all ranks of MPI take part in RPC from init_rpc to shutdown; none comes later"
ONE_BACKEND = "mpicoll.rpc has one backend: none can be registered, and there is no class TensorPipeAgent"
NODES = "the autograd graph has no nodes that send and receive: DistAutogradContext has no _send_functions"
SCRIPTED = "mpicoll.rpc carries no TorchScript, which torch has retired"

GATHERS = ("test_all_gather*", "test_rpc_barrier_*", "test_shutdown_errors")

# By the name of the class: (reason, patterns of names of tests). docs/guides/rpc.md has a table of what differs.
LEFT_OUT: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "DistributedTest": (
        ("needs torchvision", ("test_SyncBatchNorm_process_group",)),
        ("torch up to 2.13 refuses monitored_barrier on groups that are not Gloo's", ("test_monitored_barrier_*",)),
    ),
    "RpcTest": (
        (PROFILER, ("test_profiler_*", "test_rpc_profiling_*", "test_rref_type_blocking", "test_rref_type_non_blocking")),
        (PROFILER, ("test_disable_gil_profiling", "test_server_process_global_profiler")),
        (ONE_BACKEND, ("test_register_rpc_backend_*", "test_duplicate_name")),
        (SCRIPTED, ("test_rref_get_future", "test_wait_all_exit_early_script_function", "test_*_torchscript", "test_*_jit_call")),
        (
            "torch's private _all_gather and _barrier over RPC: collectives are MPI's here",
            ("test_all_gather*", "test_barrier*", "test_shutdown_errors"),
        ),
        ("replaces torch's pickler; tensors travel beside the pickle here", ("test_use_rpc_pickler",)),
        ("expects a refusal of RRef.backward on a user, which runs on the owner here", ("test_user_rref_backward",)),
    ),
    "TensorPipeAgentRpcTest": (
        (WORLDS, ("test_dynamic_*",)),
        (ONE_BACKEND, ("test_infer_backend_from_options",)),
        ("functions are called by the callee, not parsed by the caller", ("test_op_with_invalid_args",)),
        ("the pool of threads grows when calls wait", ("test_set_and_get_num_worker_threads",)),
        ("expects the words of a constructor in C++", ("test_tensorpipe_options_throw_on_timedelta_timeout",)),
    ),
    "DistAutogradTest": (
        (PROFILER, ("test_dist_autograd_profiling",)),
        (NODES, ("test_graph_for_*", "test_clean_context_during_backward", "test_no_graph_with_tensors_not_require_grad*")),
        (NODES, ("test_rpc_complex_args", "test_remote_complex_args")),
        (SCRIPTED, ("test_backward_simple_script_call", "test_trainer_ps_torchscript_functions")),
        (
            "expects gradients without a copy where mpicoll makes one",
            ("test_no_grad_copy", "test_grad_copy_sparse_indices_extra_ref"),
        ),
        ("expects that a backward pass hangs when a message does not take part", ("test_backward_unused_send_function",)),
    ),
    "TensorPipeAgentDistAutogradTest": (
        (NODES, ("test_graph_for_*", "test_no_graph_with_tensors_not_require_grad*", "test_*_complex_args_sparse")),
        (SCRIPTED, ("test_backward_simple_script_call_sparse",)),
    ),
    "RemoteModuleTest": ((SCRIPTED, ("test_*_script",)),),
    "ThreeWorkersRemoteModuleTest": (
        (SCRIPTED, ("test_send_remote_module_over_the_wire_script_not_supported",)),
        ("expects the private attributes of torch's class, in their order", ("test_send_remote_module_over_the_wire",)),
    ),
}
