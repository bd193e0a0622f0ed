"""Runs an example as a user does, and compares what it has computed before it prints its last line.

python proved.py NAME, then the options of the example. Rank 0 says what is the same.
"""

import sys
from types import ModuleType

import torch

import mpicoll as dist
from tests.project.scripts.example import imported


def say(what: str) -> None:
    if dist.get_rank() == 0:
        print(what, flush=True)


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


PROOFS = {proof.__name__: proof for proof in (lost_rank,)}


def main(name: str) -> None:
    example = imported(name)
    PROOFS[name](example)
    example.main()


if __name__ == "__main__":
    main(sys.argv.pop(1))
