# python -m mpicoll.run -n 2 examples/hf_tensor_parallel.py
"""Tensor-parallel inference on one node: a small Llama, split over the ranks by `tp_plan="auto"` of Hugging Face's transformers.

Each rank has its share of the attention heads, the hidden units and the vocabulary. For each token, 9 all_reduces add up what
the ranks have computed (two in each layer, one for the embedding), and an all_gather brings the logits together.

transformers makes a process group over Gloo if there is none, so the program makes its own first. `--backend gloo` runs the
same over Gloo, to compare the tokens in a second. The weights are random, and nothing is downloaded. The number of ranks must
divide the 12 heads. Needs `pip install transformers`.
"""

import argparse
import tempfile
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

HEADS, WIDTH, LAYERS, VOCABULARY = 12, 384, 4, 1200
PROMPT, TOKENS = 8, 32  # lengths: of the prompt, and of what the model says after it


def whole_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"num_attention_heads": HEADS, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **sizes)).eval()


def generated(model: LlamaForCausalLM) -> tuple[Tensor, float]:
    """What the model says after the prompt, and its tokens per second. Collective if the model is split."""
    prompt = torch.arange(PROMPT)[None]
    model.generate(prompt, max_new_tokens=2, do_sample=False)  # warm up
    began = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)[0, PROMPT:]
    return tokens, TOKENS / (time.perf_counter() - began)


def elements(model: LlamaForCausalLM) -> int:
    """The number of weights in the memory of this rank."""
    return sum(weight.to_local().numel() if isinstance(weight, DTensor) else weight.numel() for weight in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="mpi", choices=["mpi", "gloo"])
    backend = parser.parse_args().backend
    disable_progress_bar()
    whole = whole_model()
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(folder)  # each rank has a copy; once there is a process group, only rank 0 saves
        dist.init_process_group(backend)
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto")).eval()

    tokens, rate = generated(model)
    assert torch.equal(tokens, generated(whole)[0]), f"rank {dist.get_rank()}: other tokens than those of the whole model"
    if dist.get_rank() == 0:
        print(f"rank 0 has {elements(model):,} of {elements(whole):,} weights")
        print(f"backend {dist.get_backend()}: {rate:.0f} tokens/s")
        print(f"hf_tensor_parallel: {dist.get_world_size()} rank(s) generate the {len(tokens)} tokens of the whole model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
