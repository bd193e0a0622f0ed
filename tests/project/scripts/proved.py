"""Runs an example as a user does, and compares what it has computed before it prints its last line.

python proved.py NAME, then the options of the example. Rank 0 says what is the same.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

import mpicoll as dist
from tests.project.scripts.example import imported


def say(what: str) -> None:
    if dist.get_rank() == 0:
        print(what, flush=True)


def restart_training(example: ModuleType) -> None:
    """The weights after all attempts are those of a training without checkpoints, to the bit."""
    train = example.train

    def compared(*plan: object) -> nn.Module:
        trained, undisturbed = train(*plan), train(None)
        torch.testing.assert_close(trained.state_dict(), undisturbed.state_dict(), rtol=0, atol=0)
        say("weights as of an undisturbed training")
        return trained

    example.train = compared


def transformer_fsdp2(example: ModuleType) -> None:
    """The losses from the checkpoint on are those of the model that was saved, to the bit."""
    train, save = example.train, example.save
    straight_on: list[float] = []

    def saved(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        save(folder, model, optimizer)
        straight_on.extend(train(model, optimizer, example.STEPS // 2, example.STEPS))

    def compared(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> Sequence[float]:
        losses = train(model, optimizer, first, last)
        if first > 0:
            assert losses == straight_on, "the resumed training went another way"
            say("losses as without the checkpoint")
        return losses

    example.save, example.train = saved, compared


def lost_rank(example: ModuleType) -> None:
    """In float64 the weights are those of one process."""
    torch.set_default_dtype(torch.float64)
    train = example.train

    def compared(*plan: object) -> object:
        trained, alone = train(*plan), example.Training()
        alone.run(alone.model, 0, 1, {})
        torch.testing.assert_close(trained.model.state_dict(), alone.model.state_dict(), rtol=0, atol=1e-9)
        say("weights as in one process")
        return trained

    example.train = compared


PROOFS = {proof.__name__: proof for proof in (lost_rank, restart_training, transformer_fsdp2)}


def main(name: str) -> None:
    example = imported(name)
    PROOFS[name](example)
    example.main()


if __name__ == "__main__":
    main(sys.argv.pop(1))
