"""The mpicoll API: torch.distributed's functions with torch's signatures, straight to the engine.

Ranks are global ranks here and group ranks below. torch.distributed's function of the same name gets the call if the group is
another backend's (gloo, nccl), if the tensor is of a subclass or on a device that the group does not serve, inside torch's
coalescing manager, and under torch.compile. It comes back through mpicoll._c10d if the group is ours.

Collectives: all ranks of a group must call the same ones in the same order. A call returns None when its operation has ended, or
with ``async_op=True`` a Work at once: call ``wait()`` before you use the results, and change none of the tensors before that.
On a rank outside the group a call does nothing but warn.

A wrong argument raises TypeError or ValueError before anything is sent. OperationTimeout: another rank has not called in time.
GroupFailed: an earlier operation of the group has failed. CommunicationError: MPI reports an error.
"""
