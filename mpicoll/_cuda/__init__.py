"""GPUs: the only room that touches torch.cuda."""
