"""The mpicoll API: torch.distributed's functions with torch's signatures, straight to the engine.

Ranks are global ranks here and group ranks below. torch.distributed's function of the same name gets the call if the group is
another backend's (gloo, nccl), if the tensor is of a subclass or on a device that the group does not serve, inside torch's
coalescing manager, and under torch.compile. It comes back through mpicoll._c10d if the group is ours.
"""
