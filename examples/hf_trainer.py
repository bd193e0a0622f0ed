# python -m mpicoll.run -n 2 examples/hf_trainer.py
"""The Trainer of Hugging Face's transformers over MPI: a small GPT-2 learns to count.

Nothing here asks for MPI: under an MPI launcher, `use_cpu=True` is enough for Accelerate, which Trainer builds on, to take the
backend mpi. The model starts from random weights, and nothing is downloaded. Any number of ranks. Needs
`pip install transformers accelerate`.
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

DIGITS, LENGTH, STEPS = 10, 12, 40


def counting(start: int) -> dict[str, torch.Tensor]:
    """A sample: the last digits of start, start + 1, ... The labels are the tokens; the model shifts them itself."""
    tokens = (start + torch.arange(LENGTH)) % DIGITS
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    data = [counting(start) for start in range(1000)]
    sizes = {"vocab_size": DIGITS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=None, eos_token_id=None))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
            ddp_find_unused_parameters=False, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.remove_callback(PrinterCallback)  # a line for each step
        trainer.train()

    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    first = weights.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(weights, first), f"rank {dist.get_rank()} has other weights than rank 0"
    if trainer.is_world_process_zero():  # it alone keeps the log
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[-1] < losses[0] / 5, losses
        said = model.generate(torch.tensor([[7]]), max_new_tokens=6, do_sample=False)[0, 1:].tolist()
        assert said == [8, 9, 0, 1, 2, 3], said
        print(f"backend {dist.get_backend()}: loss {losses[0]:.1f} after step 1, {losses[-1]:.1f} after step {STEPS}")
        print("after 7 the model says", *said)
        print(f"hf_trainer: {dist.get_world_size()} ranks hold the same {len(weights):,} weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
