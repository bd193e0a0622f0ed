"""transformers' Trainer; knows nothing of MPI. One argument: a folder to write to."""

import sys

import torch
from report import RATE, SAMPLES, STEPS, problem, report
from torch import nn
from transformers import Trainer, TrainingArguments


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.x, self.y = problem()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.layers(x)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


def main() -> None:
    model = Regression()
    data = [{"x": x, "labels": y} for x, y in zip(model.x, model.y, strict=True)]
    arguments = TrainingArguments(
        sys.argv[1], use_cpu=True, seed=0, max_steps=STEPS, learning_rate=RATE, per_device_train_batch_size=SAMPLES // 4,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()["eval_loss"]
    if not trainer.is_world_process_zero():
        losses = []  # only the first process logs
    report(losses, model.layers, evaluated=evaluated)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
