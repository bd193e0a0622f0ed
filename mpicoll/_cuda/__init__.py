"""GPUs. This is the only room that uses torch.cuda."""
