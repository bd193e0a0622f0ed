"""DeepSpeed, ZeRO. Arguments: the backend, the stage."""

import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from report import RATE, SAMPLES, STEPS, problem, report, share


def main(backend: str, stage: int) -> None:
    assert get_accelerator().device_name() == "cpu"
    deepspeed.init_distributed(backend)
    model, x, y = problem()
    config = {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(engine(share(x)), share(y))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        deepspeed.comm.all_reduce(mean)
        losses.append(mean.item() / deepspeed.comm.get_world_size())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        weights = [p.detach().clone() for p in model.parameters()]
    report(losses, weights, stage=engine.zero_optimization_stage())
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
