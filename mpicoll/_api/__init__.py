"""Door 1: torch.distributed's functions with torch's signatures, straight to the engine.

Ranks are global ranks here and group ranks below. A group of another backend (gloo, nccl), a tensor subclass, a tensor that is
not on the CPU, and a call inside torch's coalescing manager are torch's business: they go on to the function of the same name in
torch.distributed, which finds us again at door 2 where the group is ours.
"""
